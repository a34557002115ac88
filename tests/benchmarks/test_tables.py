"""What the tables of races say of sessions whose times are given here."""

import full_size_table
import planners_table
import pytest
import quantization_accuracy
from checks import stamped
from full_size_table import Chosen
from sessions import Sessions

from profiling_agent.measure.session import RaceSession, SessionLimits
from profiling_agent.measure.worker import Start


def raced(*of_sessions: list[float]) -> Sessions:
    """Return sessions of one repeat each: the milliseconds of all models, the baseline's first."""
    held = [RaceSession(samples={place: [[ms]] for place, ms in enumerate(times)}) for times in of_sessions]
    stamps = [stamped({}, session=number + 1) for number in range(len(held))]
    commands = [[str(place)] for place in range(len(of_sessions[0]))]
    return Sessions(commands, Start(batch_size=1, device="cpu"), SessionLimits(), held=held, stamps=stamps)


VIT = "ViT-B/16"
NAME, PRUNED, BOTH = "openvino static", "pruned, 45% fewer MACs", "pruned, openvino static"
OURS = {"deployment": NAME, "size": 0.25, "error": 0.1}


def full_size(names: dict[str, float], *of_sessions: list[float]) -> Chosen:
    """Return what met in such sessions: names, and the share of MACs that each lacks."""
    return Chosen(VIT, [OURS], OURS, list(names.items()), raced(*of_sessions))


def test_both_together_are_compared_with_each_alone_within_sessions():
    # A slow session slows all alike: both is 1.25 times as fast as int8 in each, 10 and 12.5 times as fast as float32.
    met = {full_size_table.BASELINE: 0.0, PRUNED: 0.4, NAME: 0.0, BOTH: 0.4}
    chosen = full_size(met, [100.0, 50.0, 12.5, 10.0], [200.0, 100.0, 20.0, 16.0])
    rows = full_size_table.finals(chosen)
    found = {check.name: check for check in full_size_table.checks_of(chosen, rows)}
    over_int8, over_fp32 = (found[f"{VIT}: pruned and int8 over {other}"] for other in ("int8 alone", "eager float32"))

    assert rows[3]["over_fp32"][0] == pytest.approx((10 * 12.5) ** 0.5)
    assert rows[3]["session"] == [1, 2]
    assert [row["macs_saved"] for row in rows] == [0.0, 0.4, 0.0, 0.4]
    assert (over_int8.value, over_int8.worst, over_int8.holds) == (pytest.approx(1.25), pytest.approx(1.25), True)
    assert over_fp32.value == pytest.approx(125**0.5)
    # Of two sessions that differ by a quarter the interval reaches below twice the paper's 1.74.
    assert not over_fp32.holds


def test_a_pruned_model_is_checked_at_the_lower_end():
    chosen = full_size({full_size_table.BASELINE: 0.0, PRUNED: 0.25}, [130.0, 100.0], [120.0, 100.0], [125.0, 100.0])
    rows = full_size_table.finals(chosen)
    (check,) = [one for one in full_size_table.checks_of(chosen, rows) if PRUNED in one.name]

    value, low, _ = rows[1]["over_fp32"]
    assert value == pytest.approx(1.25)
    assert check.worst == low < 1.2
    assert check.holds == (low >= 1 + 0.7 * 0.25)


def test_ours_is_compared_with_its_peers_in_sessions_of_its_own():
    names = (full_size_table.BASELINE, full_size_table.PAPERS, full_size_table.PEER, NAME)
    chosen = full_size(dict.fromkeys(names, 0.0), *[[100.0, 50.0, 20.0, 16.0]] * 2)
    last = full_size_table.finals(chosen)
    checks = full_size_table.checks_of(chosen, last)[:4]

    assert [check.value for check in checks] == pytest.approx([6.25, 1.25, 0.25, 0.1])
    assert all(check.holds for check in checks)
    missing = full_size_table.checks_of(chosen, last[:2])[:4]
    assert [check.holds for check in missing] == [False, False, True, True]


def test_a_planner_may_not_be_slower_than_the_rules_at_the_lower_end():
    def row(planner: str, *over: float) -> dict:
        return {"model": "vit", "persona": "careful", "planner": planner, "seconds": 60.0, "over_rules": list(over)}

    rows = [row("rules", 1.0, 1.0, 1.0), row("hybrid", 1.0, 0.9, 1.1), row("llm", 0.7, 0.6, 0.8)]
    found = {check.name: check.holds for check in planners_table.checks_of(rows)}

    assert found["vit, careful, hybrid: speed over the rules'"] is False
    assert "vit, careful, llm: speed over the rules'" not in found
    assert [name for name, holds in found.items() if not holds] == ["vit, careful, hybrid: speed over the rules'"]


def test_what_a_choice_loses_is_checked_at_the_upper_end():
    (check,) = quantization_accuracy.checks_of(
        "vit", {"deployment": "openvino static", "heldout": [0.003, -0.001, 0.007]}
    )

    assert (check.value, check.worst, check.holds) == (pytest.approx(0.3), pytest.approx(0.7), False)
