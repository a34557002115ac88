"""Importance of channels or heads from weights alone; more of a score is more important."""

import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from profiling_agent.records import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class UnitWeights:
    """A unit's weights, one row a channel or head: what makes it, (width, n), and what reads it, (width, m)."""

    rows: Tensor
    columns: Tensor


def l1(weights: UnitWeights, _generator: torch.Generator) -> Tensor:
    """Score by the sum of the absolute weights that make a channel (Li et al., 2017, "Pruning filters")."""
    return weights.rows.abs().sum(1)


def l2(weights: UnitWeights, _generator: torch.Generator) -> Tensor:
    """Score by the Euclidean norm of the weights that make a channel."""
    return weights.rows.norm(dim=1)


def group_l2(weights: UnitWeights, _generator: torch.Generator) -> Tensor:
    """Score by the Euclidean norm of all weights that a cut removes, the reader's included (DepGraph, 2023)."""
    return torch.cat((weights.rows, weights.columns), dim=1).norm(dim=1)


def random(weights: UnitWeights, generator: torch.Generator) -> Tensor:
    """Score by chance: the floor that any criterion has to beat."""
    return torch.rand(len(weights.rows), generator=generator)


IMPORTANCE: Mapping[str, Callable[[UnitWeights, torch.Generator], Tensor]] = {
    "l1": l1,
    "l2": l2,
    "group_l2": group_l2,
    "random": random,
}


def score(model: nn.Module, unit: Unit, importance: str, *, seed: int = 0) -> Tensor:
    """Return one score for each channel or head of `unit`: (width,), float32.

    `random` draws by seed and unit name, so a unit's order doesn't depend on which others are cut.
    """
    generator = torch.Generator().manual_seed(seed + zlib.crc32(unit.name.encode()))
    with torch.no_grad():
        return IMPORTANCE[importance](unit_weights(model, unit), generator)


def keep_indices(scores: Tensor, keep: int) -> list[int]:
    """Return the `keep` highest-scored indices in ascending order; of equal scores the first stay."""
    order = torch.argsort(scores, descending=True, stable=True)
    return sorted(order[:keep].tolist())


def unit_weights(model: nn.Module, unit: Unit) -> UnitWeights:
    """Return the unit's weights, those of one head side by side."""
    consumer = model.get_submodule(unit.consumer).get_parameter("weight").float()
    producers = (model.get_submodule(name).get_parameter("weight").float() for name in unit.producers)
    return UnitWeights(
        rows=torch.cat([_by_channel(weight, unit) for weight in producers], dim=1),
        columns=consumer.transpose(0, 1).reshape(unit.width, -1),
    )


def _by_channel(weight: Tensor, unit: Unit) -> Tensor:
    """Return a producer's weights with those of a channel in one row, whatever stacks they lie in."""
    return weight.reshape(unit.stacks, unit.width, -1).transpose(0, 1).reshape(unit.width, -1)
