"""What a report says of its verdict: of which model it is, and how many images would certify it."""

from pathlib import Path

import pytest

from profiling_agent.records import Variant
from profiling_agent.reporting.report import RunReport

KEPT = Path(__file__).parents[1] / "fixtures" / "reports" / "0.1.0-s6.json"


@pytest.fixture(scope="module")
def report() -> RunReport:
    return RunReport.model_validate_json(KEPT.read_text(encoding="utf-8"))


def test_where_the_baseline_is_returned_the_terms_are_those_of_what_was_refused(report: RunReport):
    baseline = report.best.model_copy(update={"variant": Variant.BASELINE})

    assert report.judged == "the returned model"
    # The second in line may pass after the first was refused.
    assert report.model_copy(update={"kept_beside": "jobs/x"}).judged == "the returned model"
    assert report.model_copy(update={"best": baseline}).judged == "the returned model"
    refused = report.model_copy(update={"best": baseline, "kept_beside": "jobs/x"})
    assert refused.judged == "the candidate that held-out images refused, kept beside"


@pytest.mark.parametrize(
    ("number", "said"),
    [
        (None, ""),
        (200, "About 200 held-out images would certify it."),
        (5216, "About 5,216 held-out images would certify it; there are 209."),
    ],
)
def test_how_many_images_would_certify_is_told_beside_how_many_there_are(
    report: RunReport, number: int | None, said: str
):
    assert report.acquired.heldout.num_images == 209
    verdict = report.verdict.model_copy(update={"images_to_certify": number})

    assert report.model_copy(update={"verdict": verdict}).certifying == said
