"""The report's parts: card, notes, machines, omissions and reflection."""

from pathlib import Path
from typing import Any

import pytest
from sample_records import evidence, profile

from profiling_agent.profiling.profile import launch_bound_share
from profiling_agent.reporting.render import render_html, render_markdown
from profiling_agent.reporting.report import (
    RunReport,
    differences,
    evidence_notes,
    final_attempt,
    gpu_lines,
    is_off,
    omissions,
    predictions,
    unit_decisions,
)
from profiling_agent.reporting.results import (
    card_judged,
    card_notes,
    card_rows,
    read_report,
)
from profiling_agent.reporting.units import count, percent
from profiling_agent.runtimes.artifact import HeldOutAccuracy
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import (
    Cap,
    Deployment,
    DeploymentOption,
    DeploymentSearch,
    Energy,
    Gpu,
    Plan,
    PruningRecommendation,
    StopReason,
    Target,
    Variant,
)

KEPT = Path(__file__).parents[1] / "fixtures" / "reports" / "0.1.0-s6.json"


@pytest.fixture(scope="module")
def report() -> RunReport:
    return RunReport.model_validate_json(KEPT.read_text(encoding="utf-8"))


def asked(report: RunReport, **changed: Any) -> RunReport:
    return report.model_copy(update={"request": report.request.model_copy(update=changed)})


def test_the_hub_is_told_of_its_own_data_sets_alone(report: RunReport, tmp_path: Path):
    of_the_hub = asked(report, dataset="uoft-cs/cifar10", dataset_config="plain_text")

    assert card_judged(of_the_hub) == HeldOutAccuracy(
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


def timed(num_unsteady):
    """A profile of three units, of which so many were timed on a busy machine."""
    found = profile(3)
    gathered = evidence(found.units, {unit.name: [0.1, 0.2] for unit in found.units}, latency=lambda keep: 1.0)
    rows = tuple(
        row.model_copy(update={"is_unsteady": number < num_unsteady}) for number, row in enumerate(gathered.units)
    )
    return found.model_copy(update={"evidence": gathered.model_copy(update={"units": rows})})


def test_the_report_says_how_many_units_a_busy_machine_timed():
    assert evidence_notes(timed(0)) == ()
    (note,) = evidence_notes(timed(2))
    assert "what 2 of 3 units save of the time is a guess" in note


def test_the_report_says_why_there_is_no_evidence():
    without = profile(3).model_copy(update={"evidence_note": "12 images are too few"})
    (note,) = evidence_notes(without)
    assert note.endswith("ratios are uniform: 12 images are too few")
    assert evidence_notes(profile(3)) == ()


def test_what_a_gpu_does_in_a_pass_is_said_first_and_its_energy_after():
    found = profile(3)
    energy = Energy(joules_per_image=0.0123, watts=412.0, idle_watts=71.4, images=3200)
    headline = found.headline.model_copy(update={"energy": energy})
    on_gpu = found.model_copy(update={"launch_bound_share": launch_bound_share(1.0, 10.0), "headline": headline})
    launches, joules = gpu_lines({"baseline": on_gpu})

    assert launches.startswith("baseline: launch-bound 90% of a pass")
    assert joules == "baseline: 0.0123 J an image at 412 W, idle 71 W"
    assert gpu_lines({"baseline": found}) == ()
    assert launch_bound_share(None, 10.0) is None
    # Kernels of several streams overlap.
    assert launch_bound_share(12.0, 10.0) == 0.0


def elsewhere(report: RunReport, **changed: Any) -> RunReport:
    return report.model_copy(update={"environment": report.environment.model_copy(update=changed)})


def test_runs_of_one_machine_and_one_installation_differ_in_nothing(finished: Path):
    report = read_report(finished)

    assert differences({"mild": report, "bold": report}) == ()
    assert differences({"alone": report}) == ()


def test_runs_of_two_processors_are_told_apart_by_name(finished: Path):
    report = read_report(finished)
    xeon = elsewhere(report, cpu="Xeon 9000", num_threads=64, cpu_flags=("amx_int8",))

    (line,) = differences({"here": report, "again": report, "there": xeon})

    assert line.startswith("runs of different machines, whose times and speed-ups aren't compared")
    assert f"here, again: {report.environment.machine}" in line
    assert "there: Xeon 9000, 64 threads (amx_int8;" in line
    assert "profiling-agent race" in line


def test_one_name_for_processors_that_can_do_different_things_is_no_one_machine(finished: Path):
    # A cloud calls them all "Intel(R) Xeon(R) Processor".
    report = elsewhere(read_report(finished), cpu="Xeon", cpu_flags=("avx2",))

    (line,) = differences({"old": report, "new": elsewhere(report, cpu_flags=("avx2", "avx512_vnni"))})

    assert "old: Xeon" in line
    assert "(avx2, avx512_vnni;" in line


def test_other_versions_threads_and_batches_are_named_one_a_line(finished: Path):
    report = read_report(finished)
    environment = report.environment
    newer = elsewhere(report, libraries=environment.libraries | {"torch": "99.0"}, runtimes={})
    larger = newer.model_copy(update={"request": report.request.model_copy(update={"batch_size": 77})})

    said = differences({"then": report, "now": larger})

    assert said[0] == f"times are of batches of different sizes: then: {report.request.batch_size}; now: 77"
    assert f"times are of different versions of torch: then: {environment.libraries['torch']}; now: 99.0" in said
    # What is not installed is a difference too.
    assert any(line.endswith("now: none") for line in said) == bool(environment.runtimes)
    assert len(said) == 2 + len(environment.runtimes)


UNTRIED = DeploymentOption(
    deployment=Deployment(runtime="inductor", scheme="static", recommendations=recommend("static")),
    reason="not tried: a conversion takes minutes",
    wants_time=True,
)


def test_what_wanted_time_is_listed_in_the_order_of_the_run(finished: Path):
    report = read_report(finished)
    seen = report.heldout.predictions.num_images
    search = DeploymentSearch(options=(UNTRIED, UNTRIED.model_copy(update={"wants_time": False})), chosen=None)
    accuracy, *others = report.verdict.terms
    undecided = (accuracy.model_copy(update={"holds": True, "bound": accuracy.required + 0.01}), *others)
    hurried = report.model_copy(
        update={
            "deployment_search": search,
            "stopped": StopReason.TIME_SPENT,
            "verdict": report.verdict.model_copy(update={"terms": undecided}),
            "request": report.request.model_copy(update={"max_iterations": 4}),
            "acquired": report.acquired.model_copy(
                update={"heldout": report.acquired.heldout.model_copy(update={"num_images": seen + 1000})}
            ),
        }
    )

    said = omissions(hurried)

    assert said == (
        "deployments that were not tried: inductor static",
        f"plans: {len(report.attempts)} of up to 4 were measured",
        f"held-out images: {seen:,} of {seen + 1000:,} were looked at",
    )
    page, text = render_html(hurried), render_markdown(hurried)
    for line in said:
        assert f"<li>{line}</li>" in page
        assert f"\n- {line}\n" in text


def test_a_run_that_left_nothing_out_has_no_list(finished: Path):
    report = read_report(finished)
    whole = report.model_copy(
        update={
            "deployment_search": None,
            "stopped": StopReason.CONVERGED,
            "request": report.request.model_copy(update={"time_budget": None}),
        }
    )

    assert omissions(whole) == ()
    assert "want of time" not in render_html(whole)
    assert "want of time" not in render_markdown(whole)


@pytest.fixture
def reflected(finished: Path) -> RunReport:
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


def test_counts_are_predicted_exactly(reflected: RunReport):
    attempt = reflected.attempts[0]
    rows = {row.what: row for row in predictions(attempt, reflected)}

    assert {"params", "macs", "KL"} <= rows.keys()
    assert rows["params"].predicted == rows["params"].measured
    assert not rows["macs"].is_off


def test_a_kl_that_is_far_off_is_marked_in_the_report(reflected: RunReport):
    attempt = reflected.attempts[0]
    assert attempt.dry_run is not None
    assert attempt.calibration_kl is not None
    wrong = attempt.dry_run.model_copy(update={"kl": 3 * attempt.calibration_kl + 1})
    changed = reflected.model_copy(update={"attempts": (attempt.model_copy(update={"dry_run": wrong}),)})

    assert next(row for row in predictions(changed.attempts[0], changed) if row.what == "KL").is_off
    assert "**off by more than twice**" in render_markdown(changed)


def test_every_unit_has_its_reason(reflected: RunReport):
    attempt = final_attempt(reflected)
    assert attempt is not None
    assert attempt.dry_run is not None
    rows = {row.unit: row for row in unit_decisions(reflected, attempt)}

    assert set(rows) >= {row.unit for row in reflected.sensitivity}
    assert all(row.reason for row in rows.values())
    for cut in attempt.dry_run.cuts:
        assert rows[cut.unit.name].kept == cut.keep < rows[cut.unit.name].width
        assert "nats alone" in rows[cut.unit.name].reason


def test_reasons_follow_the_plan(reflected: RunReport):
    attempt = reflected.attempts[0]
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
    told = unit_decisions(reflected, attempt.model_copy(update={"plan": named, "dry_run": others}))
    assert next(row.reason for row in told if row.unit == first).startswith("the plan cuts 50% of it: it is wide (")
    assert {row.reason for row in told if row.unit != first} == {"the plan doesn't name it"}

    capped = Plan(target=Target(saving=0.3), caps=(Cap(layer="layers"),))
    told = unit_decisions(reflected, attempt.model_copy(update={"plan": capped, "dry_run": others}))
    assert "the plan leaves 'layers' alone" in {row.reason for row in told}
