"""Cut units out of a copy of the model."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
import torch_pruning as tp
from torch import nn

from profiling_agent.pruning.attention import Attention, read_attention
from profiling_agent.pruning.chains import channel_group
from profiling_agent.pruning.tracing import dependency_graph, without_weights
from profiling_agent.records import Cut, InputSpec, UnitKind

# Torch-Pruning types these by all layers that its functions of this name take.
CUT_ROWS: Any = tp.prune_linear_out_channels
CUT_COLUMNS: Any = tp.prune_linear_in_channels


def cut_units(model: nn.Module, cuts: Sequence[Cut], keep: Mapping[str, list[int]], spec: InputSpec) -> nn.Module:
    """Return a copy of `model` that keeps the channels or heads `keep[unit.name]` of every cut unit.

    Indices are those of `model`, also where one layer ends one unit and begins the next: each dimension of a weight
    is cut once. `head_dim` and attention's scaling stay. Torch-Pruning raises nearly anything on what it can't cut.
    """
    pruned = copy.deepcopy(model)
    dropped = {cut.unit.name: _others(keep[cut.unit.name], cut.unit.width) for cut in cuts}
    for cut in cuts:
        if cut.unit.kind is UnitKind.HEADS:
            cut_heads_(pruned.get_submodule(cut.unit.name), dropped[cut.unit.name])
    if chains := [cut.unit for cut in cuts if cut.unit.kind is not UnitKind.HEADS]:
        # Traced without weights: that takes no arithmetic, and the uncut trace keeps every index in `model`'s space.
        skeleton = without_weights(model)
        with dependency_graph(skeleton, spec) as graph:
            for unit in chains:
                _cut_chain_(pruned, graph, skeleton, unit.producers[0], dropped[unit.name])
    _freeze_as_(pruned, model)
    return pruned


def _others(kept: Iterable[int], width: int) -> list[int]:
    return sorted(set(range(width)) - set(kept))


def _cut_chain_(model: nn.Module, graph: Any, skeleton: nn.Module, producer: str, dropped: list[int]) -> None:
    """Cut in `model` what hangs on the producer's channels in the traced `skeleton`."""
    names = {module: name for name, module in skeleton.named_modules()}
    root: Any = skeleton.get_submodule(producer)
    for dependency, channels in channel_group(graph, root, dropped).items:
        # Members without a name are operations of the trace, which hold no weights.
        if (name := names.get(dependency.target.module)) is not None:
            dependency.handler(model.get_submodule(name), channels)


def cut_heads_(holder: nn.Module, dropped: Sequence[int]) -> None:
    """Cut whole heads of the attention module `holder`: rows of q, k and v, columns of o and of tables."""
    attention = read_attention(holder)
    assert isinstance(attention, Attention), "find_units refuses attention whose heads can't be cut"
    channels = [head * attention.head_dim + row for head in dropped for row in range(attention.head_dim)]
    *producers, consumer = attention.projections
    for layer in producers:
        CUT_ROWS(layer, channels)
    CUT_COLUMNS(consumer, channels)
    kept = torch.tensor(_others(dropped, attention.num_heads))
    for name, table in attention.tables.items():
        owner, _, attribute = name.rpartition(".")
        setattr(holder.get_submodule(owner), attribute, nn.Parameter(table.detach()[..., kept.to(table.device)]))
    # Forward passes read the number of heads off the tensors; these are for people, exports and other code.
    for attribute, value in (("num_attention_heads", len(kept)), ("all_head_size", consumer.in_features)):
        if hasattr(holder, attribute):
            setattr(holder, attribute, value)


def _freeze_as_(pruned: nn.Module, model: nn.Module) -> None:
    """Freeze the parameters that are frozen in `model`; a parameter that was cut is a new one."""
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, parameter in pruned.named_parameters():
        parameter.requires_grad_(trained[name])
