"""What is exported of patches is what torch does with them, to the last bit."""

import pytest
import torch
from torch.nn.functional import fold, unfold

from profiling_agent.runtimes.onnx_export import PlainPatches

IMAGES = torch.arange(2 * 3 * 4 * 6, dtype=torch.float32).reshape(2, 3, 4, 6)


@pytest.mark.parametrize(("kernel", "stride"), [((2, 2), (2, 2)), ((2, 3), (2, 3)), (2, 2), ((2, 2), 1), (3, 3)])
def test_patches_are_cut_and_joined_as_torch_does(kernel, stride):
    expected = unfold(IMAGES, kernel, stride=stride)
    with PlainPatches():
        found = unfold(IMAGES, kernel, stride=stride)
        joined = fold(found, (4, 6), kernel_size=kernel, stride=stride)

    assert torch.equal(found, expected)
    assert torch.equal(joined, fold(expected, (4, 6), kernel, stride=stride))


def test_patches_that_lie_side_by_side_are_joined_without_a_gather():
    with torch.profiler.profile() as seen, PlainPatches():
        fold(unfold(IMAGES, 2, stride=2), output_size=(4, 6), kernel_size=2, stride=2)

    names = {event.name for event in seen.events() or ()}
    assert "aten::permute" in names
    assert not names & {"aten::im2col", "aten::col2im"}


def test_padding_and_holes_are_torchs():
    expected = unfold(IMAGES, 2, dilation=2, padding=1, stride=2)
    with PlainPatches():
        assert torch.equal(unfold(IMAGES, 2, dilation=2, padding=1, stride=2), expected)
