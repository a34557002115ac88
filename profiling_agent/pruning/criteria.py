"""Criteria: orders of channels or heads by worth, those from weights alone and those from activations and gradients."""

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from profiling_agent.pruning.consumers import matrix_of
from profiling_agent.pruning.elimination import Elimination, eliminate, eliminate_in
from profiling_agent.pruning.importance import IMPORTANCE, score
from profiling_agent.pruning.moments import UnitMoments
from profiling_agent.records import Unit, UnitKind


def wanda(unit: Unit, weight: Tensor, moments: UnitMoments) -> Tensor:
    """Score by the energy that a channel brings to its reader: E[x_c^2] |W_c|^2 (Wanda, 2023, whole channels)."""
    return _by_channel(unit, moments.gram.diagonal().float() * weight.square().sum(0))


def flap(unit: Unit, weight: Tensor, moments: UnitMoments) -> Tensor:
    """Score by how much of it varies, because a bias can stand in for the mean: Var[x_c] |W_c|^2 (FLAP, 2024)."""
    return _by_channel(unit, moments.covariance.diagonal() * weight.square().sum(0))


def taylor(_unit: Unit, _weight: Tensor, moments: UnitMoments) -> Tensor:
    """Score by the first-order change of an image's loss, E|x dL/dx| (Molchanov et al., 2017)."""
    return moments.taylor


def fisher(_unit: Unit, _weight: Tensor, moments: UnitMoments) -> Tensor:
    """Score by the Fisher information of a gate on the channel (Kwon et al., 2022)."""
    return moments.fisher


def _by_channel(unit: Unit, columns: Tensor) -> Tensor:
    return columns.reshape(unit.width, -1).sum(1)


SCORED: Mapping[str, Callable[[Unit, Tensor, UnitMoments], Tensor]] = {
    "taylor": taylor,
    "fisher": fisher,
    "wanda": wanda,
    "flap": flap,
}
# What is left of the outputs when the other channels take over: of all outputs alike, or as the loss feels them.
ELIMINATED = ("obs", "fisher_obs")
CRITERIA = (*IMPORTANCE, *SCORED, *ELIMINATED)


def best_for(kind: UnitKind) -> str:
    """Return the criterion for a kind of unit where nobody compares them.

    The order in which others take over best; of channels as the loss feels it, which was worth a fifth of the KL, but not of heads, which
    are few and whose gradients are noisy (docs/decisions/LOG.md, 2026-11-21).
    """
    return "obs" if kind is UnitKind.HEADS else "fisher_obs"


def order_by(model: nn.Module, unit: Unit, moments: UnitMoments, criterion: str, *, seed: int = 0) -> tuple[int, ...]:
    """Return the channels or heads of `unit`, the first to go first, as one of CRITERIA orders them."""
    weight = matrix_of(model.get_submodule(unit.consumer))
    if criterion in ELIMINATED:
        alike = torch.eye(len(weight), device=weight.device)
        felt = moments.sensitivity if criterion == "fisher_obs" and moments.is_felt else alike
        return eliminate(weight, moments.covariance, felt, unit.width).order
    if criterion in SCORED:
        scores = SCORED[criterion](unit, weight, moments)
    else:
        scores = score(model, unit, criterion, seed=seed)
    return tuple(torch.argsort(scores, stable=True).tolist())


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
