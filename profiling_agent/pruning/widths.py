"""Aligned widths of a unit: the ones it may be cut to, because an odd width is no faster than the next aligned one."""

import math

from profiling_agent.records import Unit, UnitKind

# oneDNN blocks 16 channels of a convolution (AVX-512), so its time is a staircase of 16; a Linear's time is
# proportional to its width, but odd widths cost 3 to 5% more, and int8 and tensor-core kernels want 32 or 64.
CONV_STEP, NARROW_MLP_STEP, WIDE_MLP_STEP, WIDE_MLP = 16, 32, 64, 1024
# Nothing keeps less than this share of itself: what is left below it computes something else.
MIN_KEEP_SHARE = 0.25


def step_for(kind: UnitKind, width: int) -> int:
    """Return the step between aligned widths of a unit: channels, or whole heads."""
    if kind is UnitKind.HEADS:
        return 1
    if kind in (UnitKind.CONV_INNER, UnitKind.INVERTED_RESIDUAL):
        return CONV_STEP
    return WIDE_MLP_STEP if width >= WIDE_MLP else NARROW_MLP_STEP


def aligned_widths(width: int, step: int) -> range:
    """Return the aligned widths below `width` that keep a quarter of it and at least one; empty if it is too narrow."""
    least = max(math.ceil(width * MIN_KEEP_SHARE), 1)
    return range(math.ceil(least / step) * step, width, step)


def snap(unit: Unit, ratio: float) -> int:
    """Return the aligned width nearest to `unit.width * (1 - ratio)`, the smaller of two that are as near.

    `unit.width` itself means that the unit is left alone. The result keeps at least a quarter of the width and is
    never unaligned, whatever `ratio` in (0, 1) asks for.
    """
    # Rounded, so that a tie between two widths isn't decided by the last bit of the product.
    target = round(unit.width * (1 - ratio), 6)
    return min((*aligned_widths(unit.width, unit.step), unit.width), key=lambda keep: (abs(keep - target), keep))
