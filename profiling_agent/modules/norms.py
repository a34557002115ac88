"""Batch norms: found, fused into the convolution before them; and the padding of convolutions."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from profiling_agent.modules.hooks import watching

BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)


def batch_norms(model: nn.Module) -> list[nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d]:
    """Return the batch norms of `model` that normalise by running statistics."""
    return [module for module in model.modules() if isinstance(module, BATCH_NORMS) and module.track_running_stats]


class Folded(nn.Module):
    """What stands in the place of a batch norm that a convolution does the work of: it changes nothing, and answers as a norm that changes nothing would.

    timm's norms have an activation in them, which stays. A model's own code may read what a norm says of itself, as of any layer.
    """

    num_features: int
    affine: bool

    def __init__(self, norm: nn.Module) -> None:
        """Take over what is plain of `norm`, and the modules in it that do something."""
        super().__init__()
        plain = {name: held for name, held in vars(norm).items() if not name.startswith("_") and not callable(held)}
        vars(self).update(plain | dict(norm.named_children()))
        # Saved models name them so.
        rest = (module for module in norm.children() if not isinstance(module, nn.Identity))
        for number, module in enumerate(rest):
            self.add_module(str(number), module)

    @property
    def running_mean(self) -> Tensor:
        """Return a mean of nothing."""
        return torch.zeros(self.num_features)

    @property
    def running_var(self) -> Tensor:
        """Return a variance of one."""
        return torch.ones(self.num_features)

    @property
    def weight(self) -> Tensor | None:
        """Return scales of one, where the norm had any."""
        return self.running_var if self.affine else None

    @property
    def bias(self) -> Tensor | None:
        """Return shifts of nothing, where the norm had any."""
        return self.running_mean if self.affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, or its activation."""
        for module in self.children():
            x = module(x)
        return x


def has_bias(layer: nn.Module) -> bool:
    """Say whether `layer` adds a bias."""
    return dict(layer.named_parameters(recurse=False)).get("bias") is not None


def following_norms(model: nn.Module, consumers: Collection[str], image: Tensor) -> dict[str, str]:
    """Return the batch norm that reads exactly what a consumer gives out, by the consumer's name, where there is one."""
    norms = {id(norm) for norm in batch_norms(model)}
    named = [name for name, module in model.named_modules() if name in consumers or id(module) in norms]
    given: list[tuple[str, Any]] = []
    found: dict[str, str] = {}

    def read(name: str, inputs: Any) -> None:
        if name not in consumers:
            found.update({giver: name for giver, output in given if output is inputs})

    def give(name: str, _inputs: Any, output: Any) -> None:
        if name in consumers:
            given.append((name, output))

    with watching(model, named, before=read, after=give):
        model(pixel_values=image)
    return found


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


def border_of(layer: nn.Conv2d) -> tuple[int, int, int, int]:
    """Return how many pixels `layer` puts to the left, right, top and bottom of its input, as `functional.pad` takes them."""
    padding: Any = layer.padding
    if not isinstance(padding, str):
        # torch's own code takes one number for both as well, alone or in a list.
        sides = (padding,) if isinstance(padding, int) else tuple(padding)
        top, left = sides * (2 // len(sides))
        return left, left, top, top
    if padding == "valid":
        return 0, 0, 0, 0
    # As torch's own "same": where they aren't equal, the last side has one more.
    height, width = (step * (size - 1) for size, step in zip(layer.kernel_size, layer.dilation, strict=True))
    return width // 2, width - width // 2, height // 2, height - height // 2
