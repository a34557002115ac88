"""Baseline methods of the paper: uniform cuts, cuts of coupled convolutions, and torch's dynamic int8."""

import copy
import zlib
from collections import defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, cast

import torch
import torch_pruning as tp
from torch import Tensor, nn
from torch.ao.quantization import quantize_dynamic

from profiling_agent.errors import PruningError, RequestError
from profiling_agent.lib.logs import muted
from profiling_agent.lib.modules import device_of, without_weights
from profiling_agent.pruning.criteria import keep_indices, unit_rows
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.schemas import Cut, InputSpec, Unit, UnitKind

# Scores of channels by their rows of weights, (width, n): L1 (Li et al., 2017), L2, and chance, which any has to beat.
CRITERIA: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {
    "l1": lambda rows, _generator: rows.abs().sum(1),
    "l2": lambda rows, _generator: cast("Tensor", rows.norm(dim=1)),
    "random": lambda rows, generator: torch.rand(len(rows), generator=generator),
}
WIDTHS = (UnitKind.MLP, UnitKind.CONV_INNER, UnitKind.INVERTED_RESIDUAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class PrunedBaseline:
    """A model that a method cut, uncompensated, and the share of params that is gone.

    `keep` has the kept channels or heads by unit; by convolution, and without `cuts`, after cuts of coupled convolutions.
    """

    model: nn.Module
    share: float
    keep: dict[str, list[int]]
    cuts: tuple[Cut, ...] = ()


def uniform_prune(
    model: nn.Module, units: Sequence[Unit], spec: InputSpec, ratio: float, criterion: str = "l1", *, seed: int = 0
) -> PrunedBaseline:
    """Return a copy of `model` with floor(ratio * width) cut from each of `units` that has a width, heads are not cut.

    Raises:
        RequestError: the criterion isn't l1, l2 or random, or the ratio isn't between 0 and 1.
        PruningError: nothing is cut, or `prune_model` refuses.
    """
    _check(ratio, criterion)
    cuts = tuple(
        Cut(unit=unit, keep=unit.width - int(ratio * unit.width), requested_ratio=ratio)
        for unit in units
        if unit.kind in WIDTHS and int(ratio * unit.width)
    )
    if not cuts:
        raise PruningError(f"a ratio of {ratio!r} cuts no channel of any unit; raise it")
    keep: dict[str, list[int]] = {}
    for cut in cuts:
        generator = torch.Generator().manual_seed(seed + zlib.crc32(cut.unit.name.encode()))
        with torch.no_grad():
            keep[cut.unit.name] = keep_indices(CRITERIA[criterion](unit_rows(model, cut.unit), generator), cut.keep)
    pruned = prune_model(model, cuts, spec=spec, keep=keep)
    share = 1 - _num_params(pruned.model) / _num_params(model)
    return PrunedBaseline(model=pruned.model, share=share, keep=pruned.keep, cuts=cuts)


def paper_prune(
    model: nn.Module, spec: InputSpec, ratio: float, criterion: str = "l1", *, seed: int = 0
) -> PrunedBaseline:
    """Return a copy of `model` cut as the baselines in the paper's Table 1 were; their params come out as printed.

    A model with MLPs loses floor(ratio * width) of each hidden width. Any other loses, for each convolution in order,
    floor(ratio * what is left of its channels), and with them all that depends on them: layers that write to one
    residual stream cut it once each, so a tenth of a ResNet-101's 1024 channels leaves 86. A filter is scored by what
    is left of its own weights.

    Raises:
        RequestError: the criterion isn't l1, l2 or random, or the ratio isn't between 0 and 1.
        PruningError: nothing is cut, or the result is no smaller.
    """
    _check(ratio, criterion)
    if mlps := [unit for unit in find_units(model, spec, {}).units if unit.kind is UnitKind.MLP]:
        return uniform_prune(model, mlps, spec, ratio, criterion, seed=seed)
    generator = torch.Generator().manual_seed(seed)
    skeleton = without_weights(model)
    names: dict[nn.Module, str] = {module: name for name, module in skeleton.named_modules()}
    # The unpruned model's indices that each function of Torch-Pruning removes from the module of a name.
    removed: defaultdict[tuple[str, Callable[..., Any]], set[int]] = defaultdict(set)

    def left(name: str, width: int, cut: Callable[..., Any]) -> list[int]:
        return sorted(set(range(width)) - removed[name, cut])

    with torch.no_grad(), dependency_graph(skeleton, spec) as graph:
        reached = [layer for layer in skeleton.modules() if layer in graph.module2node]
        convolutions = [layer for layer in reached if isinstance(layer, nn.Conv2d) and layer.groups == 1]
        pruners = {layer: graph.get_pruner_of_module(layer) for layer in convolutions}
        for layer in convolutions:
            name, pruner = names[layer], pruners[layer]
            outputs = left(name, layer.out_channels, pruner.prune_out_channels)
            inputs = left(name, layer.in_channels, pruner.prune_in_channels)
            rows = model.get_submodule(name).get_parameter("weight")[outputs][:, inputs].flatten(1).float()
            scores = CRITERIA[criterion](rows, generator)
            kept = set(keep_indices(scores, len(outputs) - int(ratio * len(outputs))))
            dropped = [channel for index, channel in enumerate(outputs) if index not in kept]
            if not dropped:
                continue
            for dependency, channels in graph.get_pruning_group(layer, pruner.prune_out_channels, dropped).items:
                # Members without a name are operations of the trace, which hold no weights.
                if (member := names.get(dependency.target.module)) is not None:
                    removed[member, dependency.handler].update(channels)
        keep = {names[c]: left(names[c], c.out_channels, pruners[c].prune_out_channels) for c in convolutions}

    pruned = copy.deepcopy(model)
    for (name, cut), channels in removed.items():
        if channels:
            cut(pruned.get_submodule(name), sorted(channels))
    # Torch-Pruning makes new parameters, which all are trainable.
    for name, parameter in model.named_parameters():
        pruned.get_parameter(name).requires_grad_(parameter.requires_grad)
    if _num_params(pruned) == _num_params(model):
        raise PruningError(f"a ratio of {ratio!r} cuts no channel of any convolution; raise it")
    return PrunedBaseline(model=pruned, share=1 - _num_params(pruned) / _num_params(model), keep=keep)


def dynamic_int8(model: nn.Module) -> nn.Module:
    """Return a copy with every linear layer quantized by torch's `quantize_dynamic` and its default settings.

    Those are one scale for a weight tensor, and activations in 7 of 8 bits (`reduce_range`).
    """
    # torch.ao announces its own removal on every call.
    with muted():
        return quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def _check(ratio: float, criterion: str) -> None:
    if criterion not in CRITERIA:
        raise RequestError(f"there is no criterion {criterion!r} to compare with; choose one of {', '.join(CRITERIA)}")
    if not 0 < ratio < 1:
        raise RequestError(f"{ratio!r} can't be cut; ask for a fraction between 0 and 1")


def _num_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def dependency_graph(skeleton: nn.Module, spec: InputSpec) -> Generator[Any]:
    """Trace `skeleton`, a copy made for it, and give its Torch-Pruning dependency graph."""
    image = torch.zeros(spec.batch(1), device=device_of(skeleton))
    graph = tp.DependencyGraph()
    with torch.enable_grad():
        # The trace is read off autograd, where frozen parameters are invisible.
        skeleton.requires_grad_(requires_grad=True)
        graph.build_dependency(skeleton, {"pixel_values": image}, output_transform=attrgetter("logits"), verbose=False)
    try:
        yield graph
    finally:
        release(graph)


def release(graph: Any) -> None:
    """Take a dependency graph apart: its nodes refer to each other and to autograd's, which keep the model alive."""
    for node in graph.module2node.values():
        vars(node).update(inputs=[], outputs=[], dependencies=[], grad_fn=None)
    graph.module2node.clear()
