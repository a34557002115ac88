"""Norms of a model: all that keep running statistics, and the one that reads a layer's outputs."""

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor, nn

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
