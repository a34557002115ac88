"""Least squares: the consumer of a cut unit computes from what was kept what it computed before; no training."""

import contextlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from profiling_agent.modules.norms import following_norms, has_bias
from profiling_agent.modules.prefix import Walk, in_order
from profiling_agent.progress import Progress, silent
from profiling_agent.pruning.consumers import columns_of, features, matrix_of, outputs_of
from profiling_agent.pruning.ridge import RIDGE, SingularError, damp_, divide_, second_moment
from profiling_agent.records import Cut

# Below this share of the second moment a variance is the rounding of float32 products.
ROUNDING = 1e-6


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
        parts = (z.sum(0, dtype=torch.float64), y.sum(0, dtype=torch.float64), y.T @ z, second_moment(z))
        sums = sums or [torch.zeros_like(part, dtype=torch.float64) for part in parts]
        for total, part in zip(sums, parts, strict=True):
            total.add_(part)
        count += len(z)
    read_mean, given_mean, cross, gram = (total.div_(count) for total in sums)
    cross.addr_(given_mean, read_mean, alpha=-1)
    gram.addr_(read_mean, read_mean, alpha=-1)
    return PairedMoments(read_mean=read_mean + about[0], given_mean=given_mean + about[1], cross=cross, gram=gram)


def fit_(moments: PairedMoments, start: Tensor, *, centred: bool, ridge: float = RIDGE) -> tuple[Tensor, Tensor]:
    """Return (W, b) that give the dense outputs y from what the pruned consumer reads, z, near the weight `start`.

    W = start + (E[y z'] - start E[z z']) (E[z z'] + ridge m I)^-1 and b = E[y] - W E[z], m the mean of E[z z']'s
    diagonal, moments about the means where `centred`; about zero otherwise, and b is zero. `start` (outputs, columns), float64, is the dense
    weight of the kept columns, so that a ridge without end changes nothing. Where z is the dense activations x_K, W is
    W_K + W_P C_PK (C_KK + ridge m I)^-1 (ThiNet, 2017; He et al., 2017). If no column varies, W is `start`.

    The second moments are used up: a wide convolution's are as large as the model.
    """
    cross, gram = moments.cross, moments.gram
    if not centred:
        cross.addr_(moments.given_mean, moments.read_mean)
        gram.addr_(moments.read_mean, moments.read_mean)
    weight, varied = start, gram.diagonal().mean()
    if varied > ROUNDING * moments.read_mean.square().mean():
        missing = cross.sub_(start @ gram)
        # Without an inverse nothing can be said that is nearer than `start`.
        with contextlib.suppress(SingularError):
            weight = start + divide_(missing, damp_(gram, varied, ridge))
    shift = moments.given_mean - weight @ moments.read_mean
    return weight, shift if centred else torch.zeros_like(shift)


def compensate_units_(
    baseline: nn.Module,
    pruned: nn.Module,
    cuts: Sequence[Cut],
    keep: Mapping[str, list[int]],
    images: Callable[[], Iterable[Tensor]],
    progress: Progress = silent,
) -> None:
    """Fit the consumer of every cut unit in `pruned` to the dense outputs, one after the other as the network runs.

    Each reads what the units before it, already fitted, leave of the activations, so errors don't add up. That takes one
    pass of both models, a stretch for each unit. A convolution is fitted in all its taps: on the shared
    ResNet cut by a quarter that leaves a KL of 0.081 nats instead of 0.098 with taps that share one mixing of
    channels, and 0.220 where every unit is fitted to the dense activations alone (docs/decisions/LOG.md).
    """
    consumers = {cut.unit.consumer: cut.unit for cut in cuts}
    cut_rows = {
        producer: cut.unit.rows_of(keep[cut.unit.name], len(baseline.get_parameter(f"{producer}.weight")))
        for cut in cuts
        for producer in cut.unit.producers
    }
    image = next(iter(images()))[:1]
    norms = following_norms(baseline, list(consumers), image)
    order = in_order(baseline, consumers, image)
    dense_walk = Walk(baseline, order, image)
    walks = dense_walk, dense_walk.through(pruned)
    for number, name in enumerate(order):
        progress("compensating", number, len(consumers))
        dense, unit = baseline.get_submodule(name), consumers[name]
        rows = cut_rows.get(name, range(len(dense.get_parameter("weight"))))
        columns = columns_of(unit, dense, keep[unit.name])
        start = matrix_of(dense).double()[list(rows)][:, columns]
        norm = norms.get(name)
        moments = paired_moments(*walks, pruned.get_submodule(name), name, rows, images())
        weight, shift = fit_(moments, start, centred=norm is not None or has_bias(dense))
        layer = pruned.get_submodule(name)
        held = layer.get_parameter("weight")
        held.copy_(weight.reshape(held.shape))
        if has_bias(layer):
            layer.get_parameter("bias").copy_(shift)
        elif norm is not None:
            mean = baseline.get_submodule(norm).get_buffer("running_mean")[list(rows)]
            pruned.get_submodule(norm).get_buffer("running_mean").copy_(mean - shift)
