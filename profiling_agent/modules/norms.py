"""Batch norms: search, and fusion into the preceding convolution; and the padding of convolutions."""

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
    """The replacement of a fused batch norm: an identity that has the attributes of a norm with mean 0 and variance 1.

    timm's norms contain an activation, which stays. A model's code may read attributes of a norm, as of any layer.
    """

    num_features: int
    affine: bool

    def __init__(self, norm: nn.Module) -> None:
        """Copy the plain attributes of `norm`, and its modules other than identities."""
        super().__init__()
        plain = {name: value for name, value in vars(norm).items() if not name.startswith("_") and not callable(value)}
        vars(self).update(plain | dict(norm.named_children()))
        # Saved models use these names.
        active = (module for module in norm.children() if not isinstance(module, nn.Identity))
        for number, module in enumerate(active):
            self.add_module(str(number), module)

    @property
    def running_mean(self) -> Tensor:
        """Return zeros."""
        return torch.zeros(self.num_features)

    @property
    def running_var(self) -> Tensor:
        """Return ones."""
        return torch.ones(self.num_features)

    @property
    def weight(self) -> Tensor | None:
        """Return ones, or None if the norm had no weight."""
        return self.running_var if self.affine else None

    @property
    def bias(self) -> Tensor | None:
        """Return zeros, or None if the norm had no bias."""
        return self.running_mean if self.affine else None

    def forward(self, x: Tensor) -> Tensor:
        """Return `x`, after the activation if there is one."""
        for module in self.children():
            x = module(x)
        return x


def has_bias(layer: nn.Module) -> bool:
    """Return whether `layer` adds a bias."""
    return dict(layer.named_parameters(recurse=False)).get("bias") is not None


def following_norms(model: nn.Module, consumers: Collection[str], image: Tensor) -> dict[str, str]:
    """Return, by consumer, the batch norm whose input is that consumer's output, if there is one."""
    norms = {id(norm) for norm in batch_norms(model)}
    names = [name for name, module in model.named_modules() if name in consumers or id(module) in norms]
    outputs: list[tuple[str, Any]] = []
    norm_of: dict[str, str] = {}

    def match_norm(name: str, inputs: Any) -> None:
        if name not in consumers:
            norm_of.update({consumer: name for consumer, output in outputs if output is inputs})

    def record_output(name: str, _inputs: Any, output: Any) -> None:
        if name in consumers:
            outputs.append((name, output))

    with watching(model, names, before=match_norm, after=record_output):
        model(pixel_values=image)
    return norm_of


# Relative to the standard deviation of the logits; correct fusion differs by rounding only, 1e-6.
MAX_DISTANCE = 1e-4


@torch.no_grad()
def fuse_norms_(model: nn.Module, images: Tensor) -> int:
    """Fuse each batch norm into the convolution that only it reads, in place; return the number fused.

    None is fused if the logits of `images` (b, c, h, w) change, as when a convolution has another reader or runs twice. The model
    must be in eval mode, float32 and not shared. A ResNet-101's norms take a tenth of a pass: they read and write every output of
    a convolution, and compute little.
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
    logits = model(pixel_values=images).logits
    if (logits - expected).abs().max() <= MAX_DISTANCE * expected.std():
        return len(pairs)
    for name in (*pairs, *pairs.values()):
        model.set_submodule(name, modules[name])
    return 0


def border_of(layer: nn.Conv2d) -> tuple[int, int, int, int]:
    """Return the pixels that `layer` pads at the left, right, top and bottom, as `functional.pad` takes them."""
    padding: Any = layer.padding
    if not isinstance(padding, str):
        # Like torch, accept one number for both sides, bare or in a list.
        sides = (padding,) if isinstance(padding, int) else tuple(padding)
        top, left = sides * (2 // len(sides))
        return left, left, top, top
    if padding == "valid":
        return 0, 0, 0, 0
    # Like torch's "same": if the sides differ, the last has one pixel more.
    height, width = (step * (size - 1) for size, step in zip(layer.kernel_size, layer.dilation, strict=True))
    return width // 2, width - width // 2, height // 2, height - height // 2
