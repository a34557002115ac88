"""A few measured divergences to one for every width, along what a second-order prediction says of their shape."""

from collections.abc import Mapping, Sequence
from itertools import pairwise


def through(measured: Mapping[int, float], predicted: Mapping[int, float]) -> dict[int, float]:
    """Return a KL for every width of `predicted`, widest first: at least that of any wider one.

    Between two measured widths it is drawn along the prediction; above the widest of them the prediction is scaled to
    meet it, none being known at the full width but zero.
    """
    points = [(0.0, 0.0)]
    for keep in sorted(measured, reverse=True):
        points.append((max(predicted[keep], points[-1][0]), max(measured[keep], points[-1][1])))
    drawn: dict[int, float] = {}
    for keep, value in predicted.items():
        drawn[keep] = max(measured[keep], 0.0) if keep in measured else _between(points, value)
    rising, least = dict[int, float](), 0.0
    for keep in sorted(drawn, reverse=True):
        rising[keep] = least = max(least, drawn[keep])
    return {keep: rising[keep] for keep in predicted}


def _between(points: Sequence[tuple[float, float]], value: float) -> float:
    for (left, low), (right, high) in pairwise(points):
        if value <= right:
            return high if right == left else low + (high - low) * (value - left) / (right - left)
    return points[-1][1]
