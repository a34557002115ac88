"""Rival methods that we are compared with: uniform cuts, the paper's own coupled ones, and Torch-Pruning's global ranking."""

import copy
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
import torch_pruning as tp
from torch import Tensor, nn
from torch.nn import functional as F

from profiling_agent.errors import PruningError, RequestError
from profiling_agent.foreign import foreign_code
from profiling_agent.modules.inference import device_of, without_weights
from profiling_agent.pruning.gate import check_saving
from profiling_agent.pruning.importance import IMPORTANCE, UnitWeights, keep_indices
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.quiet import muted
from profiling_agent.records import Cut, InputSpec, Unit, UnitKind

CRITERIA = ("l1", "l2", "random")
WIDTHS = (UnitKind.MLP, UnitKind.CONV_INNER, UnitKind.INVERTED_RESIDUAL)

GRADIENT_CRITERIA = ("taylor", "hessian")
# Torch-Pruning plans in steps; so many leave less than one channel of most layers between two ratios.
NUM_RATIOS = 1000
GRADIENT_BATCH = 64

# The indices that each function of Torch-Pruning is to remove from a module of this name.
Removals = dict[tuple[str, Callable[..., Any]], set[int]]
# Scores (channels,) of what is left of a convolution's filters (channels, inputs, height, width).
Scoring = Callable[[Tensor], Tensor]
# What each unit that loses anything keeps, by name, at a ratio in (0, 1).
Ranking = Callable[[float], dict[str, list[int]]]


@dataclass(frozen=True, slots=True, kw_only=True)
class RivalPruned:
    """A model that a method cut by `ratio`, uncompensated, and the share of params that is gone.

    `keep` are the kept channels or heads by unit; by convolution, and without `cuts`, where the paper's method cut
    convolutions.
    """

    model: nn.Module
    ratio: float
    share: float
    keep: dict[str, list[int]]
    cuts: tuple[Cut, ...] = ()


def uniform_prune(
    model: nn.Module,
    units: Sequence[Unit],
    spec: InputSpec,
    ratio: float,
    criterion: str = "l1",
    *,
    seed: int = 0,
    aligned: bool = True,
    kinds: Collection[UnitKind] = WIDTHS,
) -> RivalPruned:
    """Return a copy of `model` with each of `units` of `kinds` cut once, by the same `ratio` of its width.

    Aligned: to the aligned width nearest to that; otherwise by exactly floor(ratio * width).

    Raises:
        RequestError: the criterion isn't l1, l2 or random, or the ratio isn't between 0 and 1.
        PruningError: nothing is cut, or `prune_model` refuses.
    """
    _check(ratio, criterion)
    cuts = _uniform_cuts(units, ratio, aligned=aligned, kinds=kinds)
    return _cut(model, cuts, spec, ratio, criterion, seed)


def paper_prune(
    model: nn.Module, spec: InputSpec, ratio: float, criterion: str = "l1", *, seed: int = 0
) -> RivalPruned:
    """Return a copy of `model` cut as the baselines in Table 1 of the paper (arXiv 2509.05584) were.

    A model with MLPs loses floor(ratio * width) of each hidden width, a multiple of nothing. Any other loses, for each
    convolution in order, floor(ratio * what is left of its channels), and with them all that hangs on them: layers
    that write to one residual stream cut it once each, so a tenth of a ResNet-101's 1024 channels leaves 86. A filter
    is scored by what is left of its own weights. Reproduces the published parameter counts of all four models.

    Raises:
        RequestError: the criterion isn't l1, l2 or random, or the ratio isn't between 0 and 1.
        PruningError: nothing is cut, or the result doesn't run.
    """
    _check(ratio, criterion)
    if mlps := _mlps(model, spec):
        return _cut(model, _uniform_cuts(mlps, ratio, aligned=False), spec, ratio, criterion, seed)
    generator = torch.Generator().manual_seed(seed)

    def scores(filters: Tensor) -> Tensor:
        rows = filters.flatten(1).float()
        return IMPORTANCE[criterion](UnitWeights(rows=rows, columns=rows[:, :0]), generator)

    skeleton = without_weights(model)

    def refuse(raised: str) -> PruningError:
        return PruningError(f"the paper's method can't cut {type(model).__name__!r}: {raised}")

    with foreign_code(refuse), torch.no_grad(), dependency_graph(skeleton, spec) as graph:
        removals = compounded(graph, skeleton, model, ratio, scores)
        pruned = without(model, removals)
        keep = {name: left_of(graph, layer, name, removals) for name, layer in convolutions(graph, skeleton)}
    check_saving(model, pruned, spec)
    return RivalPruned(model=pruned, ratio=ratio, share=1 - _num_params(pruned) / _num_params(model), keep=keep)


@contextmanager
def torch_pruning_ranking(
    model: nn.Module,
    units: Sequence[Unit],
    spec: InputSpec,
    images: Tensor,
    labels: Tensor,
    criterion: str,
    *,
    isomorphic: bool = False,
) -> Generator[Ranking]:
    """Give what Torch-Pruning's `BasePruner` keeps of `units` at a ratio, ranked globally: heads apart from channels.

    `criterion` is its GroupTaylorImportance or GroupHessianImportance, of the cross-entropy of `images` (b, c, h, w) with
    `labels` (b,). `isomorphic` ranks channels only among units of one structure (Fang et al., 2024). Everything else is its
    default. What it would empty stays whole, and so do heads that it couples with a residual stream, as a Swin's.

    Raises:
        RequestError: the criterion isn't taylor or hessian.
        PruningError: Torch-Pruning can't trace the model.
    """
    if criterion not in GRADIENT_CRITERIA:
        raise RequestError(f"there is no ranking by {criterion!r}; choose one of {', '.join(GRADIENT_CRITERIA)}")

    scored = copy.deepcopy(model).eval().requires_grad_(requires_grad=True)
    if criterion == "taylor":
        scorer = tp.importance.GroupTaylorImportance()
        set_gradients_(scored, images.split(GRADIENT_BATCH), labels.split(GRADIENT_BATCH))
    else:
        scorer = tp.importance.GroupHessianImportance()
        set_squared_gradients_(scored, images, labels)
    rows = {scored.get_submodule(name): unit for unit in units for name in unit.producers}
    columns = {scored.get_submodule(unit.consumer): unit for unit in units}
    heads = {layer: unit.width for layer, unit in rows.items() if unit.kind is UnitKind.HEADS}
    pruner = _global_pruner(scored, spec, scorer, rows, heads, isomorphic=isomorphic)

    def keep(ratio: float) -> dict[str, list[int]]:
        # A step notes the heads that are gone although nothing is cut here.
        pruner.num_heads.update(heads)
        pruner.out_channel_groups.update(heads)
        pruner.current_step = round(ratio * NUM_RATIOS) - 1
        kept: dict[str, list[int]] = {}
        for group in pruner.step(interactive=True):
            cut, indices = group[0]
            layer: nn.Module = cut.target.module
            by_row = pruner.DG.is_out_channel_pruning_fn(cut.handler)
            unit = rows[layer] if by_row else columns[layer]
            whole = pruner.DG.get_out_channels(layer) // unit.stacks if by_row else pruner.DG.get_in_channels(layer)
            kept[unit.name] = sorted(set(range(unit.width)) - {i % whole * unit.width // whole for i in indices})
        return kept

    try:
        yield keep
    finally:
        _release(pruner.DG)


def _global_pruner(
    model: nn.Module,
    spec: InputSpec,
    scorer: Any,
    cut: Collection[nn.Module],
    heads: Mapping[nn.Module, int],
    *,
    isomorphic: bool,
) -> Any:
    """Return a `BasePruner` that ranks the rows of the layers `cut`, whole heads of those in `heads`."""

    def refuse(raised: str) -> PruningError:
        return PruningError(f"Torch-Pruning can't rank {type(model).__name__!r}: {raised}")

    image: Any = {"pixel_values": torch.zeros(spec.batch(1), device=device_of(model))}
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    with foreign_code(refuse), muted():
        return tp.pruner.BasePruner(
            model,
            image,
            scorer,
            global_pruning=True,
            isomorphic=isomorphic,
            pruning_ratio=1.0,
            head_pruning_ratio=1.0,
            iterative_steps=NUM_RATIOS,
            ignored_layers=[layer for layer in layers if layer not in cut],
            # It writes into these three, and the last two are shared by all pruners where they aren't given.
            num_heads=dict(heads),
            in_channel_groups={},
            out_channel_groups={},
            prune_num_heads=True,
            prune_head_dims=False,
            output_transform=attrgetter("logits"),
        )


def set_gradients_(model: nn.Module, images: Sequence[Tensor], labels: Sequence[Tensor]) -> None:
    """Set every parameter's `grad` to that of the mean cross-entropy over all batches; whatever it held is lost."""
    model.zero_grad()
    num_images = sum(map(len, images))
    for batch, classes in zip(images, labels, strict=True):
        loss = F.cross_entropy(model(pixel_values=batch).logits, classes, reduction="sum") / num_images
        loss.backward()


def set_squared_gradients_(model: nn.Module, images: Tensor, labels: Tensor) -> None:
    """Set every parameter's `grad` to the mean over images of the squared gradient of each one's cross-entropy.

    Torch-Pruning's own `accumulate_grad` (1.6.1) looks sums up by name and stores them by parameter, so that only the
    last image counts; given no sums, its importance reads `grad`.
    """
    named = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    sums = {name: torch.zeros_like(parameter) for name, parameter in named.items()}
    for image, label in zip(images.split(1), labels.split(1), strict=True):
        set_gradients_(model, [image], [label])
        for name, parameter in named.items():
            if parameter.grad is not None:
                sums[name].addcmul_(parameter.grad, parameter.grad, value=1 / len(images))
    for name, parameter in named.items():
        parameter.grad = sums[name]


def _check(fraction: float, criterion: str) -> None:
    if criterion not in CRITERIA:
        raise RequestError(f"there is no criterion {criterion!r} to compare with; choose one of {', '.join(CRITERIA)}")
    if not 0 < fraction < 1:
        raise RequestError(f"{fraction!r} can't be cut; ask for a fraction between 0 and 1")


def _mlps(model: nn.Module, spec: InputSpec) -> list[Unit]:
    return [unit for unit in find_units(model, spec, {}).units if unit.kind is UnitKind.MLP]


def _uniform_cuts(
    units: Sequence[Unit], ratio: float, *, aligned: bool, kinds: Collection[UnitKind] = WIDTHS
) -> tuple[Cut, ...]:
    chosen = [unit for unit in units if unit.kind in kinds]
    widths = [snap(unit, ratio) if aligned else unit.width - int(ratio * unit.width) for unit in chosen]
    return tuple(
        Cut(unit=unit, keep=keep, requested_ratio=ratio)
        for unit, keep in zip(chosen, widths, strict=True)
        if keep < unit.width
    )


def _cut(
    model: nn.Module, cuts: tuple[Cut, ...], spec: InputSpec, ratio: float, criterion: str, seed: int
) -> RivalPruned:
    if not cuts:
        raise PruningError(f"a ratio of {ratio!r} cuts no channel of any unit; raise it")
    pruned = prune_model(model, cuts, spec=spec, importance=criterion, seed=seed)
    share = 1 - _num_params(pruned.model) / _num_params(model)
    return RivalPruned(model=pruned.model, ratio=ratio, share=share, keep=pruned.keep, cuts=cuts)


def _num_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


@contextmanager
def dependency_graph(skeleton: nn.Module, spec: InputSpec) -> Generator[Any]:
    """Trace `skeleton`, a copy made for it, and give its Torch-Pruning dependency graph.

    Torch-Pruning raises nearly anything on a model that it can't trace, and leaves its hooks there; either way the
    copy is in eval mode, its parameters require gradients, and it may have changed itself as it ran.
    """
    image = torch.zeros(spec.batch(1), device=device_of(skeleton))
    graph = tp.DependencyGraph()
    with torch.enable_grad():
        # The trace is read off autograd, so frozen parameters would be invisible to it.
        skeleton.requires_grad_(requires_grad=True)
        graph.build_dependency(skeleton, {"pixel_values": image}, output_transform=attrgetter("logits"), verbose=False)
    try:
        yield graph
    finally:
        _release(graph)


def _release(graph: Any) -> None:
    """Take a dependency graph apart: its nodes refer to each other and to autograd's, which keep the model alive."""
    for node in graph.module2node.values():
        vars(node).update(inputs=[], outputs=[], dependencies=[], grad_fn=None)
    graph.module2node.clear()


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
