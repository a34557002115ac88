"""Surgery: units are cut out of a copy of the model."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch_pruning as tp
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]

from profiling_agent.modules.attention import Attention, find_attention, head_sizes, say_heads_
from profiling_agent.records import Cut, UnitKind

# Torch-Pruning types these by all layers that its functions of this name take.
CUT_ROWS: Any = tp.prune_linear_out_channels
CUT_COLUMNS: Any = tp.prune_linear_in_channels
CUT_FILTERS: Any = tp.prune_conv_out_channels
CUT_FILTER_COLUMNS: Any = tp.prune_conv_in_channels
CUT_NORM: Any = tp.prune_batchnorm_out_channels


def cut_units(model: nn.Module, cuts: Sequence[Cut], keep: Mapping[str, list[int]]) -> nn.Module:
    """Return a copy of `model` that keeps the channels or heads `keep[unit.name]` of every cut unit.

    Indices are those of `model`, also where one layer ends one unit and begins the next: each dimension of a weight
    is cut once. `head_dim` and attention's scaling stay.
    """
    pruned = copy.deepcopy(model)
    attention = find_attention(model)
    for cut in cuts:
        unit, dropped = cut.unit, _others(keep[cut.unit.name], cut.unit.width)
        # Cut the rows of producers and of what is on the way, and the columns of all readers.
        for name in unit.producers:
            producer: Any = pruned.get_submodule(name)
            rows = unit.rows_of(dropped, len(producer.weight))
            (CUT_FILTERS if isinstance(producer, nn.Conv2d) else CUT_ROWS)(producer, rows)
        for name in unit.inner:
            _cut_rows_(pruned.get_submodule(name), unit.width, dropped)
        for name in (unit.consumer, *unit.side_readers):
            layer: Any = pruned.get_submodule(name)
            columns = _spread(dropped, layer.weight.shape[1] // unit.width)
            (CUT_FILTER_COLUMNS if isinstance(layer, nn.Conv2d) else CUT_COLUMNS)(layer, columns)
        if unit.kind is UnitKind.HEADS:
            heads = attention[unit.name]
            assert isinstance(heads, Attention), "find_units refuses attention whose heads can't be cut"
            _cut_tables_(pruned, heads, dropped)
    # Some forward passes read the number of heads there; for the others it is for people, exports and other code.
    sizes = head_sizes(model)
    say_heads_(pruned, {cut.unit.name: sizes[cut.unit.name] for cut in cuts if cut.unit.kind is UnitKind.HEADS})
    # A parameter that was cut is a new one, and is frozen if the one before was.
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, parameter in pruned.named_parameters():
        parameter.requires_grad_(trained[name])
    return pruned


def _others(kept: Iterable[int], width: int) -> list[int]:
    return sorted(set(range(width)) - set(kept))


def _spread(dropped: Sequence[int], size: int) -> list[int]:
    """Return the consecutive rows or columns of each channel or head."""
    return [index * size + row for index in dropped for row in range(size)]


def _cut_rows_(module: Any, width: int, dropped: Sequence[int]) -> None:
    """Cut the rows of `dropped` out of `width` channels of a layer or norm."""
    if isinstance(module, _BatchNorm):
        CUT_NORM(module, _spread(dropped, module.num_features // width))
    elif isinstance(module, nn.Linear):
        CUT_ROWS(module, _spread(dropped, module.out_features // width))
    elif isinstance(module, nn.Conv2d):
        groups = module.groups
        CUT_FILTERS(module, _spread(dropped, module.out_channels // width))
        if groups > 1:
            # Whole groups go, so what is left of each filter reads the channels that are left of its own group.
            module.groups = groups * (width - len(dropped)) // width
            module.in_channels = module.weight.shape[1] * module.groups
    else:
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            _keep_(module, leaf, -1, _others(_spread(dropped, parameter.shape[-1] // width), parameter.shape[-1]))


def _keep_(owner: nn.Module, leaf: str, dim: int, kept: Sequence[int]) -> None:
    """Replace a parameter by what it has at `kept` of dimension `dim`."""
    parameter = owner.get_parameter(leaf).detach()
    index = torch.tensor(kept, device=parameter.device)
    setattr(owner, leaf, nn.Parameter(parameter.index_select(dim, index)))


def _cut_tables_(model: nn.Module, attention: Attention, dropped: Sequence[int]) -> None:
    """Cut whole heads out of the tables of an attention module; one that a layer makes is cut with that layer's rows."""
    for name, dim in attention.tables.items():
        owner_name, _, leaf = name.rpartition(".")
        owner = model.get_submodule(owner_name)
        if not isinstance(owner, nn.Linear):
            _keep_(owner, leaf, dim, _others(dropped, attention.num_heads))
