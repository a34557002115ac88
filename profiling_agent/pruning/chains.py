"""One layer, one reader: what Torch-Pruning's groups say about a layer's output channels."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch_pruning import ops

LAYERS = (nn.Linear, nn.Conv2d)
# Reshapes are how autograd sees a Linear fold its tokens; one that moved channels would change the reader's width.
HARMLESS = (ops.OPTYPE.ELEMENTWISE, ops.OPTYPE.RESHAPE)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """A producer whose channels only `consumer` reads, one by one, through nothing but `norms` and elementwise operations."""

    consumer: nn.Linear | nn.Conv2d
    norms: tuple[nn.Module, ...]


@dataclass(slots=True)
class _Members:
    """What hangs on a layer's output channels."""

    writers: list[nn.Module] = field(default_factory=list[nn.Module])
    readers: list[nn.Linear | nn.Conv2d] = field(default_factory=list[nn.Linear | nn.Conv2d])
    norms: list[nn.Module] = field(default_factory=list[nn.Module])
    others: list[str] = field(default_factory=list[str])


def channel_group(graph: Any, layer: nn.Linear | nn.Conv2d, channels: list[int]) -> Any:
    """Return Torch-Pruning's group of everything that changes when `channels` of the layer's outputs are cut."""
    return graph.get_pruning_group(layer, graph.get_pruner_of_module(layer).prune_out_channels, channels)


def follow(graph: Any, layer: nn.Linear | nn.Conv2d, names: Mapping[nn.Module, str]) -> Chain | str:
    """Return the chain that `layer` begins, or why it begins none: a sentence that starts with a code."""
    if layer not in graph.module2node:
        return "unused: the forward pass doesn't reach it"
    if isinstance(layer, nn.Conv2d) and layer.groups > 1:
        return f"grouped: its channels are tied together in {layer.groups} groups"
    # Groups of the residual stream are large, and one channel shows them as well as all; what passes is small.
    for channels in ([0], list(range(len(layer.weight)))):
        members = _members(graph, layer, channels)
        if reason := _refusal(members, names):
            return reason
    return _one_block(layer, members, names)


def _refusal(members: _Members, names: Mapping[nn.Module, str]) -> str | None:
    if members.writers:
        # The search goes through a set, whose order changes between runs.
        first = min(names[writer] for writer in members.writers)
        return f"residual_writer: its outputs are added to those of {len(members.writers)} more layers, as {first!r}"
    if members.others:
        return f"unsupported: its outputs pass through {min(members.others)}"
    if not members.readers:
        return "classifier: its outputs are the logits"
    if len(members.readers) > 1:
        return f"shared: {len(members.readers)} layers read its outputs"
    return None


def _one_block(layer: nn.Linear | nn.Conv2d, members: _Members, names: Mapping[nn.Module, str]) -> Chain | str:
    consumer = members.readers[0]
    if not block_of(names[layer], names[consumer]):
        return f"unsupported: its reader, {names[consumer]!r}, is in another block"
    if consumer.weight.shape[1] != len(layer.weight):
        return f"unsupported: its reader, {names[consumer]!r}, takes other channels too"
    return Chain(consumer=consumer, norms=tuple(members.norms))


def _members(graph: Any, layer: nn.Linear | nn.Conv2d, channels: list[int]) -> _Members:
    members = _Members()
    for dependency, _ in channel_group(graph, layer, channels).items[1:]:
        module, kind = dependency.target.module, dependency.target.type
        if kind == ops.OPTYPE.BN:
            members.norms.append(module)
        elif isinstance(module, LAYERS) and not graph.is_out_channel_pruning_fn(dependency.handler):
            members.readers.append(module)
        elif isinstance(module, LAYERS):
            members.writers.append(module)
        elif kind not in HARMLESS:
            members.others.append(kind.name.lower())
    return members


def block_of(first: str, second: str) -> str:
    """Return the name of the innermost module that holds both, empty where that is the model itself."""
    shared: list[str] = []
    for one, other in zip(first.split(".")[:-1], second.split(".")[:-1], strict=False):
        if one != other:
            break
        shared.append(one)
    return ".".join(shared)
