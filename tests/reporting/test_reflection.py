"""What a finished run says of itself: predictions beside measurements, and a reason for every unit."""

from pathlib import Path

import pytest

from profiling_agent.reporting.render import render_markdown
from profiling_agent.reporting.report import RunReport, choices, is_off, predictions, subject_of
from profiling_agent.schemas import Cap, Plan, PruningRecommendation, Target


@pytest.fixture
def report(finished: Path) -> RunReport:
    return RunReport.model_validate_json((finished / "report.json").read_text())


@pytest.mark.parametrize(
    ("predicted", "measured", "floor", "off"),
    [
        (0.01, 0.019, 1e-4, False),
        (0.01, 0.021, 1e-4, True),
        (0.021, 0.01, 1e-4, True),
        (9e-5, 1e-6, 1e-4, False),
        (0.3, 0.0, 0.02, True),
        (0.3, -0.1, 0.02, True),
        (0.0, 0.0, 0.0, False),
    ],
)
def test_twice_is_the_bound_above_the_noise(predicted: float, measured: float, floor: float, off: bool):
    assert is_off(predicted, measured, floor) is off


def test_counts_are_predicted_exactly(report: RunReport):
    attempt = report.attempts[0]
    rows = {row.what: row for row in predictions(attempt, report)}

    assert {"params", "macs", "KL"} <= rows.keys()
    assert rows["params"].predicted == rows["params"].measured
    assert not rows["macs"].is_off


def test_a_kl_that_is_far_off_is_marked_in_the_report(report: RunReport):
    attempt = report.attempts[0]
    assert attempt.dry_run is not None
    assert attempt.calibration_kl is not None
    wrong = attempt.dry_run.model_copy(update={"kl": 3 * attempt.calibration_kl + 1})
    changed = report.model_copy(update={"attempts": (attempt.model_copy(update={"dry_run": wrong}),)})

    assert next(row for row in predictions(changed.attempts[0], changed) if row.what == "KL").is_off
    assert "**off by more than twice**" in render_markdown(changed)


def test_every_unit_has_its_reason(report: RunReport):
    attempt = subject_of(report)
    assert attempt is not None
    assert attempt.dry_run is not None
    rows = {row.unit: row for row in choices(report, attempt)}

    assert set(rows) >= {row.unit for row in report.sensitivity}
    assert all(row.reason for row in rows.values())
    for cut in attempt.dry_run.cuts:
        assert rows[cut.unit.name].kept == cut.keep < rows[cut.unit.name].width
        assert "nats alone" in rows[cut.unit.name].reason


def test_reasons_follow_the_plan(report: RunReport):
    attempt = report.attempts[0]
    assert attempt.dry_run is not None
    first = attempt.dry_run.cuts[0].unit.name
    others = attempt.dry_run.model_copy(update={"cuts": attempt.dry_run.cuts[:1], "notes": ()})
    named = Plan(
        pruning=(
            PruningRecommendation(
                layer=first, pruning_type="structured", pruning_ratio=0.5, justification="it is wide"
            ),
        ),
    )
    told = choices(report, attempt.model_copy(update={"plan": named, "dry_run": others}))
    assert next(row.reason for row in told if row.unit == first).startswith("the plan cuts 50% of it: it is wide (")
    assert {row.reason for row in told if row.unit != first} == {"the plan doesn't name it"}

    capped = Plan(target=Target(saving=0.3), caps=(Cap(layer="layers"),))
    told = choices(report, attempt.model_copy(update={"plan": capped, "dry_run": others}))
    assert "the plan leaves 'layers' alone" in {row.reason for row in told}
