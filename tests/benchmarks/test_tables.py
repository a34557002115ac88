"""What the tables of races say of sessions whose times are given here."""

from pathlib import Path

import joint
import planners_table
import pruned_latency
import pytest
import quantization_accuracy
import quantization_table
from checks import stamped
from sessions import Sessions

from profiling_agent.benchmarking.session import RaceSession, SessionLimits
from profiling_agent.benchmarking.worker import Start
from profiling_agent.records import Variant


def raced(*of_sessions: list[float]) -> Sessions:
    """Return sessions of one repeat each: the milliseconds of all models, the baseline's first."""
    held = [RaceSession(samples={place: [[ms]] for place, ms in enumerate(times)}) for times in of_sessions]
    stamps = [stamped({}, session=number + 1) for number in range(len(held))]
    commands = [[str(place)] for place in range(len(of_sessions[0]))]
    return Sessions(commands, Start(batch_size=1, device="cpu"), SessionLimits(), held=held, stamps=stamps)


def test_both_together_are_compared_with_each_alone_within_sessions():
    # A slow session slows all alike: both is 1.25 times as fast as int8 in each, 10 and 12.5 times as fast as float32.
    variants = [
        (variant, "eager", [""]) for variant in (Variant.BASELINE, Variant.PRUNED, Variant.QUANTIZED, Variant.BOTH)
    ]
    model = joint.FullSize("ViT-B/16", variants, 0.4, raced([100.0, 50.0, 12.5, 10.0], [200.0, 100.0, 20.0, 16.0]))
    rows = model.rows()
    pruned, quantized, aim = model.checks(rows)

    assert rows[3]["speedup"][0] == pytest.approx((10 * 12.5) ** 0.5)
    assert rows[3]["session"] == [1, 2]
    assert [row["macs_saved"] for row in rows] == [0.0, 0.4, 0.0, 0.4]
    assert (quantized.value, quantized.worst, quantized.holds) == (pytest.approx(1.25), pytest.approx(1.25), True)
    assert pruned.value == pytest.approx(31.25**0.5)
    assert not aim.holds


def test_variants_of_a_run_are_compared_by_a_ratio_with_an_interval():
    def row(variant: Variant, *speedup: float) -> dict:
        return {"variant": variant, "speedup": list(speedup), "drop": 0.001}

    alone = [row(Variant.PRUNED, 1.5, 1.4, 1.6), row(Variant.QUANTIZED, 7.12, 6.81, 7.41)]
    pruned, quantized = joint.beats_each_alone("resnet", [*alone, row(Variant.BOTH, 7.33, 7.0, 7.67)])

    assert pruned.holds
    # The upper end of both is above the estimate of int8 alone; the ratio's lower end isn't above 1.
    assert quantized.value == pytest.approx(7.33 / 7.12)
    assert not quantized.holds


def test_a_pruned_model_is_checked_as_deployed_at_the_lower_end():
    made = [
        (Path(name), {"model": "ViT-B/16", "asked": asked, "macs_saved": asked, "params_saved": asked})
        for name, asked in (("a", 0.0), ("b", 0.25))
    ]
    rows = pruned_latency.rows_of(made, raced([130.0, 100.0], [120.0, 100.0], [125.0, 100.0]))
    check = pruned_latency.check_of(rows[1])

    assert {row["allocator"] for row in rows} == {"as deployed"}
    assert rows[1]["speedup"] == pytest.approx((1.3 * 1.2 * 1.25) ** (1 / 3))
    assert check.worst == rows[1]["speedup_low"] < 1.2
    assert check.holds == (rows[1]["speedup_low"] >= 1 + 0.7 * 0.25)


def test_ours_is_compared_with_its_peers_in_sessions_of_its_own():
    names = [quantization_table.BASELINE, quantization_table.PAPERS, quantization_table.PEER, "openvino static"]
    ours = {"deployment": "openvino static", "size": 0.25, "error": 0.1}
    field = raced([100.0, 50.0, 20.0, 16.0], [100.0, 50.0, 20.0, 16.0])
    last = quantization_table.finals(quantization_table.Chosen("ViT-B/16", [ours], ours, names, field))
    checks = quantization_table.checks_of("ViT-B/16", ours, last)

    assert [check.value for check in checks] == pytest.approx([6.25, 1.25, 0.25, 0.1])
    assert all(check.holds for check in checks)
    missing = quantization_table.checks_of("ViT-B/16", ours, last[:2])
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
