"""Pruning criteria: channels or heads ordered by importance from weights, activations and gradients."""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from profiling_agent.pruning.compensation import UnitMoments, damped_inverse, matrix_of
from profiling_agent.schemas import Unit, UnitKind


def l1(rows: Tensor, _generator: torch.Generator) -> Tensor:
    """Score by the sum of absolute weights of a channel (Li et al., 2017, "Pruning filters")."""
    return rows.abs().sum(1)


def l2(rows: Tensor, _generator: torch.Generator) -> Tensor:
    """Score by the Euclidean norm of the weights of a channel."""
    return rows.norm(dim=1)


def random(rows: Tensor, generator: torch.Generator) -> Tensor:
    """Score at random: the baseline that any criterion has to beat."""
    return torch.rand(len(rows), generator=generator)


# Each scores a unit's channels by their rows of weights, (width, n).
IMPORTANCE: Mapping[str, Callable[[Tensor, torch.Generator], Tensor]] = {"l1": l1, "l2": l2, "random": random}


def score(model: nn.Module, unit: Unit, importance: str, *, seed: int = 0) -> Tensor:
    """Return one score for each channel or head of `unit`: (width,), float32.

    `random` is seeded by `seed` and unit name, so a unit's order is independent of which others are cut.
    """
    generator = torch.Generator().manual_seed(seed + zlib.crc32(unit.name.encode()))
    with torch.no_grad():
        return IMPORTANCE[importance](unit_rows(model, unit), generator)


def keep_indices(scores: Tensor, keep: int) -> list[int]:
    """Return the `keep` highest-scored indices in ascending order; ties keep the first."""
    order = torch.argsort(scores, descending=True, stable=True)
    return sorted(order[:keep].tolist())


def unit_rows(model: nn.Module, unit: Unit) -> Tensor:
    """Return the weights of each channel or head, over all stacks: (width, n), float32."""
    weights = (model.get_submodule(name).get_parameter("weight").float() for name in unit.producers)
    return torch.cat(
        [weight.reshape(unit.stacks, unit.width, -1).transpose(0, 1).reshape(unit.width, -1) for weight in weights],
        dim=1,
    )


# Updates per unit: a share of the width is removed between two of them, so that wide layers take seconds and not minutes. The errors of 64 updates
# are within 0.2% of those of 128, of 16 within 0.7% (1,536 channels of correlated noise).
UPDATES = 64
# Candidates that are compared exactly for each removal between two updates.
NUM_CANDIDATES = 2
# Removed columns are dropped from the matrices once at most this share is left: copying the rest for each update took most of the time.
MIN_REMAINING_SHARE = 0.875


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """`order` has every channel, the first to remove first; `loss[n]` is the output error after removing n of them.

    The error is that of the best linear use of the remaining columns, weighted by `sensitivity`: half of it is the second-order estimate of the
    KL divergence that the cut causes.
    """

    order: tuple[int, ...]
    loss: tuple[float, ...]


def eliminate(
    weight: Tensor, covariance: Tensor, sensitivity: Tensor, width: int, order: Sequence[int] | None = None
) -> Elimination:
    """Return the order of the optimal brain surgeon for groups of columns, or the errors of a given `order`.

    `weight` is (outputs, columns), `covariance` (columns, columns), `sensitivity` (outputs, outputs); the columns are `width` groups of equal size,
    one after the other. The error of removing group c is tr(S W_c ((C^-1)_cc)^-1 W_c') (Hassibi et al., 1993; ZipLM, 2023).
    """
    size = weight.shape[1] // width
    chunk = max(1, width // UPDATES)
    # With R'R = S, errors of R W are weighted equally.
    values, vectors = torch.linalg.eigh(sensitivity.double())
    weighted = (values.clamp_min(0).sqrt()[:, None] * vectors.T) @ weight.double()
    inverse = damped_inverse(covariance.double())
    # The groups whose columns the matrices hold, and which of them are still present.
    groups, present = torch.arange(width), torch.ones(width, dtype=torch.bool)
    removed: list[int] = []
    loss = [0.0]
    while len(removed) < width:
        if order is None:
            errors = _errors(weighted, inverse, len(groups)).cpu().masked_fill(~present, math.inf)
            candidates = torch.argsort(errors, stable=True)[: min(chunk * NUM_CANDIDATES, int(present.sum()))]
        else:
            candidates = torch.tensor(
                [int((groups == channel).nonzero()) for channel in order[len(removed) : len(removed) + chunk]]
            )
        batch = _remove_groups(
            weighted, inverse, candidates, size, count=min(chunk, len(candidates)), keep_order=order is not None
        )
        for position, error in batch:
            removed.append(int(groups[position]))
            loss.append(loss[-1] + max(error, 0.0))
        positions = torch.tensor([position for position, _ in batch])
        present[positions] = False
        _remove_columns_(weighted, inverse, _columns(positions, size))
        if present.sum() <= MIN_REMAINING_SHARE * len(groups):
            remaining = _columns(present.nonzero()[:, 0], size)
            weighted, inverse = weighted[:, remaining], inverse[remaining][:, remaining]
            groups, present = groups[present], present[present]
    return Elimination(order=tuple(removed), loss=tuple(loss))


def _columns(groups: Tensor, size: int) -> Tensor:
    return (groups[:, None] * size + torch.arange(size)).flatten()


def _remove_groups(
    weight: Tensor, inverse: Tensor, candidates: Tensor, size: int, *, count: int, keep_order: bool
) -> list[tuple[int, float]]:
    """Return `count` of the groups at `candidates` in their order of removal, and the error that each adds.

    A group that replaces another may cost more once that one is removed, so errors are updated after each removal; for a few groups their own
    blocks suffice. Candidates are removed as they come if `keep_order`.
    """
    columns = _columns(candidates, size)
    sub_weight, sub_inverse, remaining = weight[:, columns], inverse[columns][:, columns], candidates.tolist()
    removed: list[tuple[int, float]] = []
    for _ in range(count):
        errors = _errors(sub_weight, sub_inverse, len(remaining))
        index = 0 if keep_order else int(errors.argmin())
        removed.append((remaining.pop(index), float(errors[index])))
        remaining_columns = torch.ones(sub_weight.shape[1], dtype=torch.bool)
        remaining_columns[index * size : (index + 1) * size] = False
        sub_weight, sub_inverse = _remove_columns(sub_weight, sub_inverse, remaining_columns)
    return removed


def _errors(weight: Tensor, inverse: Tensor, num_groups: int) -> Tensor:
    """Return the error of removing each group: tr(W_c ((C^-1)_cc)^-1 W_c')."""
    size = weight.shape[1] // num_groups
    if size == 1:
        return weight.square().sum(0) / inverse.diagonal()
    blocks = inverse.reshape(num_groups, size, num_groups, size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
    parts = weight.reshape(len(weight), num_groups, size).permute(1, 0, 2)
    products = parts.transpose(1, 2) @ parts
    return torch.linalg.solve(blocks, products).diagonal(dim1=1, dim2=2).sum(1)


def _remove_columns(weight: Tensor, inverse: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Fold the removed columns into the remaining ones, and remove them from the inverse (Schur complement)."""
    removed = ~keep
    block = inverse[removed][:, removed]
    if not len(block):
        return weight, inverse
    cross = inverse[removed][:, keep]
    coefficients = cross / block if len(block) == 1 else torch.linalg.solve(block, cross)
    return weight[:, keep] - weight[:, removed] @ coefficients, inverse[keep][:, keep] - cross.T @ coefficients


def _remove_columns_(weight: Tensor, inverse: Tensor, removed: Tensor) -> None:
    """Do as `_remove_columns` in place: removed columns become zeros of the weight and those of a unit matrix of the inverse."""
    cross = inverse[removed]
    coefficients = torch.linalg.solve(cross[:, removed], cross)
    weight.addmm_(weight[:, removed], coefficients, alpha=-1)
    inverse.addmm_(cross.T, coefficients, alpha=-1)
    weight[:, removed] = 0.0
    inverse[removed] = 0.0
    inverse[:, removed] = 0.0
    inverse[removed, removed] = 1.0


# Criteria by the error of the outputs after compensation: outputs weighted equally, or by the loss's sensitivity.
ELIMINATION_CRITERIA = ("obs", "fisher_obs")
CRITERIA = (*IMPORTANCE, *ELIMINATION_CRITERIA)


def best_for(kind: UnitKind) -> str:
    """Return the default criterion for a kind of unit.

    It is the order in which the remaining columns compensate best. Channels are weighted by the loss's sensitivity, which was worth a fifth of the
    KL; heads are not, because they are few and their gradients are noisy (docs/decisions/LOG.md, 2026-11-21).
    """
    return "obs" if kind is UnitKind.HEADS else "fisher_obs"


def order_by(model: nn.Module, unit: Unit, moments: UnitMoments, criterion: str, *, seed: int = 0) -> tuple[int, ...]:
    """Return the channels or heads of `unit`, the first to remove first, ordered by one of CRITERIA."""
    if criterion in ELIMINATION_CRITERIA:
        weight = matrix_of(model.get_submodule(unit.consumer))
        identity = torch.eye(len(weight), device=weight.device)
        sensitivity = moments.sensitivity if criterion == "fisher_obs" and moments.is_felt else identity
        return eliminate(weight, moments.covariance, sensitivity, unit.width).order
    return tuple(torch.argsort(score(model, unit, criterion, seed=seed), stable=True).tolist())


def predicted_kl(
    model: nn.Module, unit: Unit, moments: UnitMoments, order: tuple[int, ...] | None = None
) -> Elimination:
    """Return `order`, by default that of `fisher_obs`, with the second-order estimate of the KL after each removal, in nats."""
    weight = matrix_of(model.get_submodule(unit.consumer))
    errors = eliminate(weight, moments.covariance, moments.sensitivity, unit.width, order)
    return Elimination(order=errors.order, loss=tuple(error / 2 for error in errors.loss))


def order_with_kl(model: nn.Module, unit: Unit, moments: UnitMoments, criterion: str, *, seed: int = 0) -> Elimination:
    """Return the order of `order_by` with the estimate of `predicted_kl`, which `fisher_obs` computes anyway.

    If gradients are unusable the estimate is zero.
    """
    is_felt = moments.is_felt
    order = None if criterion == "fisher_obs" and is_felt else order_by(model, unit, moments, criterion, seed=seed)
    if order is None or is_felt:
        return predicted_kl(model, unit, moments, order)
    return Elimination(order=order, loss=(0.0,) * (unit.width + 1))
