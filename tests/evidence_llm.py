"""A language model that follows the evidence: it reads the prompt, computes its plan from that, and knows nothing else."""

import json
import math
import re
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

GROUP = re.compile(r'^G\d+: (?P<name>"(?:[^"\\]|\\.)*") \| (?P<kind>\w+) \| \d+ x \d+ \| ', re.MULTILINE)
POINT = re.compile(
    r"^(?:params|macs|latency)(?: \(its maximum\))? \| (?P<shares>[\d.%, ]+) \| (?P<kl>[\d.e+-]+) \| ", re.MULTILINE
)
ATTEMPT = re.compile(
    r"^attempt \d+ \(by .*\): (?P<plan>\{.*\})\n(?:  before .*\n)*  predicted: (?P<predicted>.*)\n  measured: (?P<measured>.*)\n"
    r"  (?P<verdict>accepted|refused): ",
    re.MULTILINE,
)
LIMIT = re.compile(r"lose at most ([\d.]+)% of top-1")
# Where nothing was measured yet: half a nat for each unit of top-1, as the built-in rules start.
FIRST_NATS = 0.5
# A bound at 90% of one side lies 1.28 errors above the estimate, the end of the interval 1.96.
BOUND = 1.28 / 1.96


@dataclass(frozen=True)
class Seen:
    """One attempt as the prompt has it: shares of the whole, nats, and the 95% interval's upper end of what was lost."""

    saving: float
    kl: float
    lost: float
    high: float
    accepted: bool


@dataclass(frozen=True)
class Reader:
    """What can be read out of a planner's prompt."""

    prompt: str

    @property
    def limit(self) -> float:
        """Return the top-1 that may go."""
        found = LIMIT.search(self.prompt)
        return float(found[1]) / 100 if found else 0.01

    @cached_property
    def groups(self) -> tuple[tuple[str, str], ...]:
        """Return each group as pattern and kind."""
        return tuple((json.loads(row["name"]), row["kind"]) for row in GROUP.finditer(self.prompt))

    @property
    def metric(self) -> str:
        """Return what to save: MACs where speed decides, params elsewhere; times are of float32 layers, not of int8."""
        return "macs" if "best speed wins" in self.prompt else "params"

    @cached_property
    def curve(self) -> tuple[list[float], list[float]]:
        """Return savings and their KL of the points that can be reached, both rising."""
        shares = 1 if self.metric == "macs" else 0
        told = [
            (float(row["shares"].split(",")[shares].strip(" %")) / 100, float(row["kl"]))
            for row in POINT.finditer(self.prompt)
        ]
        points: list[tuple[float, float]] = []
        for saving, kl in sorted(told, key=lambda point: (-point[0], point[1])):
            if kl > 0 and (not points or (saving < points[-1][0] and kl < points[-1][1])):
                points.append((saving, kl))
        points = points or [(0.5, 1.0)]
        return [saving for saving, _ in reversed(points)], [kl for _, kl in reversed(points)]

    @cached_property
    def attempts(self) -> tuple[Seen, ...]:
        """Return the measured attempts whose cost was predicted."""
        pattern = {"params": r"params ([\d.]+)% less", "macs": r"MACs ([\d.]+)% less"}[self.metric]
        found: list[Seen] = []
        for row in ATTEMPT.finditer(self.prompt):
            saving = re.search(pattern, row["predicted"])
            kl = re.search(r"KL ([\d.e+-]+)", row["predicted"])
            lost = re.search(r"top-1 lost (-?[\d.]+)% \[-?[\d.]+%, (-?[\d.]+)%\]", row["measured"])
            if saving and kl and lost and float(kl[1]) > 0:
                points = float(lost[1]) / 100, float(lost[2]) / 100
                found.append(Seen(float(saving[1]) / 100, float(kl[1]), *points, row["verdict"] == "accepted"))
        return tuple(found)

    def saving_for(self, nats: float) -> float:
        """Return the saving that costs so many nats, by the curve moved to go through the nearest attempt."""
        savings, kls = self.curve
        if self.attempts:
            nearest = min(self.attempts, key=lambda seen: abs(math.log(seen.kl / nats)))
            kl = float(np.exp(np.interp(nearest.saving, savings, np.log(kls))))
            # Below its first point, KL goes with the square of what is saved.
            kl *= min(max(nearest.saving, 1e-4) / savings[0], 1.0) ** 2
            nats *= kl / nearest.kl
        return float(np.interp(math.log(nats), np.log(kls), savings)) * min(math.sqrt(nats / kls[0]), 1.0)

    @property
    def nats(self) -> float:
        """Return the nats that should just be accepted: what one has cost by the attempt nearest to the limit.

        What is accepted keeps the limit with a bound, which lies above the estimate by two thirds of the 95% interval's arm.
        """
        if told := [seen for seen in self.attempts if seen.lost > 0]:
            nearest = min(told, key=lambda seen: abs(math.log(seen.lost / self.limit)))
            room = self.limit - BOUND * (nearest.high - nearest.lost)
            return max(nearest.kl * max(room, 0.2 * self.limit) / nearest.lost, 1e-6)
        return 4 * max((seen.kl for seen in self.attempts), default=self.limit * FIRST_NATS / 4)


def careful_plan(prompt: str) -> dict[str, Any]:
    """Return a plan by the evidence and the attempts in `prompt`, or the advice to stop."""
    reader = Reader(prompt)
    if not reader.groups:
        return {"reason": "there is no evidence to plan by", "stop": True}
    low = max((seen.saving for seen in reader.attempts if seen.accepted), default=0.0)
    high = min((seen.saving for seen in reader.attempts if not seen.accepted and seen.saving > low), default=0.95)
    if high - low < 0.01:
        return {"reason": f"{low:.1%} was accepted and {high:.1%} refused: nothing lies between", "stop": True}
    wanted, margin = reader.saving_for(reader.nats), min(0.01, (high - low) / 4)
    if not low + margin <= wanted <= high - margin:
        wanted = (low + high) / 2 if high < 0.95 else min(low * 1.15 + 0.02, 0.9)
    reason = (
        f"{len(reader.attempts)} attempts: {low:.1%} of the {reader.metric} was accepted, {high:.1%} not; "
        f"about {reader.nats:.2g} nats fit {reader.limit:.2%} of top-1"
    )
    target = {"metric": reader.metric, "saving": round(wanted, 4), "justification": f"{reader.nats:.2g} nats"}
    return {"reason": reason, "target": target}
