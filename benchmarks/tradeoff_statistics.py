"""The statistics of pruning_tradeoff.py: paired tests, corrected for how many there are, and what must hold."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from checks import Check
from numpy.typing import NDArray
from scipy import stats

from profiling_agent.evaluation.intervals import compare

NUM_SEARCH, NUM_SEEN = 2000, 1000
SIGNIFICANT = 0.05
# The aims that the project set itself: points of top-1 lost at a share of params.
AIMS = {"transformer": {0.2: 0.3, 0.3: 0.5, 0.5: 1.0}, "resnet": {0.1: 1.0, 0.3: 2.5}}


def reported(seed: int, num_images: int) -> NDArray[np.bool_]:
    """Return a mask of the images that `seed` reports on: all but its 2,000 search images.

    The first 1,000 were looked at while this code was written (docs/decisions/LOG.md), so every seed searches on them.
    """
    mask = np.ones(num_images, dtype=bool)
    seen = min(NUM_SEEN, num_images // 10)
    mask[:seen] = False
    rest = np.random.default_rng(10_000 + seed).permutation(np.arange(seen, num_images))
    mask[rest[: min(NUM_SEARCH, num_images // 5) - seen]] = False
    return mask


def drops(rows: Sequence[dict[str, Any]], model: str, share: float, method: str, seeds: Sequence[int]) -> list[Any]:
    """Return one paired comparison with the unpruned model for each seed; a method without seeds is read on each."""
    base = _right(rows, model, 0.0, "baseline", None)
    found: list[Any] = []
    for seed in seeds:
        right = _right(rows, model, share, method, seed)
        if right is not None and base is not None:
            mask = reported(seed, len(base))
            found.append(compare(base[mask], right[mask]))
    return found


def _right(
    rows: Sequence[dict[str, Any]], model: str, share: float, method: str, seed: int | None
) -> NDArray[np.bool_] | None:
    return next(
        (
            row["right"]
            for row in rows
            if (row["model"], row["share"], row["method"]) == (model, share, method) and row["seed"] in (seed, None)
        ),
        None,
    )


def summaries(rows: Sequence[dict[str, Any]], seeds: Sequence[int]) -> list[dict[str, Any]]:
    """Return one row for each model, share and method: the drop over all seeds, and its interval."""
    cells = dict.fromkeys((row["model"], row["share"], row["method"]) for row in rows if row["share"])
    found: list[dict[str, Any]] = []
    for model, share, method in cells:
        lost = [drop.drop for drop in drops(rows, model, share, method, seeds)]
        saved = [r["saved"] for r in rows if (r["model"], r["share"], r["method"]) == (model, share, method)]
        reach = (
            stats.t.ppf(0.975, len(lost) - 1) * np.std(lost, ddof=1) / math.sqrt(len(lost)) if len(lost) > 1 else 0.0
        )
        found.append(
            {
                "model": model,
                "share": share,
                "method": method,
                "saved": float(np.mean(saved)),
                "drop": float(np.mean(lost)),
                "low": float(np.mean(lost) - reach),
                "high": float(np.mean(lost) + reach),
                "num_seeds": len(lost),
            }
        )
    return found


def against(rows: Sequence[dict[str, Any]], seeds: Sequence[int], shares: Sequence[float]) -> list[dict[str, Any]]:
    """Return the paired tests of ours against every baseline on the first seed's images, Holm-corrected over all."""
    tests: list[dict[str, Any]] = []
    for model in dict.fromkeys(row["model"] for row in rows):
        for share in shares:
            ours = _right(rows, model, share, "ours", seeds[0])
            for method in ("uniform l1", "uniform l2", "uniform random", "paper l1", "paper l2", "paper random"):
                other = _right(rows, model, share, method, seeds[0])
                if ours is None or other is None:
                    continue
                mask = reported(seeds[0], len(ours))
                paired = compare(ours[mask], other[mask])
                tests.append(
                    {"model": model, "share": share, "method": method, "gain": paired.drop, "p": paired.p_value}
                )
    for rank, test in enumerate(sorted(tests, key=lambda test: test["p"])):
        test["p_holm"] = min(1.0, test["p"] * (len(tests) - rank))
    return tests


def checks(table: Sequence[dict[str, Any]], tests: Sequence[dict[str, Any]]) -> list[Check]:
    """Return what the benchmark has to show."""
    worse = [test for test in tests if test["gain"] < 0 and test["p_holm"] < SIGNIFICANT]
    found = [Check.at_most("baselines that are significantly above ours", len(worse), 0)]
    cells = dict.fromkeys((test["model"], test["share"]) for test in tests if test["share"] >= 0.3)
    for model, share in cells:
        rivals = [test for test in tests if (test["model"], test["share"]) == (model, share)]
        best = min(rivals, key=lambda test: test["gain"])
        name = f"{model} at {share:.0%}: Holm-corrected p that ours is above the best baseline ({best['method']})"
        found.append(Check.at_most(name, best["p_holm"] if best["gain"] > 0 else 1.0, SIGNIFICANT))
    for row in table:
        aims = AIMS["resnet" if row["model"] == "resnet" else "transformer"]
        if row["method"] == "ours" and row["share"] in aims:
            name = f"{row['model']}: points lost at {row['share']:.0%} fewer params"
            found.append(Check.at_most(name, 100 * row["drop"], aims[row["share"]]))
    return found
