"""What we are compared with: the paper's own baselines, which cut coupled layers again and again, and uniform cuts."""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from profiling_agent.errors import PruningError, RequestError
from profiling_agent.modules.foreign import foreign_code
from profiling_agent.pruning.compounding import compounded, convolutions, left_of, without
from profiling_agent.pruning.crossings import crossings
from profiling_agent.pruning.gate import check_saving
from profiling_agent.pruning.importance import IMPORTANCE, UnitWeights
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.tracing import dependency_graph, without_weights
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.records import Cut, InputSpec, Unit, UnitKind

CRITERIA = ("l1", "l2", "random")
WIDTHS = (UnitKind.MLP, UnitKind.CONV_INNER, UnitKind.INVERTED_RESIDUAL)
# Twelve leave a step of 0.0002 between ratios, less than one channel of most layers.
NUM_HALVINGS = 12


@dataclass(frozen=True, slots=True, kw_only=True)
class PaperPruned:
    """A model that a method cut by `ratio`, uncompensated, and the share of params that is gone.

    `keep` are the kept channels or heads by unit; by convolution, and without `cuts`, where the paper's method cut
    convolutions.
    """

    model: nn.Module
    ratio: float
    share: float
    keep: dict[str, list[int]]
    cuts: tuple[Cut, ...] = ()


def uniform_prune(  # noqa: PLR0913 (a comparison names all that it was made with)
    model: nn.Module,
    units: Sequence[Unit],
    spec: InputSpec,
    ratio: float,
    criterion: str = "l1",
    *,
    seed: int = 0,
    aligned: bool = True,
    kinds: Collection[UnitKind] = WIDTHS,
) -> PaperPruned:
    """Return a copy of `model` with each of `units` of `kinds` cut once, by the same `ratio` of its width.

    Aligned: to the aligned width nearest to that; otherwise by exactly floor(ratio * width).

    Raises:
        RequestError: the criterion isn't l1, l2 or random, or the ratio isn't between 0 and 1.
        PruningError: nothing is cut, or `prune_model` refuses.
    """
    _check(ratio, criterion)
    cuts = _uniform_cuts(units, ratio, aligned=aligned, kinds=kinds)
    return _cut(model, cuts, spec, ratio, criterion, seed)


def uniform_to_params(  # noqa: PLR0913 (a comparison names all that it was made with)
    model: nn.Module,
    units: Sequence[Unit],
    spec: InputSpec,
    share: float,
    criterion: str = "l1",
    *,
    seed: int = 0,
    aligned: bool = True,
    kinds: Collection[UnitKind] = WIDTHS,
) -> PaperPruned:
    """Return `uniform_prune` by the ratio that removes as nearly as it can the `share` of params.

    Raises:
        RequestError: as `uniform_prune`, or the share isn't between 0 and 1.
        PruningError: as `uniform_prune`.
    """
    _check(share, criterion)
    total = _num_params(model)

    def share_at(ratio: float) -> float:
        return _params_saved(model, _uniform_cuts(units, ratio, aligned=aligned, kinds=kinds)) / total

    ratio = _nearest_ratio(share_at, share)
    return uniform_prune(model, units, spec, ratio, criterion, seed=seed, aligned=aligned, kinds=kinds)


def paper_prune(
    model: nn.Module, spec: InputSpec, ratio: float, criterion: str = "l1", *, seed: int = 0
) -> PaperPruned:
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
    return PaperPruned(model=pruned, ratio=ratio, share=1 - _num_params(pruned) / _num_params(model), keep=keep)


def paper_to_params(
    model: nn.Module, spec: InputSpec, share: float, criterion: str = "l1", *, seed: int = 0
) -> PaperPruned:
    """Return `paper_prune` by the ratio that removes as nearly as it can the `share` of params.

    Raises:
        RequestError: as `paper_prune`, or the share isn't between 0 and 1.
        PruningError: as `paper_prune`.
    """
    _check(share, criterion)
    total, mlps = _num_params(model), _mlps(model, spec)
    if mlps:
        ratio = _nearest_ratio(lambda r: _params_saved(model, _uniform_cuts(mlps, r, aligned=False)) / total, share)
        return paper_prune(model, spec, ratio, criterion, seed=seed)
    skeleton = without_weights(model)
    with torch.no_grad(), dependency_graph(skeleton, spec) as graph:

        def share_at(ratio: float) -> float:
            # Which channels go doesn't change how many do.
            removals = compounded(graph, skeleton, skeleton, ratio, lambda filters: torch.zeros(len(filters)))
            return 1 - _num_params(without(without_weights(skeleton), removals)) / total

        ratio = _nearest_ratio(share_at, share)
    return paper_prune(model, spec, ratio, criterion, seed=seed)


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
) -> PaperPruned:
    if not cuts:
        raise PruningError(f"a ratio of {ratio!r} cuts no channel of any unit; raise it")
    pruned = prune_model(model, cuts, spec=spec, importance=criterion, seed=seed)
    share = 1 - _num_params(pruned.model) / _num_params(model)
    return PaperPruned(model=pruned.model, ratio=ratio, share=share, keep=pruned.keep, cuts=cuts)


def _num_params(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _params_saved(model: nn.Module, cuts: Sequence[Cut]) -> int:
    """Return the params that `cuts` remove; where columns of one cross the rows of another, they are counted once."""
    saved = sum(cut.params_saved for cut in cuts)
    for crossing in crossings(cuts):
        saved -= model.get_submodule(crossing.layer).get_parameter("weight")[0, 0].numel() * crossing.gone
    return saved


def _nearest_ratio(share_at: Callable[[float], float], share: float) -> float:
    """Return the ratio whose share is nearest to `share` of those that halving comes to and that cut anything."""
    low, high = 0.0, 1.0
    tried: dict[float, float] = {}
    for _ in range(NUM_HALVINGS):
        ratio = (low + high) / 2
        tried[ratio] = share_at(ratio)
        low, high = (ratio, high) if tried[ratio] < share else (low, ratio)
    cutting = [ratio for ratio in tried if tried[ratio] > 0]
    if not cutting:
        raise PruningError("no ratio cuts a channel of any unit; compare another model")
    return min(cutting, key=lambda ratio: abs(tried[ratio] - share))
