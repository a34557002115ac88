"""Pruning criteria: orders of channels or heads by worth, from weights, activations and gradients."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from profiling_agent.pruning.compensation import UnitMoments, damped_inverse, matrix_of
from profiling_agent.schemas import Unit, UnitKind


def l1(rows: Tensor, _generator: torch.Generator) -> Tensor:
    """Score by the sum of the absolute weights that make a channel (Li et al., 2017, "Pruning filters")."""
    return rows.abs().sum(1)


def l2(rows: Tensor, _generator: torch.Generator) -> Tensor:
    """Score by the Euclidean norm of the weights that make a channel."""
    return rows.norm(dim=1)


def random(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Score by chance: the floor that any criterion has to beat."""
    return torch.rand(len(rows), generator=generator)


# Each scores the rows, (width, n), that make a unit's channels.
IMPORTANCE: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {"l1": l1, "l2": l2, "random": random}


def score(model: nn.Module, unit: Unit, importance: str, *, seed: int = 0) -> Tensor:
    """Return one score for each channel or head of `unit`: (width,), float32.

    `random` draws by seed and unit name, so a unit's order doesn't depend on which others are cut.
    """
    generator = torch.Generator().manual_seed(seed + zlib.crc32(unit.name.encode()))
    with torch.no_grad():
        return IMPORTANCE[importance](unit_rows(model, unit), generator)


def keep_indices(scores: Tensor, keep: int) -> list[int]:
    """Return the `keep` highest-scored indices in ascending order; of equal scores the first stay."""
    order = torch.argsort(scores, descending=True, stable=True)
    return sorted(order[:keep].tolist())


def unit_rows(model: nn.Module, unit: Unit) -> Tensor:
    """Return the weights that make each channel or head, whatever stacks they lie in: (width, n), float32."""
    weights = (model.get_submodule(name).get_parameter("weight").float() for name in unit.producers)
    return torch.cat(
        [weight.reshape(unit.stacks, unit.width, -1).transpose(0, 1).reshape(unit.width, -1) for weight in weights],
        dim=1,
    )


# Channels taken out between two updates: a share of the width, so that wide layers take seconds and not minutes. The errors of 64 updates are
# within 0.2% of those of 128, of 16 within 0.7% (1,536 channels of correlated noise).
UPDATES = 64
# How many times as many are looked at closely, for those that go between two updates.
SPARE = 2
# Columns that are gone are cleared out when no more than this share of those held is left: copying the rest for each update took most of the time.
HELD = 0.875


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """`order` has every channel, the first to go first; `loss[n]` is the output error once n of them are gone.

    The error is what the best linear use of the remaining columns leaves, weighted by `sensitivity`: half of it is the
    second-order estimate of the KL divergence that the cut causes.
    """

    order: tuple[int, ...]
    loss: tuple[float, ...]


def eliminate(weight: Tensor, covariance: Tensor, sensitivity: Tensor, width: int) -> Elimination:
    """Return the order of the optimal brain surgeon for groups of columns (Hassibi et al., 1993; ZipLM, 2023).

    `weight` is (outputs, columns), `covariance` (columns, columns), `sensitivity` (outputs, outputs); the columns are
    `width` groups of equal size side by side. The error of taking out group c is tr(S W_c ((C^-1)_cc)^-1 W_c').
    """
    return _run(weight, covariance, sensitivity, width, None)


def eliminate_in(
    order: Sequence[int], weight: Tensor, covariance: Tensor, sensitivity: Tensor, width: int
) -> Elimination:
    """Return the errors of taking the groups out in an `order` that is given."""
    return _run(weight, covariance, sensitivity, width, list(order))


def _run(weight: Tensor, covariance: Tensor, sensitivity: Tensor, width: int, order: list[int] | None) -> Elimination:
    size = weight.shape[1] // width
    chunk = max(1, width // UPDATES)
    # What goes through R, with R'R = S, is felt alike.
    values, vectors = torch.linalg.eigh(sensitivity.double())
    now = (values.clamp_min(0).sqrt()[:, None] * vectors.T) @ weight.double()
    inverse = damped_inverse(covariance.double())
    # The groups whose columns are held, and which of them are still there.
    held, there = torch.arange(width), torch.ones(width, dtype=torch.bool)
    gone: list[int] = []
    loss = [0.0]
    while len(gone) < width:
        if order is None:
            errors = _errors(now, inverse, len(held)).cpu().masked_fill(~there, math.inf)
            out = torch.argsort(errors, stable=True)[: min(chunk * SPARE, int(there.sum()))]
        else:
            out = torch.tensor([int((held == channel).nonzero()) for channel in order[len(gone) : len(gone) + chunk]])
        taken = _one_by_one(now, inverse, out, size, count=min(chunk, len(out)), given=order is not None)
        for position, error in taken:
            gone.append(int(held[position]))
            loss.append(loss[-1] + max(error, 0.0))
        positions = torch.tensor([position for position, _ in taken])
        there[positions] = False
        _take_out_(now, inverse, _columns(positions, size))
        if there.sum() <= HELD * len(held):
            stays = _columns(there.nonzero()[:, 0], size)
            now, inverse = now[:, stays], inverse[stays][:, stays]
            held, there = held[there], there[there]
    return Elimination(order=tuple(gone), loss=tuple(loss))


def _columns(groups: Tensor, size: int) -> Tensor:
    return (groups[:, None] * size + torch.arange(size)).flatten()


def _one_by_one(
    weight: Tensor, inverse: Tensor, likely: Tensor, size: int, *, count: int, given: bool
) -> list[tuple[int, float]]:
    """Return `count` of the groups at `likely` as they go, and the error that each adds to those before it.

    A group that stands in for another may not go with it at the same price, so that the errors are updated in between:
    those of a few groups ask for their own blocks alone. They go as they come where the order is `given`.
    """
    columns = _columns(likely, size)
    part, block, left = weight[:, columns], inverse[columns][:, columns], likely.tolist()
    taken: list[tuple[int, float]] = []
    for _ in range(count):
        errors = _errors(part, block, len(left))
        at = 0 if given else int(errors.argmin())
        taken.append((left.pop(at), float(errors[at])))
        stays = torch.ones(part.shape[1], dtype=torch.bool)
        stays[at * size : (at + 1) * size] = False
        part, block = _without(part, block, stays)
    return taken


def _errors(weight: Tensor, inverse: Tensor, groups: int) -> Tensor:
    """Return the error of taking out each group: tr(W_c ((C^-1)_cc)^-1 W_c')."""
    size = weight.shape[1] // groups
    if size == 1:
        return weight.square().sum(0) / inverse.diagonal()
    blocks = inverse.reshape(groups, size, groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    parts = weight.reshape(len(weight), groups, size).permute(1, 0, 2)
    felt = parts.transpose(1, 2) @ parts
    return torch.linalg.solve(blocks, felt).diagonal(dim1=1, dim2=2).sum(1)


def _without(weight: Tensor, inverse: Tensor, stays: Tensor) -> tuple[Tensor, Tensor]:
    """Fold the columns that go into those that stay, and take them out of the inverse (Schur complement)."""
    goes = ~stays
    block = inverse[goes][:, goes]
    if not len(block):
        return weight, inverse
    across = inverse[goes][:, stays]
    taken = across / block if len(block) == 1 else torch.linalg.solve(block, across)
    return weight[:, stays] - weight[:, goes] @ taken, inverse[stays][:, stays] - across.T @ taken


def _take_out_(weight: Tensor, inverse: Tensor, goes: Tensor) -> None:
    """Do as `_without` in place: the columns that go stay as zeros of the weight and those of a unit matrix of the inverse."""
    across = inverse[goes]
    taken = torch.linalg.solve(across[:, goes], across)
    weight.addmm_(weight[:, goes], taken, alpha=-1)
    inverse.addmm_(across.T, taken, alpha=-1)
    weight[:, goes] = 0.0
    inverse[goes] = 0.0
    inverse[:, goes] = 0.0
    inverse[goes, goes] = 1.0


# What is left of the outputs when the other channels take over: of all outputs alike, or as the loss feels them.
ELIMINATED = ("obs", "fisher_obs")
CRITERIA = (*IMPORTANCE, *ELIMINATED)


def best_for(kind: UnitKind) -> str:
    """Return the criterion for a kind of unit where none is named.

    The order in which others take over best; of channels as the loss feels it, which was worth a fifth of the KL, but not of heads, which
    are few and whose gradients are noisy (docs/decisions/LOG.md, 2026-11-21).
    """
    return "obs" if kind is UnitKind.HEADS else "fisher_obs"


def order_by(model: nn.Module, unit: Unit, moments: UnitMoments, criterion: str, *, seed: int = 0) -> tuple[int, ...]:
    """Return the channels or heads of `unit`, the first to go first, as one of CRITERIA orders them."""
    if criterion in ELIMINATED:
        weight = matrix_of(model.get_submodule(unit.consumer))
        alike = torch.eye(len(weight), device=weight.device)
        felt = moments.sensitivity if criterion == "fisher_obs" and moments.is_felt else alike
        return eliminate(weight, moments.covariance, felt, unit.width).order
    return tuple(torch.argsort(score(model, unit, criterion, seed=seed), stable=True).tolist())


def predicted_kl(model: nn.Module, unit: Unit, moments: UnitMoments, order: tuple[int, ...]) -> Elimination:
    """Return `order` with the second-order estimate of the KL divergence, in nats, after each channel that goes."""
    weight = matrix_of(model.get_submodule(unit.consumer))
    return _in_nats(eliminate_in(order, weight, moments.covariance, moments.sensitivity, unit.width))


def ordered(model: nn.Module, unit: Unit, moments: UnitMoments, criterion: str, *, seed: int = 0) -> Elimination:
    """Return the order of `order_by` with the estimate of `predicted_kl`, which `fisher_obs` comes to on its way.

    Where gradients tell nothing the estimate is zero.
    """
    if not moments.is_felt:
        return Elimination(order=order_by(model, unit, moments, criterion, seed=seed), loss=(0.0,) * (unit.width + 1))
    if criterion == "fisher_obs":
        weight = matrix_of(model.get_submodule(unit.consumer))
        return _in_nats(eliminate(weight, moments.covariance, moments.sensitivity, unit.width))
    return predicted_kl(model, unit, moments, order_by(model, unit, moments, criterion, seed=seed))


def _in_nats(errors: Elimination) -> Elimination:
    return Elimination(order=errors.order, loss=tuple(error / 2 for error in errors.loss))
