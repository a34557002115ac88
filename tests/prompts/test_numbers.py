"""What can be reached by the planners' golden prompts, worked out again from the records, without the code that wrote it."""

import re
from itertools import pairwise

import pytest
from asked import (
    DEAR,
    FIRST_KL,
    NUM_UNITS,
    STEPS,
    questions,
)

POINT = re.compile(
    r"^(?P<metric>\w+)(?: \(its maximum\))? \| (?P<shares>[\d.%, ]+) \| (?P<kl>[\d.e+-]+) \| G1 (?P<least>\d+)%(?: to (?P<most>\d+)%)?$",
    re.MULTILINE,
)
# Of a unit's 512 channels each owns 10 params and 20 MACs; the norm beside all has 64 params and takes a millisecond of 49.
WIDTH, STEP, PARAMS, MACS = 512, 32, NUM_UNITS * 5120 + 64, NUM_UNITS * 10240
# The units take 10 ms each when they are timed alone, which is 48 of 49 parts of all.
WHOLE_MS = 10 * NUM_UNITS * 49 / 48


def cheapest() -> dict[int, float]:
    """Return, for each number of channels that can go from all units together, the least KL at which so many do."""
    keeps = [WIDTH - STEP * (index + 1) for index in range(15) if WIDTH - STEP * (index + 1) >= WIDTH // 4]
    chosen = [keeps[(index + 1) * len(keeps) // STEPS - 1] for index in range(STEPS)]
    best = {0: 0.0}
    for unit in range(NUM_UNITS):
        options = [(0, 0.0)] + [
            (WIDTH - keep, FIRST_KL * (8 if unit == DEAR else 1) * 2**step) for step, keep in enumerate(chosen)
        ]
        after: dict[int, float] = {}
        for gone, kl in best.items():
            for more, cost in options:
                if kl + cost < after.get(gone + more, float("inf")):
                    after[gone + more] = kl + cost
        best = after
    return best


def shares(gone: int) -> str:
    """Return what so many channels are of params, MACs and time: a channel takes a 64th of a millisecond."""
    return f"{gone * 10 / PARAMS:.1%}, {gone * 20 / MACS:.1%}, {gone / 64 / WHOLE_MS:.1%}"


@pytest.mark.parametrize("agent", ["analysis", "iterative_pruning"])
def test_what_can_be_reached_is_the_least_that_the_evidence_allows(agent: str):
    least = cheapest()
    evidence = questions()[agent].evidence
    points = list(POINT.finditer(evidence))

    assert [row["metric"] for row in points].count("params") == 6
    for row in points:
        gone = round(float(row["shares"].split("%")[0]) / 100 * PARAMS / 10 / STEP) * STEP
        assert row["shares"] == shares(gone)
        assert row["kl"] == f"{least[gone]:.2g}"
        # Nothing that is cheaper saves more.
        assert all(kl >= least[gone] * 0.999 for more, kl in least.items() if more > gone)
    assert float(points[5]["kl"]) == float(f"{least[max(least)]:.2g}")
    assert all(float(one["kl"]) < float(other["kl"]) for one, other in pairwise(points[:6]))
