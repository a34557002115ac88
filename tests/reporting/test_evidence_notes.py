from made import evidence, profile

from profiling_agent.reporting.report import evidence_notes


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
