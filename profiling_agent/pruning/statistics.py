"""What a unit's consumer reads in the pruned model, and what it gives out in the dense one: first and second moments."""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.modules.hooks import watching
from profiling_agent.pruning.consumers import features, outputs_of
from profiling_agent.pruning.walk import Walk


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedMoments:
    """Averages over positions of images, float64: z is what the pruned consumer multiplies, y what the dense one gives.

    Second moments are about the means. A position is a token, or an output pixel of a convolution.
    """

    read_mean: Tensor  # E[z], (columns,)
    given_mean: Tensor  # E[y], (outputs,)
    cross: Tensor  # Cov(y, z), (outputs, columns)
    gram: Tensor  # Cov(z), (columns, columns)


def paired_moments(
    dense: Walk, pruned: Walk, layer: nn.Module, name: str, rows: Sequence[int], batches: Iterable[Tensor]
) -> PairedMoments:
    """Return the moments of the pruned model's `layer`, called `name`; y are the dense one's outputs `rows`."""
    count, sums, about = 0, list[Tensor](), list[Tensor]()
    for number, images in enumerate(batches):
        y = outputs_of(layer, dense.reach(name, number, images)[1])[:, list(rows)]
        z = features(layer, pruned.reach(name, number, images)[0])
        # About the first batch's means: beside the square of a channel far from zero float32 loses how the others vary.
        about = about or [z.mean(0), y.mean(0)]
        z, y = z - about[0], y - about[1]
        # Products in the model's own precision: their rounding, 1e-6, is far below the ridge, and float64 takes twice
        # the time. The sums, which grow with the number of images, are float64, and held once: a Gram matrix of a
        # wide convolution is as large as the model (170 MB on ResNet-101).
        parts = (z.sum(0, dtype=torch.float64), y.sum(0, dtype=torch.float64), y.T @ z, z.T @ z)
        sums = sums or [torch.zeros_like(part, dtype=torch.float64) for part in parts]
        for total, part in zip(sums, parts, strict=True):
            total.add_(part)
        count += len(z)
    read_mean, given_mean, cross, gram = (total.div_(count) for total in sums)
    cross.addr_(given_mean, read_mean, alpha=-1)
    gram.addr_(read_mean, read_mean, alpha=-1)
    return PairedMoments(read_mean=read_mean + about[0], given_mean=given_mean + about[1], cross=cross, gram=gram)


def in_order(model: nn.Module, names: Collection[str], images: Tensor) -> list[str]:
    """Return `names` of layers in the order in which a forward pass of `images` first comes to them."""
    reached: dict[str, None] = {}

    def note(name: str, _inputs: Any) -> None:
        reached.setdefault(name)

    with watching(model, names, before=note):
        model(pixel_values=images)
    return list(reached)
