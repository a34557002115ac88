"""The statistics of pruning_tradeoff.py: what is lost, with intervals over images and draws, and tests corrected for their number.

All draws of calibration images are judged on the same test images, so neither the draws nor the images are independent
repeats: an interval over five draws that share their images covered 54 to 73% of what is so. Both are resampled.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from checks import Check, Estimate
from numpy.typing import NDArray
from scipy import stats

NUM_SEEN = 1000
NUM_RESAMPLES = 2000
CONFIDENCE = 0.95
# A standard error of values between -1 and 1 that is no more than their sum's rounding.
ROUNDING = 1e-12
SIGNIFICANT = 0.05
# The aims that the project set itself: points of top-1 lost at a share of params.
AIMS = {"vit": {0.5: 0.3}, "deit": {0.5: 0.3}, "swin": {0.5: 0.5}, "resnet": {0.5: 1.0}}
# Points that the best other method may be above ours, its interval's end included.
MAX_BEHIND = 0.15
# Where one method removes this share of params more or less than ours, they aren't compared at one size.
MAX_UNEQUAL = 0.01

Right = NDArray[np.bool_]
Points = NDArray[np.float64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Tested:
    """The mean of values over draws and images, its 95% interval, and the two-sided p value of its being zero."""

    estimate: Estimate
    p_value: float


def two_way(values: Points) -> Tested:
    """Return the mean of `values` (draws, images) with an interval by a bootstrap over both (Owen, 2007, "pigeonhole").

    The bootstrap gives the standard error; the quantile is Student's, on Satterthwaite's degrees of freedom, since of
    five draws resampled percentiles are too near. Of one draw, only images are resampled, and the interval is that draw's.
    """
    num_draws, num_images = values.shape
    mean = float(values.mean())
    by_image = values.mean(0)
    # Resampling n values shows (n - 1) / n of their variance, which is 4 / 5 for five draws.
    spread = by_image + (values - by_image) * np.sqrt(num_draws / max(num_draws - 1, 1))
    draws, images = _resampled(num_draws, seed=0), _resampled(num_images, seed=1)
    error = float(np.std(((images @ spread.T) * draws).sum(1), ddof=1))
    if error < ROUNDING:
        return Tested(estimate=Estimate(mean, mean, mean), p_value=float(mean == 0))
    of_draws = float(spread.mean(1).var()) / num_draws
    freedom = error**4 / (of_draws**2 / max(num_draws - 1, 1) + error**4 / (num_images - 1))
    reach = float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom)) * error
    p_value = 2 * float(stats.t.sf(abs(mean) / error, freedom))
    return Tested(estimate=Estimate(mean, mean - reach, mean + reach), p_value=p_value)


@lru_cache(maxsize=8)
def _resampled(number: int, *, seed: int) -> Points:
    """Return how much each of `number` weighs in each resample, (resamples, number)."""
    even = np.full(number, 1 / number)
    return np.random.default_rng(seed).multinomial(number, even, NUM_RESAMPLES) / number


def holm(p_values: Sequence[float]) -> list[float]:
    """Return p values corrected for how many there are (Holm, 1979): no smaller than that of any smaller one."""
    adjusted, largest = [0.0] * len(p_values), 0.0
    for rank, place in enumerate(sorted(range(len(p_values)), key=lambda place: p_values[place])):
        largest = max(largest, min(1.0, p_values[place] * (len(p_values) - rank)))
        adjusted[place] = largest
    return adjusted


def reported(right: Right) -> Right:
    """Return what is said of the test images (..., images) that nobody looked at while this code was written.

    The first 1,000 were looked at (docs/decisions/LOG.md), of fewer images the first tenth.
    """
    return right[..., min(NUM_SEEN, right.shape[-1] // 10) :]


def cell(rows: Sequence[dict[str, Any]], model: str, share: float, method: str) -> Right:
    """Return which reported images a method gets right, (draws, images) in the order of the draws; one row of one without any."""
    found = sorted(
        (row for row in rows if (row["model"], row["share"], row["method"]) == (model, share, method)),
        key=lambda row: row["seed"] or 0,
    )
    return reported(np.array([row["right"] for row in found], dtype=bool))


def _less(first: Right, second: Right) -> Points:
    return first.astype(np.float64) - second.astype(np.float64)


def summaries(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return one row for each model, share and method: the fraction of images lost, its interval, and params really gone."""
    cells = dict.fromkeys((row["model"], row["share"], row["method"]) for row in rows if row["share"])
    found: list[dict[str, Any]] = []
    for model, share, method in cells:
        own = [r for r in rows if (r["model"], r["share"], r["method"]) == (model, share, method)]
        lost = two_way(_less(cell(rows, model, 0.0, "baseline"), cell(rows, model, share, method))).estimate
        found.append(
            {
                "model": model,
                "share": share,
                "method": method,
                "saved": float(np.mean([row["saved"] for row in own])),
                "drop": lost.value,
                "low": lost.low,
                "high": lost.high,
                "num_draws": len(own),
                "commit": " ".join(sorted({row["commit"] for row in own})),
                "measured_at": max(row["measured_at"] for row in own),
            }
        )
    return found


def against(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the paired tests of ours against every other method, draw by draw on the same images, Holm-corrected over all."""
    cells = dict.fromkeys((row["model"], row["share"], row["method"]) for row in rows if row["share"])
    tests: list[dict[str, Any]] = []
    for model, share, method in cells:
        if method.startswith("ours") or (model, share, "ours") not in cells:
            continue
        ours, other = cell(rows, model, share, "ours"), cell(rows, model, share, method)
        both = min(len(ours), len(other))
        gained = two_way(_less(ours, other) if len(other) == 1 else _less(ours[:both], other[:both]))
        gain = gained.estimate
        tests.append(
            {"model": model, "share": share, "method": method, "gain": gain.value, "low": gain.low, "high": gain.high}
            | {"p": gained.p_value}
        )
    for test, p_holm in zip(tests, holm([test["p"] for test in tests]), strict=True):
        test["p_holm"] = p_holm
    return tests


def checks(table: Sequence[dict[str, Any]], tests: Sequence[dict[str, Any]]) -> list[Check]:
    """Return what the benchmark has to show."""
    worse = [test for test in tests if test["gain"] < 0 and test["p_holm"] < SIGNIFICANT]
    found = [Check.at_most("methods that are shown to be above ours", len(worse), 0)]
    for model, share in dict.fromkeys((test["model"], test["share"]) for test in tests):
        rivals = [test for test in tests if (test["model"], test["share"]) == (model, share)]
        best = min(rivals, key=lambda test: test["gain"])
        behind = Estimate(*(-100 * best[end] for end in ("gain", "high", "low")))
        name = f"{model} at {share:.0%}: points that the best other method ({best['method']}) is above ours"
        found.append(Check.at_most(name, behind, MAX_BEHIND))
    found.append(Check.at_most("largest difference to ours in params removed, share", _unequal(table), MAX_UNEQUAL))
    for row in table:
        aims = AIMS.get(row["model"], {})
        if row["method"] == "ours" and row["share"] in aims:
            lost = Estimate(*(100 * row[end] for end in ("drop", "low", "high")))
            found.append(
                Check.at_most(
                    f"{row['model']}: points lost at {row['share']:.0%} fewer params", lost, aims[row["share"]]
                )
            )
    return found


def _unequal(table: Sequence[dict[str, Any]]) -> float:
    ours = {(row["model"], row["share"]): row["saved"] for row in table if row["method"] == "ours"}
    pairs = [(row["saved"], ours[row["model"], row["share"]]) for row in table if (row["model"], row["share"]) in ours]
    return max((abs(saved - of_ours) for saved, of_ours in pairs), default=0.0)
