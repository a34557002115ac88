"""Batch norms that go into the convolution before them, so that nothing stands between its int8 kernel and the next."""

from collections.abc import Collection, Mapping

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from profiling_agent.modules.norms import Folded, following_norms
from profiling_agent.modules.places import places
from profiling_agent.quantization.calibrate import run

# Relative distance of the logits: the same function, its float32 products in another order.
TOLERANCE = 1e-4


def fold_norms_(model: nn.Module, convolutions: Collection[str], images: Tensor) -> tuple[str, ...]:
    """Fold into `convolutions` the batch norms that read them alone, replace these by what else they do; return their names.

    `model` is in eval mode. A norm's input has to be the very tensor that a convolution gave out; that nothing else
    reads it is seen from the logits of `images` (b, c, h, w), which stay: a pair that changes them is left alone.
    """
    expected = run(model, images)
    count = places(model)
    # Modules that stand in several places are left out.
    pairs = {
        convolution: norm
        for convolution, norm in following_norms(model, convolutions, images[:1]).items()
        if isinstance(model.get_submodule(norm), nn.BatchNorm2d) and count[norm] == count[convolution] == 1
    }
    before = {name: model.get_submodule(name) for pair in pairs.items() for name in pair}
    _fold_(model, pairs)
    if is_near(run(model, images), expected):
        return tuple(pairs.values())
    for name, module in before.items():
        model.set_submodule(name, module)
    folded = list[str]()
    for convolution, norm in pairs.items():
        _fold_(model, {convolution: norm})
        if is_near(run(model, images), expected):
            folded.append(norm)
            continue
        for name in (convolution, norm):
            model.set_submodule(name, before[name])
    return tuple(folded)


def _fold_(model: nn.Module, pairs: Mapping[str, str]) -> None:
    for convolution, norm in pairs.items():
        layer, following = model.get_submodule(convolution), model.get_submodule(norm)
        assert isinstance(layer, nn.Conv2d), "only convolutions were watched"
        assert isinstance(following, nn.BatchNorm2d), "only such pairs were taken"
        model.set_submodule(convolution, fuse_conv_bn_eval(layer, following))
        model.set_submodule(norm, Folded(following))


def is_near(logits: Tensor, expected: Tensor) -> bool:
    """Say whether logits are those of the same function: at most 1e-4 apart, relative to their norm."""
    # `<=` is false for a NaN.
    return bool(torch.linalg.vector_norm(logits - expected) <= TOLERANCE * torch.linalg.vector_norm(expected))
