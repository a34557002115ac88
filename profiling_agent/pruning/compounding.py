"""The paper's way to cut convolutions: one after the other, each with all that hangs on it, over and over."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from profiling_agent.pruning.importance import keep_indices

# The indices that each function of Torch-Pruning is to remove from a module of this name.
Removals = dict[tuple[str, Callable[..., Any]], set[int]]
# Scores (channels,) of what is left of a convolution's filters (channels, inputs, height, width).
Scoring = Callable[[Tensor], Tensor]


def convolutions(graph: Any, skeleton: nn.Module) -> list[tuple[str, nn.Conv2d]]:
    """Return the ungrouped convolutions that the forward pass reaches, in the order in which the model holds them."""
    named = [(name, layer) for name, layer in skeleton.named_modules() if isinstance(layer, nn.Conv2d)]
    return [(name, layer) for name, layer in named if layer.groups == 1 and layer in graph.module2node]


def compounded(graph: Any, skeleton: nn.Module, model: nn.Module, ratio: float, scores: Scoring) -> Removals:
    """Return what goes, in the unpruned model's indices, when each convolution in turn loses `ratio` of what it has left."""
    names: Mapping[nn.Module, str] = {module: name for name, module in skeleton.named_modules()}
    removals: Removals = {}
    for name, layer in convolutions(graph, skeleton):
        left = left_of(graph, layer, name, removals)
        inputs = left_of(graph, layer, name, removals, of="in")
        filters = model.get_submodule(name).get_parameter("weight")[left][:, inputs]
        kept = set(keep_indices(scores(filters), len(left) - int(ratio * len(left))))
        if dropped := [channel for index, channel in enumerate(left) if index not in kept]:
            group = graph.get_pruning_group(layer, graph.get_pruner_of_module(layer).prune_out_channels, dropped)
            for dependency, channels in group.items:
                # Members without a name are operations of the trace, which hold no weights.
                if (member := names.get(dependency.target.module)) is not None:
                    removals.setdefault((member, dependency.handler), set()).update(channels)
    return removals


def left_of(graph: Any, layer: nn.Conv2d, name: str, removals: Removals, *, of: str = "out") -> list[int]:
    """Return the channels of the unpruned convolution that `removals` leave, outputs or inputs."""
    pruner = graph.get_pruner_of_module(layer)
    width = layer.out_channels if of == "out" else layer.in_channels
    cut = pruner.prune_out_channels if of == "out" else pruner.prune_in_channels
    return sorted(set(range(width)) - removals.get((name, cut), set()))


def without(model: nn.Module, removals: Removals) -> nn.Module:
    """Return a copy of `model` without the channels `removals`; what was frozen stays so."""
    pruned = copy.deepcopy(model)
    trained = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    for (name, cut), channels in removals.items():
        cut(pruned.get_submodule(name), sorted(channels))
    for name, parameter in pruned.named_parameters():
        parameter.requires_grad_(trained[name])
    return pruned
