"""A returned model's card, what the Hub is told of it, and of which model a verdict is."""

from pathlib import Path
from typing import Any

import pytest

from profiling_agent.reporting.render import render_markdown
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.results import card_judged, card_notes, card_rows
from profiling_agent.reporting.units import count, percent
from profiling_agent.runtimes.artifact import Judged
from profiling_agent.schemas import Gpu, Variant

KEPT = Path(__file__).parents[1] / "fixtures" / "reports" / "0.1.0-s6.json"


@pytest.fixture(scope="module")
def report() -> RunReport:
    return RunReport.model_validate_json(KEPT.read_text(encoding="utf-8"))


def asked(report: RunReport, **changed: Any) -> RunReport:
    return report.model_copy(update={"request": report.request.model_copy(update=changed)})


def test_the_hub_is_told_of_its_own_data_sets_alone(report: RunReport, tmp_path: Path):
    of_the_hub = asked(report, dataset="uoft-cs/cifar10", dataset_config="plain_text")

    assert card_judged(of_the_hub) == Judged(
        dataset="uoft-cs/cifar10",
        config="plain_text",
        split=report.acquired.heldout.source_split,
        top1=report.best.top1,
    )
    # Neither a folder here nor what comes with the package is a data set that others can look up.
    assert card_judged(asked(report, dataset=str(tmp_path))) is None
    assert card_judged(asked(report, dataset="digits")) is None


def test_times_are_told_with_the_processor_that_they_were_measured_on(report: RunReport):
    here = report.environment

    notes = card_notes(report)

    assert here.cpu
    assert notes[0] == f"{report.verdict.outcome}: {report.verdict.explanation}."
    assert notes[-1].startswith(f"Measured on {here.cpu}, {here.num_threads} threads, {here.system}, device ")


def test_card_and_report_name_the_gpu(report: RunReport):
    gpu = Gpu(name="NVIDIA H100", compute_capability="9.0", memory_bytes=80 * 2**30, driver="580.1", cuda="13.0")
    there = report.model_copy(
        update={
            "environment": report.environment.model_copy(update={"gpu": gpu}),
            "on_gpu": ("baseline: launch-bound 90% of a pass",),
        }
    )
    text = render_markdown(there)

    assert "NVIDIA H100 (compute capability 9.0, 80 GiB)" in card_notes(there)[-1]
    assert "- NVIDIA H100 (compute capability 9.0, 80 GiB), NVIDIA driver 580.1, CUDA 13.0\n" in text
    assert "## Where the model spends, before and after\n\n- baseline: launch-bound 90% of a pass\n\n| layers" in text
    assert "before and after\n\n| layers" in render_markdown(report)


def test_before_and_after_are_the_baselines_and_the_returned_models(report: RunReport):
    rows = {row.name: (row.before, row.after) for row in card_rows(report)}

    assert rows["params"] == (count(report.baseline.params), count(report.best.params))
    assert rows[f"top-1 on {report.best.num_images:,} held-out images"][1] == percent(report.best.top1)


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
