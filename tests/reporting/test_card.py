"""What a returned model's card says of its measurements, and what the Hub is told of them."""

from pathlib import Path
from typing import Any

import pytest

from profiling_agent.artifacts.card import Judged
from profiling_agent.reporting.card import card_judged, card_notes, card_rows
from profiling_agent.reporting.report import RunReport
from profiling_agent.reporting.units import count, percent

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


def test_before_and_after_are_the_baselines_and_the_returned_models(report: RunReport):
    rows = {row.name: (row.before, row.after) for row in card_rows(report)}

    assert rows["params"] == (count(report.baseline.params), count(report.best.params))
    assert rows[f"top-1 on {report.best.num_images:,} held-out images"][1] == percent(report.best.top1)
