"""Fused: batch norms as part of the convolutions before them, for whoever runs a model and times nothing."""

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from profiling_agent.modules.norms import Folded, following_norms

# Of the logits' own spread; what is left of a norm that fits its convolution is rounding, 1e-6.
MAX_DISTANCE = 1e-4


@torch.no_grad()
def fuse_norms_(model: nn.Module, images: Tensor) -> int:
    """Fuse each batch norm into the convolution that it alone reads, in place; return how many were.

    None is where the logits of `images` (b, c, h, w) say that a convolution is read by somebody else as well, or runs twice. The model is in eval mode, float32 and nobody else's.
    A ResNet-101's norms take a tenth of a pass: they read and write all that convolutions give, and compute next to nothing.
    """
    modules = dict(model.named_modules())
    convolutions = [name for name, module in modules.items() if type(module) is nn.Conv2d]
    pairs = {
        name: norm
        for name, norm in following_norms(model, convolutions, images[:1]).items()
        if isinstance(modules[norm], nn.BatchNorm2d)
    }
    if not pairs:
        return 0
    expected = model(pixel_values=images).logits
    for name, norm in pairs.items():
        fused = fuse_conv_bn_eval(modules[name], modules[norm])  # pyright: ignore[reportArgumentType]
        model.set_submodule(name, fused)
        model.set_submodule(norm, Folded(modules[norm]))
    found = model(pixel_values=images).logits
    if (found - expected).abs().max() <= MAX_DISTANCE * expected.std():
        return len(pairs)
    for name in (*pairs, *pairs.values()):
        model.set_submodule(name, modules[name])
    return 0
