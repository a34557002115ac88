"""The report's parts: card, notes, machines, omissions and reflection."""

from pathlib import Path
from typing import Any

import pytest
from sample_records import evidence, profile

from profiling_agent import schemas
from profiling_agent.reporting.render import render_html, render_text
from profiling_agent.reporting.report import (
    RunReport,
    card_judged,
    card_notes,
    card_rows,
    differences,
    evidence_notes,
    final_attempt,
    gpu_lines,
    omissions,
    predictions,
    read_report,
    unit_decisions,
)
from profiling_agent.reporting.units import count, percent
from profiling_agent.runtimes.artifact import HeldOutAccuracy
from profiling_agent.runtimes.registry import recommend


@pytest.fixture(scope="module")
def report(finished: Path) -> RunReport:
    return read_report(finished)


def with_request(report: RunReport, **changed: Any) -> RunReport:
    return report.model_copy(update={"request": report.request.model_copy(update=changed)})


def elsewhere(report: RunReport, **changed: Any) -> RunReport:
    return report.model_copy(update={"environment": report.environment.model_copy(update=changed)})


def test_the_hub_is_told_of_its_own_data_sets_alone(report: RunReport, tmp_path: Path):
    of_the_hub = with_request(report, dataset="uoft-cs/cifar10", dataset_config="plain_text")

    assert card_judged(of_the_hub) == HeldOutAccuracy(
        dataset="uoft-cs/cifar10",
        config="plain_text",
        split=report.acquired.heldout.source_split,
        top1=report.best.top1,
    )
    # Neither a folder here nor what comes with the package is a data set that others can look up.
    assert card_judged(with_request(report, dataset=str(tmp_path))) is None
    assert card_judged(with_request(report, dataset="digits")) is None


def test_the_card_has_the_verdict_the_processor_and_both_models(report: RunReport):
    here, notes = report.environment, card_notes(report)
    rows = {row.name: (row.before, row.after) for row in card_rows(report)}

    assert here.cpu
    assert notes[0] == f"{report.verdict.outcome}: {report.verdict.explanation}."
    assert notes[-1].startswith(f"Measured on {here.cpu}, {here.num_threads} threads, {here.system}, device ")
    assert rows["params"] == (count(report.baseline.params), count(report.best.params))
    assert rows[f"top-1 on {report.best.num_images:,} held-out images"][1] == percent(report.best.top1)


def test_card_and_report_name_the_gpu(report: RunReport):
    gpu = schemas.Gpu(
        name="NVIDIA H100", compute_capability="9.0", memory_bytes=80 * 2**30, driver="580.1", cuda="13.0"
    )
    there = elsewhere(report, gpu=gpu).model_copy(update={"on_gpu": ("baseline: launch-bound 90% of a pass",)})
    text = render_text("report", r=there)

    assert "NVIDIA H100 (compute capability 9.0, 80 GiB)" in card_notes(there)[-1]
    assert "- NVIDIA H100 (compute capability 9.0, 80 GiB), NVIDIA driver 580.1, CUDA 13.0\n" in text
    assert "## Where the model spends, before and after\n\n- baseline: launch-bound 90% of a pass\n\n| layers" in text


def test_where_the_baseline_is_returned_the_terms_are_those_of_what_was_refused(report: RunReport):
    baseline = report.best.model_copy(update={"variant": schemas.Variant.BASELINE})

    # The second in line may pass after the first was refused.
    for changes in ({}, {"kept_beside": "jobs/x"}, {"best": baseline}):
        assert report.model_copy(update=changes).judged == "the returned model"
    refused = report.model_copy(update={"best": baseline, "kept_beside": "jobs/x"})
    assert refused.judged == "the candidate that held-out images refused, kept beside"


def test_how_many_images_would_certify_stands_next_to_how_many_there_are(report: RunReport):
    verdict = report.verdict.model_copy(update={"images_to_certify": 5216})
    expected = f"About 5,216 held-out images would certify it; there are {report.acquired.heldout.num_images}."

    assert report.model_copy(update={"verdict": verdict}).certifying == expected


def test_notes_on_evidence_say_that_there_is_none_or_that_a_busy_machine_timed_it():
    found = profile(3)
    gathered = evidence(found.units, {unit.name: [0.1, 0.2] for unit in found.units}, latency=lambda keep: 1.0)
    rows = (*(row.model_copy(update={"is_unsteady": True}) for row in gathered.units[:2]), gathered.units[2])
    busy = found.model_copy(update={"evidence": gathered.model_copy(update={"units": rows})})

    assert evidence_notes(found.model_copy(update={"evidence": gathered})) == evidence_notes(found) == ()
    assert "what 2 of 3 units save of the time is a guess" in evidence_notes(busy)[0]
    (note,) = evidence_notes(found.model_copy(update={"evidence_note": "12 images are too few"}))
    assert note.endswith("ratios are uniform: 12 images are too few")


def test_what_a_gpu_does_in_a_pass_is_said_first_and_its_energy_after():
    found = profile(3)
    energy = schemas.Energy(joules_per_image=0.0123, watts=412.0, idle_watts=71.4, images=3200)
    headline = found.headline.model_copy(update={"energy": energy})
    on_gpu = found.model_copy(update={"launch_bound_share": 0.9, "headline": headline})
    launches, joules = gpu_lines({"baseline": on_gpu})

    assert launches.startswith("baseline: launch-bound 90% of a pass")
    assert joules == "baseline: 0.0123 J an image at 412 W, idle 71 W"
    assert gpu_lines({"baseline": found}) == ()


def test_what_makes_times_of_runs_incomparable_is_named_one_a_line(report: RunReport):
    environment, xeon = report.environment, elsewhere(report, cpu="Xeon 9000", num_threads=64)
    newer = elsewhere(report, libraries=environment.libraries | {"torch": "99.0"}, runtimes={})
    lines = differences({"then": report, "now": with_request(newer, batch_size=77)})

    assert differences({"mild": report, "bold": report}) == differences({"alone": report}) == ()
    assert differences({"here": report, "there": xeon}) == (
        f"machine: here: {environment.machine}; there: Xeon 9000, 64 threads",
    )
    # A cloud calls processors that can do different things "Intel(R) Xeon(R) Processor".
    assert len(differences({"old": xeon, "new": elsewhere(xeon, cpu_flags=("avx512_vnni",))})) == 1
    assert lines[0] == f"batch size: then: {report.request.batch_size}; now: 77"
    # What is not installed is a difference too.
    assert {line.partition(":")[0] for line in lines[1:]} == {"torch", *environment.runtimes}


UNTRIED = schemas.DeploymentOption(
    deployment=schemas.Deployment(runtime="inductor", scheme="static", recommendations=recommend("static")),
    reason="not tried: a conversion takes minutes",
    wants_time=True,
)


def test_what_wanted_time_is_listed_in_the_order_of_the_run_if_there_is_any(report: RunReport):
    report = with_request(report, max_iterations=4)
    seen = report.heldout.predictions.num_images
    accuracy, *others = report.verdict.terms
    undecided = (accuracy.model_copy(update={"holds": True, "bound": accuracy.required + 0.01}), *others)
    heldout = report.acquired.heldout.model_copy(update={"num_images": seen + 1000})
    options = (UNTRIED, UNTRIED.model_copy(update={"wants_time": False}))
    changes = {
        "deployment_search": schemas.DeploymentSearch(options=options, chosen=None),
        "stopped": schemas.StopReason.TIME_SPENT,
        "verdict": report.verdict.model_copy(update={"terms": undecided}),
        "acquired": report.acquired.model_copy(update={"heldout": heldout}),
    }
    hurried = report.model_copy(update=changes)
    lines = omissions(hurried)

    assert lines == (
        "deployments that were not measured: inductor static",
        f"plans: {len(report.attempts)} of up to 4 were measured",
        f"held-out images: {seen:,} of {seen + 1000:,} were looked at",
    )
    page, text = render_html(hurried), render_text("report", r=hurried)
    for line in lines:
        assert f"<li>{line}</li>" in page
        assert f"\n- {line}\n" in text


def test_counts_are_predicted_exactly_and_a_kl_that_is_far_off_is_marked(report: RunReport):
    attempt = report.attempts[0]
    rows = {name: others for name, *others in predictions(attempt, report)}

    assert rows["params"][0] == rows["params"][1]
    assert rows["MACs"][2] == ""

    def marks(predicted: float, measured: float) -> str:
        dry_run = attempt.dry_run and attempt.dry_run.model_copy(update={"kl": predicted})
        changed = attempt.model_copy(update={"dry_run": dry_run, "calibration_kl": measured})
        return {row[0]: row[3] for row in predictions(changed, report)}["KL"]

    assert marks(0.01, 0.021) == marks(0.021, 0.01) == marks(0.3, 0.0) == "off by more than twice"
    # Up to twice, and noise.
    assert marks(0.01, 0.019) == marks(9e-5, 1e-6) == marks(0.0, 0.0) == ""


def test_every_unit_has_its_reason(report: RunReport):
    attempt = final_attempt(report)
    assert attempt is not None
    assert attempt.dry_run is not None
    rows = {row.unit: row for row in unit_decisions(report, attempt)}

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
    half = {"layer": first, "pruning_type": "structured", "pruning_ratio": 0.5, "justification": "it is wide"}

    def reasons(plan: schemas.Plan) -> dict[str, str]:
        changed = attempt.model_copy(update={"plan": plan, "dry_run": others})
        return {row.unit: row.reason for row in unit_decisions(report, changed)}

    named = reasons(schemas.Plan.model_validate({"pruning": [half]}))
    assert named.pop(first).startswith("the plan cuts 50% of it: it is wide: ")
    assert {*named.values()} == {"the plan doesn't name it"}
    capped = reasons(schemas.Plan(target=schemas.Target(saving=0.3), caps=(schemas.Cap(layer="layers"),)))
    assert "the plan leaves 'layers' alone" in capped.values()
