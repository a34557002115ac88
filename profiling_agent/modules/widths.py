"""Give a freshly built model the widths of the tensors that it is about to take."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]


def fit_widths_(model: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Replace every tensor of `model` whose shape differs in `tensors` by an empty one, and say so in its module.

    The new tensors hold no values (they lie on the meta device): a strict load with `assign=True` has to follow.
    """
    resized: dict[str, nn.Module] = {}
    for name, held in model.state_dict(keep_vars=True).items():
        if name not in tensors or tensors[name].shape == held.shape:
            continue
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        empty = torch.empty_like(tensors[name], device="meta")
        setattr(owner, leaf, nn.Parameter(empty) if isinstance(held, nn.Parameter) else empty)
        resized[owner_name] = owner
    for owner in resized.values():
        _say_widths_(owner)


def _say_widths_(module: nn.Module) -> None:
    """Make the widths that a module states those of its weight."""
    if isinstance(module, nn.Linear):
        module.out_features, module.in_features = module.weight.shape
    elif isinstance(module, nn.Conv2d):
        if module.groups > 1:
            # Groups are cut as wholes, so each has as many filters as before.
            module.groups = module.groups * module.weight.shape[0] // module.out_channels
        module.out_channels, module.in_channels = module.weight.shape[0], module.weight.shape[1] * module.groups
    elif isinstance(module, _BatchNorm):
        module.num_features = module.weight.shape[0]
    elif isinstance(module, nn.LayerNorm):
        module.normalized_shape = tuple(module.weight.shape)
