"""Pruning criteria: channels or heads ordered by moments of activations and gradients, or by weights without them."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from profiling_agent.lib import modules
from profiling_agent.lib.inference import mkl_is_slow, product
from profiling_agent.schemas import Unit, UnitKind


def largest_weights(model: nn.Module, unit: Unit, keep: int) -> list[int]:
    """Return the `keep` channels or heads of `unit` with the largest L2 norm of weights, ascending."""
    with torch.no_grad():
        return keep_indices(unit_rows(model, unit).norm(dim=1), keep)


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


# Pixels per image that a convolution's statistics use: more of them are redundant.
MAX_PIXELS = 256


def matrix_of(layer: nn.Module) -> Tensor:
    """Return the weight of a Linear or Conv2d as (outputs, columns), a channel's taps next to each other, float32."""
    weight = layer.get_parameter("weight").detach().float()
    return weight.reshape(len(weight), -1)


def expanded(channels: Iterable[int], size: int) -> list[int]:
    """Return the `size` consecutive rows or columns of each channel or head."""
    return [index * size + offset for index in channels for offset in range(size)]


def features(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return what `layer` multiplies its matrix with: (positions, columns), by token or output pixel."""
    if not isinstance(layer, nn.Conv2d):
        return inputs.reshape(-1, inputs.shape[-1])
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(inputs, modules.border_of(layer), mode=mode)
    patches = F.unfold(padded, layer.kernel_size, layer.dilation, stride=layer.stride)
    return _subsample_pixels(patches).transpose(1, 2).reshape(-1, patches.shape[1])


def outputs_of(layer: nn.Module, outputs: Tensor) -> Tensor:
    """Return the outputs at the positions of `features`: (positions, outputs)."""
    if not isinstance(layer, nn.Conv2d):
        return outputs.reshape(-1, outputs.shape[-1])
    return _subsample_pixels(outputs.flatten(2)).transpose(1, 2).reshape(-1, outputs.shape[1])


def _subsample_pixels(pixels: Tensor) -> Tensor:
    count = pixels.shape[-1]
    if count <= MAX_PIXELS:
        return pixels
    positions = torch.linspace(0, count - 1, MAX_PIXELS, device=pixels.device).round().long()
    return pixels[..., positions]


# Share of the columns' mean second moment, so that the noise of few images isn't fitted (docs/facts.md).
RIDGE = 1e-2


def second_moment(rows: Tensor) -> Tensor:
    """Return z'z for the rows z (positions, columns): (columns, columns); by oneDNN, twice as fast, where MKL is slow."""
    if rows.device.type == "cpu" and rows.dtype == torch.float32 and mkl_is_slow():
        columns = rows.detach().T.contiguous()
        return product(columns, columns)
    return rows.T @ rows


def damp_(gram: Tensor, mean: Tensor, ridge: float = RIDGE) -> Tensor:
    """Add `ridge` times `mean`, the intended mean of the diagonal, to the diagonal of `gram`; return it."""
    gram.diagonal().add_(ridge * mean)
    return gram


@dataclass(slots=True, kw_only=True)
class UnitMoments:
    """Averages for one unit: x is what its consumer multiplies, g the gradient of the loss at its output.

    The loss is the cross-entropy with labels drawn from the model's own predictions: its squared gradients are the
    Fisher information, and no labels are needed.
    """

    mean: Tensor  # E[x], (columns,)
    covariance: Tensor  # (columns, columns)
    sensitivity: Tensor  # sum over an image's positions of E[g g'], (outputs, outputs)


def gather_moments(
    model: nn.Module, units: Sequence[Unit], batches: Iterable[Tensor], *, seed: int = 0
) -> dict[str, UnitMoments]:
    """Return the moments of every unit by name, over `batches` of pixel values (b, c, h, w).

    The model must be in eval mode; its parameters' gradients are neither needed nor changed.
    """
    generator = torch.Generator().manual_seed(seed)
    # Only gradients of activations are needed.
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    sums: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    activations: dict[str, tuple[Tensor, Tensor]] = {}
    # About the first batch's mean: squares of a channel of mean 1,000 and deviation 1 lose the variance in float32.
    origins: dict[str, Tensor] = {}
    num_images, consumers = 0, [unit.consumer for unit in units]
    watched = modules.watching(
        model, consumers, after=lambda name, inputs, output: activations.update({name: (inputs, output)})
    )
    with torch.enable_grad(), watched:
        for images in batches:
            pixel_values = images.detach().requires_grad_()
            logits = functional_call(model, weights, (), {"pixel_values": pixel_values}).logits.float()
            logits = modules.choices(logits, model).flatten(0, 1)
            labels = torch.multinomial(logits.detach().softmax(1).cpu(), 1, generator=generator)[:, 0]
            loss = F.cross_entropy(logits, labels.to(logits.device), reduction="sum")
            gradients = torch.autograd.grad(loss, [activations[name][1] for name in consumers])
            for unit, gradient in zip(units, gradients, strict=True):
                layer = model.get_submodule(unit.consumer)
                x = features(layer, activations[unit.consumer][0].detach())
                x = x - origins.setdefault(unit.name, x.mean(0))
                g = outputs_of(layer, gradient)
                # Averages are over an image's positions; windowed attention has more rows than images.
                positions_per_image = len(x) / len(images)
                gradients_per_image = gradient.numel() / g.shape[1] / len(images)
                batch = (
                    x.sum(0).float() / positions_per_image,
                    second_moment(x).float() / positions_per_image,
                    second_moment(g).float() * (gradients_per_image / positions_per_image),
                )
                if (totals := sums.setdefault(unit.name, batch)) is not batch:
                    for total, part in zip(totals, batch, strict=True):
                        total.add_(part)
            num_images += len(images)
            activations.clear()
    moments: dict[str, UnitMoments] = {}
    for name, totals in sums.items():
        mean, covariance, sensitivity = (total.div_(num_images) for total in totals)
        covariance.addr_(mean, mean, alpha=-1)
        moments[name] = UnitMoments(mean=mean.add_(origins[name]), covariance=covariance, sensitivity=sensitivity)
    return moments


# Updates per unit: a share of the width is removed between two, so that wide layers take seconds and not minutes. The
# errors of 64 updates are within 0.2% of those of 128, of 16 within 0.7% (1,536 channels of correlated noise).
UPDATES = 64
# Candidates that are compared exactly for each removal between two updates.
NUM_CANDIDATES = 2
# Removed columns are dropped from the matrices once at most this share is left: copying takes most of the time.
MIN_REMAINING_SHARE = 0.875


@dataclass(frozen=True, slots=True, kw_only=True)
class Elimination:
    """`order` has every channel, the first to remove first; `loss[n]` is the output error after removing n of them.

    The error is that of the best linear use of the remaining columns, weighted by `sensitivity`.
    """

    order: tuple[int, ...]
    loss: tuple[float, ...]


def eliminate(
    weight: Tensor, covariance: Tensor, sensitivity: Tensor, width: int, order: Sequence[int] | None = None
) -> Elimination:
    """Return the order of the optimal brain surgeon for groups of columns, or the errors of a given `order`.

    `weight` is (outputs, columns), `covariance` (columns, columns), `sensitivity` (outputs, outputs); the columns are
    `width` groups of equal size. The error of removing group c is tr(S W_c ((C^-1)_cc)^-1 W_c') (Hassibi et al., 1993;
    ZipLM, 2023).
    """
    size = weight.shape[1] // width
    chunk = max(1, width // UPDATES)
    # With R'R = S, errors of R W are weighted equally.
    values, vectors = torch.linalg.eigh(sensitivity.double())
    weighted = (values.clamp_min(0).sqrt()[:, None] * vectors.T) @ weight.double()
    # Constant columns get a large finite number.
    gram = covariance.double().clone()
    mean_variance = gram.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    inverse = torch.cholesky_inverse(torch.linalg.cholesky(damp_(gram, mean_variance)))
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
        batch = _cheapest(
            weighted, inverse, candidates, size, min(chunk, len(candidates)), keep_order=order is not None
        )
        for position, error in batch:
            removed.append(int(groups[position]))
            loss.append(loss[-1] + max(error, 0.0))
        positions = torch.tensor([position for position, _ in batch])
        present[positions] = False
        # Fold the removed columns into the others (Schur complement), and leave zeros, and ones on the inverse's
        # diagonal.
        gone = _columns(positions, size)
        cross = inverse[gone]
        coefficients = torch.linalg.solve(cross[:, gone], cross)
        weighted.addmm_(weighted[:, gone], coefficients, alpha=-1)
        inverse.addmm_(cross.T, coefficients, alpha=-1)
        weighted[:, gone] = 0.0
        inverse[gone] = 0.0
        inverse[:, gone] = 0.0
        inverse[gone, gone] = 1.0
        if present.sum() <= MIN_REMAINING_SHARE * len(groups):
            remaining = _columns(present.nonzero()[:, 0], size)
            weighted, inverse = weighted[:, remaining], inverse[remaining][:, remaining]
            groups, present = groups[present], present[present]
    return Elimination(order=tuple(removed), loss=tuple(loss))


def _columns(groups: Tensor, size: int) -> Tensor:
    return (groups[:, None] * size + torch.arange(size)).flatten()


def _cheapest(
    weight: Tensor, inverse: Tensor, candidates: Tensor, size: int, count: int, *, keep_order: bool
) -> list[tuple[int, float]]:
    """Return `count` of the groups at `candidates` in their order of removal, and the error that each adds.

    A group that replaces another may cost more once that one is removed, so errors are updated after each removal; for
    a few groups their own blocks suffice.
    """
    columns = _columns(candidates, size)
    weight, inverse, remaining = weight[:, columns], inverse[columns][:, columns], candidates.tolist()
    removed: list[tuple[int, float]] = []
    for _ in range(count):
        errors = _errors(weight, inverse, len(remaining))
        index = 0 if keep_order else int(errors.argmin())
        removed.append((remaining.pop(index), float(errors[index])))
        gone = torch.arange(weight.shape[1]) // size == index
        block, cross = inverse[gone][:, gone], inverse[gone][:, ~gone]
        coefficients = cross / block if size == 1 else torch.linalg.solve(block, cross)
        weight = weight[:, ~gone] - weight[:, gone] @ coefficients
        inverse = inverse[~gone][:, ~gone] - cross.T @ coefficients
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


def order_channels(
    model: nn.Module, unit: Unit, moments: UnitMoments, order: Sequence[int] | None = None
) -> Elimination:
    """Return the channels or heads of `unit` from the first to remove, and the KL to second order after each removal.

    The KL is half the error weighted by the loss's sensitivity, in nats; zero if gradients are unusable. Weighting the
    order by it too was worth a fifth of the KL, except for heads, which are few, and their gradients noisy
    (docs/decisions/LOG.md). A given `order` stays.
    """
    weight = matrix_of(model.get_submodule(unit.consumer))
    # Squares of gradients that almost vanish don't fit into float32.
    is_usable = bool(moments.sensitivity.isfinite().all())
    if order is None and (unit.kind is UnitKind.HEADS or not is_usable):
        order = eliminate(weight, moments.covariance, torch.eye(len(weight), device=weight.device), unit.width).order
    if order is not None and not is_usable:
        return Elimination(order=tuple(order), loss=(0.0,) * (unit.width + 1))
    errors = eliminate(weight, moments.covariance, moments.sensitivity, unit.width, order)
    return Elimination(order=errors.order, loss=tuple(error / 2 for error in errors.loss))
