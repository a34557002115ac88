import pytest

from profiling_agent.pruning.widths import aligned_widths, snap, step_for
from profiling_agent.schemas import Unit, UnitKind


def unit(kind: UnitKind, width: int) -> Unit:
    return Unit(
        name="a",
        kind=kind,
        producers=("a.0",),
        consumer="a.1",
        width=width,
        step=step_for(kind, width),
        params_per_channel=1,
        macs_per_channel=1,
    )


@pytest.mark.parametrize(
    ("kind", "width", "ratio", "keep"),
    [
        (UnitKind.MLP, 3072, 0.125, 2688),
        (UnitKind.MLP, 3072, 0.1, 2752),  # 2764.8 lies between 2752 and 2816
        (UnitKind.MLP, 512, 0.1, 448),  # 460.8 between 448 and 480
        (UnitKind.MLP, 512, 0.03, 512),  # 496.6 is nearer to the full width: left alone
        (UnitKind.MLP, 512, 0.03125, 480),  # 496 is as near to 480 as to 512: the smaller
        (UnitKind.MLP, 320, 0.05, 288),  # 304, a tie that binary fractions would miss
        (UnitKind.MLP, 512, 0.99, 128),  # never below a quarter
        (UnitKind.MLP, 224, 0.99, 64),  # a quarter is 56, no multiple of 32
        (UnitKind.CONV_INNER, 256, 0.1, 224),  # 230.4 between 224 and 240
        (UnitKind.CONV_INNER, 100, 0.05, 96),
        (UnitKind.CONV_INNER, 64, 0.99, 16),
        (UnitKind.HEADS, 12, 0.1, 11),
        (UnitKind.HEADS, 12, 0.01, 12),
        (UnitKind.HEADS, 6, 0.99, 2),
        (UnitKind.HEADS, 2, 0.99, 1),
    ],
)
def test_a_ratio_snaps_to_the_nearest_aligned_width(kind, width, ratio, keep):
    assert snap(unit(kind, width), ratio) == keep


@pytest.mark.parametrize("kind", UnitKind)
@pytest.mark.parametrize("width", [1, 2, 16, 31, 64, 100, 1023, 1024, 3072])
def test_no_ratio_gives_an_unaligned_width_or_less_than_a_quarter(kind, width):
    for percent in range(1, 100):
        keep = snap(unit(kind, width), percent / 100)
        assert keep == width or (keep % step_for(kind, width) == 0 and width / 4 <= keep < width)


@pytest.mark.parametrize(
    ("kind", "width"), [(UnitKind.HEADS, 1), (UnitKind.CONV_INNER, 16), (UnitKind.MLP, 32), (UnitKind.MLP, 24)]
)
def test_a_narrow_unit_has_no_aligned_width(kind, width):
    assert not aligned_widths(width, step_for(kind, width))
