"""Compensation of a cut by least squares, then recovery by a few epochs of training.

Both are checked on images that they aren't fitted to, and undone where they don't help.
"""

import contextlib
import copy
import itertools
import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from scipy.linalg import LinAlgError, cho_factor, cho_solve
from torch import Tensor, nn

from profiling_agent.errors import PruningError
from profiling_agent.lib import modules
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.modules import has_bias, mean_kl, preserving_state, watching
from profiling_agent.lib.replay import Walk
from profiling_agent.pruning.criteria import RIDGE, damp_, expanded, features, matrix_of, outputs_of, second_moment
from profiling_agent.schemas import Cut


def divide_(rows: Tensor, gram: Tensor) -> Tensor:
    """Return rows gram^-1 for a symmetric float64 `gram`, overwriting both: torch would need three more copies.

    Raises:
        LinAlgError: `gram` isn't positive definite.
    """
    # LAPACK is column-major; the transpose of a symmetric matrix is itself.
    factor = cho_factor(gram.cpu().numpy().T, overwrite_a=True, check_finite=False)
    return torch.from_numpy(cho_solve(factor, rows.cpu().numpy().T, overwrite_b=True, check_finite=False).T).to(rows)


# Blocks of neighbours, so that both parts hold all classes whether images are sorted by class or interleaved.
BLOCK, BLOCKS_PER_JUDGED = 8, 4
# With 8 images the fit is unusable, with 32 it is 1.5 points worse than with 128, and 512 add 0.2 (docs/facts.md).
MIN_IMAGES = 128


@dataclass(frozen=True, slots=True)
class Calibration:
    """Images for `model`, moved to its device and dtype.

    `batches` begins a pass over them: (pixel_values (b, c, h, w), labels), labels unused.
    """

    model: nn.Module
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]

    def every(self) -> Iterator[Tensor]:
        """Yield all images, (b, c, h, w)."""
        for pixel_values, _ in self.batches():
            yield pixel_values.to(modules.device_of(self.model), modules.floating_dtype(self.model))

    def fitted(self) -> Iterator[Tensor]:
        """Yield the three quarters that compensation is fitted to."""
        return self._part(is_judged=False)

    def judged(self) -> Iterator[Tensor]:
        """Yield the held-out quarter that compensation is evaluated on."""
        return self._part(is_judged=True)

    def _part(self, *, is_judged: bool) -> Iterator[Tensor]:
        start = 0
        for images in self.every():
            blocks = torch.arange(start, start + len(images), device=images.device) // BLOCK
            start += len(images)
            part = images[(blocks % BLOCKS_PER_JUDGED == BLOCKS_PER_JUDGED - 1) == is_judged]
            if len(part):
                yield part


def regrouped(batches: Iterable[Tensor], size: int) -> Iterator[Tensor]:
    """Yield the same images in batches of `size`, the last one possibly smaller."""
    images = itertools.chain.from_iterable(batches)
    while batch := list(itertools.islice(images, size)):
        yield torch.stack(batch)


# Below this share of the second moment a variance is rounding error of float32 products.
ROUNDING = 1e-6


def paired_moments(
    dense: Walk,
    pruned: Walk,
    layer: nn.Module,
    name: str,
    rows: Sequence[int],
    batches: Iterable[Tensor],
    positions_per_column: float = math.inf,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return E[z] (columns,), E[y] (outputs,), Cov(y, z) and Cov(z) of `layer`, called `name`, in float64.

    z is what the pruned layer multiplies, y the outputs `rows` of the dense one. The mean is over positions: tokens, or
    output pixels of a convolution, drawn by chance if 128 images have more than `positions_per_column`.
    """
    count, sums, origins = 0, list[Tensor](), list[Tensor]()
    for number, images in enumerate(batches):
        y = outputs_of(layer, dense.reach(name, number, images)[1])[:, list(rows)]
        z = features(layer, pruned.reach(name, number, images)[0])
        if len(z) > (most := positions_per_column * z.shape[1] * len(images) / MIN_IMAGES):
            drawn = torch.randperm(len(z), generator=torch.Generator().manual_seed(number))[: math.ceil(most)]
            y, z = y[drawn.to(y.device)], z[drawn.to(z.device)]
        # About the first batch's means: next to a channel far from zero, float32 loses the variance of the others.
        origins = origins or [z.mean(0), y.mean(0)]
        z, y = z - origins[0], y - origins[1]
        # Products in float32 round by 1e-6, far below the ridge, and take half the time. The float64 sums are stored
        # once: a Gram matrix of a wide convolution is as large as the model.
        parts = (z.sum(0, dtype=torch.float64), y.sum(0, dtype=torch.float64), y.T @ z, second_moment(z))
        sums = sums or [torch.zeros_like(part, dtype=torch.float64) for part in parts]
        for total, part in zip(sums, parts, strict=True):
            total.add_(part)
        count += len(z)
    read_mean, given_mean, cross, gram = (total.div_(count) for total in sums)
    cross.addr_(given_mean, read_mean, alpha=-1)
    gram.addr_(read_mean, read_mean, alpha=-1)
    return read_mean + origins[0], given_mean + origins[1], cross, gram


def fit_(
    read_mean: Tensor,
    given_mean: Tensor,
    cross: Tensor,
    gram: Tensor,
    start: Tensor,
    *,
    centred: bool,
    ridge: float = RIDGE,
) -> tuple[Tensor, Tensor]:
    """Return (W, b) that predict the dense outputs y from the pruned consumer's inputs z, near the weight `start`.

    W = start + (E[y z'] - start E[z z']) (E[z z'] + ridge m I)^-1 and b = E[y] - W E[z], m the mean of E[z z']'s
    diagonal. Moments are about the means if `centred`; otherwise about zero, and b is zero. `start` (outputs, columns),
    float64, is the dense weight of the kept columns: W itself if no column varies. If z is the dense activations x_K, W
    is W_K + W_P C_PK (C_KK + ridge m I)^-1 (ThiNet, 2017; He et al., 2017).

    The moments are those of `paired_moments`; `cross` and `gram`, as large as the model for a wide convolution, are
    overwritten.
    """
    if not centred:
        cross.addr_(given_mean, read_mean)
        gram.addr_(read_mean, read_mean)
    weight, mean_variance = start, gram.diagonal().mean()
    if mean_variance > ROUNDING * read_mean.square().mean():
        residual = cross.sub_(start @ gram)
        # Without an inverse `start` is the best known weight.
        with contextlib.suppress(LinAlgError):
            weight = start + divide_(residual, damp_(gram, mean_variance, ridge))
    shift = given_mean - weight @ read_mean
    return weight, shift if centred else torch.zeros_like(shift)


# Of a layer that nothing was cut of the dense weight is a good one: its fit may stay nearer to it, and fewer positions for
# each column do. All 25,000 tokens of a ViT-B/16 would take half as long again.
UNCUT_RIDGE, UNCUT_POSITIONS = 1e-1, 8


def layers_from(model: nn.Module, consumers: Collection[str], image: Tensor) -> list[str]:
    """Return the linear and convolution layers that run once, from the first of `consumers` on, in the network's order."""
    calls = Counter[str]()
    names = [
        name
        for name, layer in model.named_modules()
        if isinstance(layer, nn.Linear) or (isinstance(layer, nn.Conv2d) and layer.groups == 1)
    ]
    with watching(model, names, before=lambda name, _inputs: calls.update([name])):
        model(pixel_values=image)
    order = list(calls)
    return [name for name in order[min(map(order.index, consumers)) :] if calls[name] == 1]


def compensate_layers_(
    baseline: nn.Module,
    pruned: nn.Module,
    cuts: Sequence[Cut],
    keep: Mapping[str, list[int]],
    images: Callable[[], Iterable[Tensor]],
    progress: Progress = silent,
) -> None:
    """Fit every layer of `pruned` behind a cut to the dense outputs, in the order in which the network runs.

    Each is fitted to activations that earlier, already fitted layers produce, so errors don't add up, in one pass of
    both models. Layers that nothing was cut of make up for errors of their inputs, the classifier last: with half of
    the params gone they lower the KL of the shared ViT and ResNet by a third (docs/decisions/LOG.md). A convolution is
    fitted in all its taps: the shared ResNet cut by a quarter then has a KL of 0.081 nats, with taps that share one
    mixing of channels 0.098, and 0.220 if units are fitted to dense activations.
    """
    units = {cut.unit.consumer: cut.unit for cut in cuts}
    cut_rows = {
        producer: cut.unit.rows_of(keep[cut.unit.name], len(baseline.get_parameter(f"{producer}.weight")))
        for cut in cuts
        for producer in cut.unit.producers
    }
    image = next(iter(images()))[:1]
    order = layers_from(baseline, units, image)
    norms = modules.following_norms(baseline, order, image)
    dense_walk = Walk(baseline, order, image, drops_unread=units)
    pruned_walk = dense_walk.through(pruned)
    for number, name in enumerate(order):
        progress("compensating", number, len(order))
        dense, layer = baseline.get_submodule(name), pruned.get_submodule(name)
        unit, norm = units.get(name), norms.get(name)
        start = matrix_of(dense).double()
        rows = cut_rows.get(name, range(len(start)))
        columns = expanded(keep[unit.name], start.shape[1] // unit.width) if unit else range(start.shape[1])
        start = start[list(rows)][:, list(columns)]
        # Layers that weigh a unit's channels are cut with it, and are left as they are.
        if start.shape != matrix_of(layer).shape:
            continue
        most, ridge = (math.inf, RIDGE) if unit else (UNCUT_POSITIONS, UNCUT_RIDGE)
        moments = paired_moments(dense_walk, pruned_walk, layer, name, rows, images(), most)
        weight, shift = fit_(*moments, start, centred=norm is not None or has_bias(layer), ridge=ridge)
        parameter = layer.get_parameter("weight")
        parameter.copy_(weight.reshape(parameter.shape))
        if has_bias(layer):
            layer.get_parameter("bias").copy_(shift)
        elif norm is not None:
            mean = baseline.get_submodule(norm).get_buffer("running_mean")
            # A norm that is cut with a unit has the remaining channels only.
            pruned.get_submodule(norm).get_buffer("running_mean").copy_(mean[list(rows)] - shift)


@dataclass(frozen=True, slots=True, kw_only=True)
class Compensated:
    """The pruned model, compensated if that helped, and its KL divergence to the dense model, in nats.

    If it didn't, `steps` is empty and `model` the pruned model itself; `note` is the reason if it wasn't tried.
    """

    model: nn.Module
    kl_before: float
    kl_after: float
    steps: tuple[str, ...] = ()
    note: str | None = None


def compensate(
    baseline: nn.Module,
    pruned: nn.Module,
    cuts: Sequence[Cut],
    keep: Mapping[str, list[int]],
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    *,
    progress: Progress = silent,
) -> Compensated:
    """Return a compensated copy of `pruned`, which `cuts` and `keep` made from `baseline`; both are unchanged.

    `batches` begins a pass over the calibration images: (pixel_values, labels), labels unused. Layers are fitted to
    three quarters of them, which is kept only if it lowers the mean KL(unpruned || pruned) of the other quarter. With
    fewer than 128 images it isn't tried, and the KL is that of all images.

    Example:
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from profiling_agent.pruning.prune import prune_model
        >>> from profiling_agent.pruning.units import find_units
        >>> from profiling_agent.schemas import InputSpec
        >>> config = ViTConfig(image_size=32, patch_size=8, hidden_size=48, num_hidden_layers=1)
        >>> model = ViTForImageClassification(config)
        >>> spec = InputSpec(channels=3, height=32, width=32, source="example")
        >>> units = find_units(model, spec, {}).units
        >>> cuts = [Cut(unit=unit, keep=unit.width // 2, requested_ratio=0.5) for unit in units]
        >>> pruned = prune_model(model, cuts, spec=spec)
        >>> batches = [(torch.randn(32, 3, 32, 32), torch.zeros(32)) for _ in range(4)]
        >>> compensated = compensate(model, pruned.model, cuts, pruned.keep, lambda: batches)
        >>> compensated.kl_after <= compensated.kl_before
        True

    Raises:
        PruningError: there is no image, or a model returns logits that aren't finite.
    """
    calibration, model = Calibration(baseline, batches), copy.deepcopy(pruned)
    with preserving_state(baseline), preserving_state(model), torch.no_grad():
        baseline.eval()
        model.eval()
        if (num_images := sum(map(len, calibration.every()))) < MIN_IMAGES:
            expected = _logits(baseline, calibration.every())
            kl = _check_finite(mean_kl(expected, _logits(model, calibration.every()), model))
            note = f"not compensated: {num_images} calibration images, at least {MIN_IMAGES} are needed"
            return Compensated(model=pruned, kl_before=kl, kl_after=kl, note=note)
        expected = _logits(baseline, calibration.judged())
        before = _check_finite(mean_kl(expected, _logits(model, calibration.judged()), model))
        is_mirrored = any(isinstance(baseline.get_submodule(cut.unit.consumer), nn.Conv2d) for cut in cuts)
        images = partial(mirrored, calibration.fitted) if is_mirrored else calibration.fitted
        compensate_layers_(baseline, model, cuts, keep, images, progress)
        after = mean_kl(expected, _logits(model, calibration.judged()), model)
    # Also false if a fit made logits that aren't finite.
    if after < before:
        return Compensated(model=model, kl_before=before, kl_after=after, steps=("least squares",))
    return Compensated(model=pruned, kl_before=before, kl_after=before)


def mirrored(batches: Callable[[], Iterable[Tensor]]) -> Iterator[Tensor]:
    """Yield each batch, and its mirror image: late convolutions have fewer positions in 256 images than weights to fit.

    The shared ResNet with half of its params gone then has a KL of 0.024 nats instead of 0.028.
    """
    for images in batches():
        yield images
        yield images.flip(-1)


def _logits(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    with torch.no_grad():
        logits = [model(pixel_values=images).logits for images in batches]
    if not logits:
        raise PruningError("there are 0 calibration images: raise num_samples")
    return torch.cat(logits)


def _check_finite(kl: float) -> float:
    if not math.isfinite(kl):
        raise PruningError(f"the KL of the pruned model to the unpruned one is {kl!r} on calibration images; cut less")
    return kl


# The shared ViT, cut by 57% and compensated to a KL of 0.20, gets to 0.14, 0.11 and 0.09 in 3 epochs of 1,000 images at
# 1e-5, 5e-5 and 2e-4; at 1e-3 it diverges, and so does the ResNet. Large pretrained models want the lower rates.
LEARNING_RATE = 5e-5
# At temperatures 1, 2 and 4 the ViT ends at 0.095, 0.089 and 0.086 (rate 2e-4), the ResNet at 0.175, 0.170 and 0.171.
TEMPERATURE = 2.0
MAX_GRADIENT_NORM = 1.0
# Epochs without a lower KL before training stops.
PATIENCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The model of the best epoch, and its KL divergence to the dense model on the held-out images, in nats.

    `model` is the pruned model itself if no epoch lowered the KL. `stopped` is the reason why training ended.
    """

    model: nn.Module
    epochs_run: int
    kl_before: float
    kl_after: float
    stopped: str


def recover(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Callable[[int], Iterable[Tensor]],
    judged: Callable[[], Iterable[Tensor]],
    *,
    epochs: int,
    learning_rate: float = LEARNING_RATE,
    progress: Progress = silent,
) -> Recovered:
    """Return a copy of `pruned` trained to reproduce the logits of `dense`; both are unchanged.

    `batches(epoch)` gives the training images of an epoch, counted from 0; `judged()` gives held-out ones that choose
    the best epoch. Both are pixel_values (b, c, h, w). The optimizer is AdamW without decay, its rate a cosine over
    epochs. All is in eval mode: batch norms keep their statistics, and dropout is off.

    Raises:
        PruningError: there are no held-out images, or a model returns logits that aren't finite.
    """
    student = copy.deepcopy(pruned)
    trainable = [parameter for parameter in student.parameters() if parameter.requires_grad]
    with preserving_state(dense), preserving_state(student):
        dense.eval()
        student.eval()
        expected = _logits(dense, judged())
        optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.0)
        kls = [_check_finite(mean_kl(expected, _logits(student, judged()), student))]
        best_weights, stopped = list[Tensor](), f"all of {epochs} epochs were run"
        for epoch in range(epochs):
            progress("recovering", epoch, epochs)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * (1 + math.cos(math.pi * epoch / epochs)) / 2
            is_finite = _train(dense, student, optimizer, batches(epoch))
            kl = mean_kl(expected, _logits(student, judged()), student) if is_finite else math.nan
            if not math.isfinite(kl):
                stopped = f"in epoch {epoch + 1} the loss or the logits were not finite"
                break
            if kl < min(kls):
                best_weights = [parameter.detach().clone() for parameter in trainable]
            kls.append(kl)
            if len(kls) - 1 - kls.index(min(kls)) >= PATIENCE:
                stopped = f"the KL did not fall for {PATIENCE} epochs"
                break
        progress("recovering", epochs, epochs)
    for parameter, best in zip(trainable, best_weights, strict=False):
        parameter.data.copy_(best)
        parameter.grad = None
    model = student if best_weights else pruned
    return Recovered(model=model, epochs_run=len(kls) - 1, kl_before=kls[0], kl_after=min(kls), stopped=stopped)


def _train(dense: nn.Module, student: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]) -> bool:
    """Train one epoch, and return whether every loss was finite; the first that isn't ends it."""
    trainable = optimizer.param_groups[0]["params"]
    for images in batches:
        pixel_values = images.to(trainable[0].device, trainable[0].dtype)
        with torch.no_grad():
            target = dense(pixel_values=pixel_values).logits / TEMPERATURE
        logits = student(pixel_values=pixel_values).logits / TEMPERATURE
        # The square restores the gradient's size, which falls with the temperature (Hinton et al., 2015, section 2).
        loss = modules.divergences(target, logits, student).mean() * TEMPERATURE**2
        optimizer.zero_grad()
        loss.backward()
        norm = nn.utils.clip_grad_norm_(trainable, MAX_GRADIENT_NORM)
        if not torch.isfinite(loss) or not torch.isfinite(norm):
            return False
        optimizer.step()
    return True
