"""The methods that pruning_tradeoff.py compares: ours, parts of it, and others, each cut to the same number of params.

A rival may keep any width, where ours keeps aligned ones. "Folded" is the compensation that ours gets: every
layer behind a cut fitted by least squares. FLAP and VBP come with a compensation of their own, the mean of what is gone. Of the
rivals Torch-Pruning's isomorphic ranking alone cuts heads: of one structure each, widths are ranked alike by both, and global
rankings with heads lost 3 to 5 points more of the ViT at 30% (docs/decisions/LOG.md), where the stronger one counts.
"""

import copy
from collections.abc import Callable, Collection, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch_pruning as tp
from paper.methods import PrunedBaseline, paper_prune, release, uniform_prune
from torch import Tensor, nn
from torch.nn import functional as F
from tradeoff_subject import Draw, Plan, Subject, nearest

from profiling_agent.errors import RequestError
from profiling_agent.lib.inference import quick_products
from profiling_agent.lib.logs import muted
from profiling_agent.lib.modules import device_of, following_norms, has_bias
from profiling_agent.planning.allocation import allocate
from profiling_agent.profiling.evidence import measure_sensitivity
from profiling_agent.pruning.compensation import compensate
from profiling_agent.pruning.criteria import UnitMoments, expanded, matrix_of, unit_rows
from profiling_agent.pruning.prune import prune_model
from profiling_agent.schemas import Evidence, InputSpec, Target, Unit, UnitKind

# A plan whose share is this far from the one asked for isn't of the same size.
NEAR = 0.005
GRADIENT_CRITERIA = ("taylor", "hessian")
# Torch-Pruning plans in steps; so many leave less than one channel of most layers between two ratios.
NUM_RATIOS = 1000
GRADIENT_BATCH = 64

# What each unit that loses anything keeps, by name, at a ratio in (0, 1).
Ranking = Callable[[float], dict[str, list[int]]]


def cut(subject: Subject, plan: Plan) -> nn.Module:
    """Return the model cut by a plan, and nothing made up for."""
    return prune_model(subject.model, plan.cuts, spec=subject.spec, keep=dict(plan.keep)).model


def folded(draw: Draw, plan: Plan) -> nn.Module:
    """Return the model cut by a plan and compensated as a run does it."""
    pruned = cut(draw.subject, plan)
    with quick_products():
        return compensate(draw.subject.model, pruned, plan.cuts, plan.keep, draw.batches).model


def shifted(draw: Draw, plan: Plan) -> nn.Module:
    """Return the model cut by a plan, the mean of what is gone added to what read it: b' = b + W_P E[x_P].

    A convolution without a bias has the batch norm that follows it expect as much less.
    """
    subject = draw.subject
    pruned = cut(subject, plan)
    consumers = {planned.unit.consumer: planned.unit for planned in plan.cuts}
    rows = {name: plan.keep[planned.unit.name] for planned in plan.cuts for name in planned.unit.producers}
    with torch.no_grad():
        norms = following_norms(subject.model, list(consumers), draw.images[0][:1])
        for name, unit in consumers.items():
            layer = subject.model.get_submodule(name)
            shift = lost_mean(layer, unit, plan.keep[unit.name], draw.moments[unit.name])
            shift = shift[rows.get(name, range(len(shift)))]
            if has_bias(layer):
                pruned.get_submodule(name).get_parameter("bias").add_(shift)
            elif name in norms:
                pruned.get_submodule(norms[name]).get_buffer("running_mean").sub_(shift)
    return pruned


def lost_mean(layer: nn.Module, unit: Unit, kept: Sequence[int], moments: UnitMoments) -> Tensor:
    """Return the mean of what `layer`, the unit's consumer, gave out because of channels that aren't kept: (outputs,)."""
    gone = torch.ones(len(moments.mean))
    gone[expanded(kept, len(gone) // unit.width)] = 0
    return matrix_of(layer) @ (gone * moments.mean)


@dataclass(frozen=True)
class Ours:
    """The engine on one draw; parts of it can be left out for the ablation."""

    subject: Subject
    evidence: Evidence

    @classmethod
    def prepare(cls, draw: Draw, *, by_weights: bool = False) -> "Ours":
        """Gather the evidence, the channels in our order or in that of the L2 norms of their weights."""
        subject, orders = draw.subject, dict[str, list[int]]()
        for unit in subject.units if by_weights else ():
            norms = unit_rows(subject.model, unit).detach().norm(dim=1)
            orders[unit.name] = norms.argsort(stable=True).tolist()
        with quick_products():
            found = measure_sensitivity(
                subject.model, subject.units, draw.batches, orders=orders or None, seed=draw.seed
            )
        return cls(subject, found)

    def _plan(self, widths: Mapping[str, int]) -> Plan:
        """Return the plan that leaves these widths, the channels in the evidence's order."""
        orders = {row.unit: row.order for row in self.evidence.units}
        return self.subject.plan({name: sorted(orders[name][-width:]) for name, width in widths.items()})

    def allocated(self, share: float) -> Plan:
        """Return the allocator's plan, which saves at least `share` of params."""
        subject = self.subject
        cuts = allocate(
            subject.units,
            self.evidence,
            Target(metric="params", saving=share),
            whole=float(subject.params),
            saved=lambda cuts: subject.saved(Plan(tuple(cuts), {})),
        )
        return self._plan({planned.unit.name: planned.keep for planned in cuts})

    def uniform(self, share: float) -> Plan:
        """Return the same ratio of every MLP and inner convolution, and of all heads where those alone don't save `share`."""
        subject = self.subject
        plans = [
            nearest(partial(self._by_ratio, units), subject.saved, share) for units in (subject.widths, subject.units)
        ]
        near = (plan for plan in plans if abs(subject.saved(plan) - share) <= NEAR)
        return next(near, min(plans, key=lambda plan: abs(subject.saved(plan) - share)))

    def _by_ratio(self, units: Sequence[Unit], ratio: float) -> Plan:
        return self._plan({unit.name: max(1, unit.width - int(ratio * unit.width)) for unit in units})


def uniform(subject: Subject, share: float, *, criterion: str, seed: int = 0) -> PrunedBaseline:
    """Return the model with every width cut by the same ratio, once."""

    def prune(ratio: float) -> PrunedBaseline:
        return uniform_prune(subject.model, subject.units, subject.spec, ratio, criterion, seed=seed)

    return nearest(prune, share_of, share)


def paper(subject: Subject, share: float, *, criterion: str, seed: int = 0) -> PrunedBaseline:
    """Return the model cut as the paper's baselines were."""

    def prune(ratio: float) -> PrunedBaseline:
        return paper_prune(subject.model, subject.spec, ratio, criterion, seed=seed)

    return nearest(prune, share_of, share)


def share_of(pruned: PrunedBaseline) -> float:
    """Return the share of params that is gone."""
    return pruned.share


def uniform_folded(draw: Draw, share: float, *, criterion: str) -> nn.Module:
    """Return `uniform` with ours' compensation."""
    made = uniform(draw.subject, share, criterion=criterion)
    return folded(draw, Plan(made.cuts, made.keep))


def torch_pruning(draw: Draw, share: float, *, criterion: str, isomorphic: bool) -> Plan:
    """Return Torch-Pruning's plan: of widths, and of heads too where `isomorphic`."""
    subject = draw.subject
    units = subject.units if isomorphic else subject.widths
    images, labels = draw.images
    ranking = torch_pruning_ranking(
        subject.model, units, subject.spec, images, labels, criterion, isomorphic=isomorphic
    )
    with ranking as keep:
        return nearest(lambda ratio: subject.plan(keep(ratio)), subject.saved, share)


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
        release(pruner.DG)


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
    image: Any = {"pixel_values": torch.zeros(spec.batch(1), device=device_of(model))}
    layers = [layer for layer in model.modules() if isinstance(layer, (nn.Linear, nn.Conv2d))]
    with muted():
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


def flap_plan(draw: Draw, share: float) -> Plan:
    """Return the plan of FLAP (An et al., 2024): Var[x] |W|^2, standardised within each unit, ranked over all."""
    subject = draw.subject

    def scored(unit: Unit) -> Tensor:
        weight = matrix_of(subject.model.get_submodule(unit.consumer))
        columns = draw.moments[unit.name].covariance.diagonal() * weight.square().sum(0)
        scores = columns.reshape(unit.width, -1).sum(1)
        return (scores - scores.mean()) / scores.std().clamp_min(torch.finfo(torch.float32).tiny)

    return _ranked(subject, {unit.name: scored(unit) for unit in subject.widths}, share)


def vbp_plan(draw: Draw, share: float) -> Plan:
    """Return the plan of variance-based pruning (2025): the variance of an activation, ranked over all widths."""
    subject = draw.subject
    scores = {
        unit.name: draw.moments[unit.name].covariance.diagonal().reshape(unit.width, -1).mean(1)
        for unit in subject.widths
    }
    return _ranked(subject, scores, share)


def _ranked(subject: Subject, scores: Mapping[str, Tensor], share: float) -> Plan:
    return nearest(lambda ratio: subject.plan(ranked_together(scores, ratio)), subject.saved, share)


def ranked_together(scores: Mapping[str, Tensor], ratio: float) -> dict[str, list[int]]:
    """Return what each unit keeps where the lowest `ratio` of all scores (width,) goes; the best of a unit always stays."""
    order = torch.cat(list(scores.values())).argsort(stable=True)
    stays = torch.ones(len(order), dtype=torch.bool)
    stays[order[: int(ratio * len(order))]] = False
    parts = stays.split([len(score) for score in scores.values()])
    return {
        name: sorted({*part.nonzero()[:, 0].tolist(), int(score.argmax())})
        for (name, score), part in zip(scores.items(), parts, strict=True)
    }


def per_subject(subject: Subject) -> dict[str, Callable[[float], nn.Module]]:
    """Return the methods that look at no image, by name: each makes a model of a share of params."""
    found: dict[str, Callable[[float], nn.Module]] = {}
    for criterion in ("l1", "l2"):
        found[f"uniform {criterion}"] = lambda share, criterion=criterion: (
            uniform(subject, share, criterion=criterion).model
        )
        if _has_own(subject):
            found[f"paper {criterion}"] = lambda share, criterion=criterion: (
                paper(subject, share, criterion=criterion).model
            )
    return found


def _has_own(subject: Subject) -> bool:
    """Say whether the paper's baseline isn't the uniform one, which it is where there are MLPs."""
    return not any(unit.kind is UnitKind.MLP for unit in subject.units)


def per_draw(draw: Draw) -> dict[str, Callable[[float], nn.Module]]:
    """Return the methods that a draw of images or of chance has a part in, by name."""
    subject = draw.subject
    found: dict[str, Callable[[float], nn.Module]] = {
        "uniform random": lambda share: uniform(subject, share, criterion="random", seed=draw.seed).model,
        "FLAP": lambda share: shifted(draw, flap_plan(draw, share)),
        "FLAP, folded": lambda share: folded(draw, flap_plan(draw, share)),
        "VBP": lambda share: shifted(draw, vbp_plan(draw, share)),
        "VBP, folded": lambda share: folded(draw, vbp_plan(draw, share)),
    }
    if _has_own(subject):
        found["paper random"] = lambda share: paper(subject, share, criterion="random", seed=draw.seed).model
    for criterion in ("l1", "l2"):
        found[f"uniform {criterion}, folded"] = partial(uniform_folded, draw, criterion=criterion)
    for criterion in ("taylor", "hessian"):
        for scope in ("global", "isomorphic") if len(subject.widths) < len(subject.units) else ("global",):
            planned = partial(torch_pruning, draw, criterion=criterion, isomorphic=scope == "isomorphic")
            found[f"TP {criterion} {scope}, folded"] = lambda share, planned=planned: folded(draw, planned(share))
    return found
