from made import evidence, profile

from profiling_agent.profiling.profile import launch_bound_share
from profiling_agent.reporting.report import evidence_notes, gpu_lines
from profiling_agent.schemas import Energy


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
