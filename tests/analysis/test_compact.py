from made import evidence, profile

from profiling_agent.analysis.compact import LEGEND, evidence_rows


def test_a_row_tells_what_three_widths_cost_and_save():
    found = profile()
    unit = found.units[0]
    judged = evidence(found.units, {each.name: (0.001, 0.02, 0.3) for each in found.units}, latency=lambda keep: 1.25)
    row, *others = evidence_rows(found.model_copy(update={"evidence": judged}))
    options = judged.units[0].options

    assert len(others) == len(found.units) - 1
    assert row.startswith(f"{unit.name}, mlp, {unit.width}: {options[0].keep} = 0.001, ")
    assert row.endswith(
        f"{options[2].keep} = 0.3, {100 * options[2].params_saved / found.params:.2g}, "
        f"{100 * options[2].macs_saved / found.macs:.2g}, 1.2"
    )
    assert row.count(";") == 2
    assert LEGEND.count(":") == 1


def test_widths_that_serve_two_shares_are_told_once_and_unknown_times_not_at_all():
    found = profile()
    judged = evidence(found.units, {each.name: (0.5,) for each in found.units})
    row = evidence_rows(found.model_copy(update={"evidence": judged}))[0]

    assert ";" not in row
    assert row.count(",") == 4


def test_without_evidence_there_are_no_rows():
    assert evidence_rows(profile()) == ()
