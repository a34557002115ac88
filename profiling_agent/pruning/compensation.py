"""Compensation without training: least squares on second moments and batch-norm statistics, verified on held-out images."""

import contextlib
import copy
import hashlib
import math
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import LinAlgError, cho_factor, cho_solve, get_blas_funcs
from torch import Tensor, nn
from torch.nn import functional as F

from profiling_agent.errors import PruningError
from profiling_agent.lib.inference import mkl_is_slow, product
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.modules import (
    batch_norms,
    border_of,
    device_of,
    following_norms,
    has_bias,
    mean_kl,
    preserving_state,
    watching,
)
from profiling_agent.lib.replay import Walk, in_order
from profiling_agent.schemas import Cut, Unit

# Pixels per image that a convolution's statistics use: more of them are redundant.
MAX_PIXELS = 256


def matrix_of(layer: nn.Module) -> Tensor:
    """Return the weight of a Linear or Conv2d as (outputs, columns), a channel's taps next to each other, float32."""
    weight = layer.get_parameter("weight").detach().float()
    return weight.reshape(len(weight), -1)


def columns_of(unit: Unit, layer: nn.Module, kept: Sequence[int]) -> list[int]:
    """Return the columns of `matrix_of(layer)` that belong to the channels or heads `kept`; `layer` is unpruned."""
    size = matrix_of(layer).shape[1] // unit.width
    return [index * size + column for index in kept for column in range(size)]


def features(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return what `layer` multiplies its matrix with: (positions, columns), a position being a token or an output pixel."""
    if not isinstance(layer, nn.Conv2d):
        return inputs.reshape(-1, inputs.shape[-1])
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(inputs, border_of(layer), mode=mode)
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


# Share of the columns' mean second moment, so that the noise of few images isn't fitted (docs/facts.md, "Calibration images and ridge").
RIDGE = 1e-2
(BLAS_SYRK,) = get_blas_funcs(("syrk",), dtype=np.float32)
SingularError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]


def second_moment(rows: Tensor) -> Tensor:
    """Return z'z for the rows z (positions, columns): (columns, columns).

    Torch computes both halves of a symmetric product, BLAS's syrk one. Where MKL is slow, oneDNN computes both halves in less time: 1,568 rows of
    2,304 columns took 177 ms in torch, 104 to 168 in syrk and 95 in oneDNN (AMD EPYC, 2 cores, busy).
    """
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return rows.T @ rows
    if mkl_is_slow():
        columns = rows.detach().T.contiguous()
        return product(columns, columns)
    # BLAS is column-major: the lower half of the transpose is its upper half.
    lower = torch.from_numpy(BLAS_SYRK(1.0, rows.detach().contiguous().numpy().T).T)
    return lower.tril().add_(lower.tril(-1).T)


def damp_(gram: Tensor, mean: Tensor, ridge: float = RIDGE) -> Tensor:
    """Add `ridge` times `mean`, the intended mean of the diagonal, to the diagonal of `gram`; return it."""
    gram.diagonal().add_(ridge * mean)
    return gram


def divide_(rows: Tensor, gram: Tensor) -> Tensor:
    """Return rows gram^-1 for a symmetric float64 `gram`, overwriting both: torch would need three more copies.

    Raises:
        SingularError: `gram` isn't positive definite.
    """
    gram_array, row_array = gram.cpu().numpy(), rows.cpu().numpy()
    try:
        # LAPACK is column-major; the transpose of a symmetric matrix is itself.
        factor = cho_factor(gram_array.T, overwrite_a=True, check_finite=False)
    except LinAlgError as error:
        raise SingularError(str(error)) from error
    return torch.from_numpy(cho_solve(factor, row_array.T, overwrite_b=True, check_finite=False).T).to(rows)


def damped_inverse(covariance: Tensor) -> Tensor:
    """Return (C + ridge m I)^-1, m the mean variance; constant columns get a large finite number."""
    mean = covariance.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.cholesky_inverse(torch.linalg.cholesky(damp_(covariance.clone(), mean)))


@dataclass(slots=True, kw_only=True)
class UnitMoments:
    """Averages for one unit: x is what its consumer multiplies, g the gradient of the loss at its output.

    The loss is the cross-entropy with labels drawn from the model's own predictions. Its squared gradients are the Fisher information, so no
    labels are needed.
    """

    mean: Tensor  # E[x], (columns,)
    covariance: Tensor  # (columns, columns)
    sensitivity: Tensor  # sum over an image's positions of E[g g'], (outputs, outputs)

    @property
    def is_felt(self) -> bool:
        """Return whether gradients are usable: squares of gradients that almost vanish don't fit into float32."""
        return bool(self.sensitivity.isfinite().all())

    @property
    def gram(self) -> Tensor:
        """Return E[x x'], (columns, columns), float64."""
        mean = self.mean.double()
        return self.covariance.double().addr_(mean, mean)


def gather_moments(
    model: nn.Module, units: Sequence[Unit], batches: Iterable[Tensor], *, seed: int = 0
) -> dict[str, UnitMoments]:
    """Return the moments of every unit by name, over `batches` of pixel values (b, c, h, w).

    The model must be in eval mode; its parameters' gradients are neither needed nor changed.
    """
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
    activations: dict[str, tuple[Tensor, Tensor]] = {}
    # The square of a channel of mean 1,000 and deviation 1 loses the variance in float32: moments are taken about the first batch's mean.
    origins: dict[str, Tensor] = {}
    num_images = 0

    def record(name: str, inputs: Tensor, output: Tensor) -> None:
        activations[name] = (inputs, output)

    with torch.enable_grad(), _frozen(model), watching(model, [unit.consumer for unit in units], after=record):
        for images in batches:
            logits = model(pixel_values=images.detach().requires_grad_()).logits.float()
            labels = torch.multinomial(logits.detach().softmax(1).cpu(), 1, generator=generator)[:, 0]
            loss = F.cross_entropy(logits, labels.to(logits.device), reduction="sum")
            gradients = torch.autograd.grad(loss, [activations[unit.consumer][1] for unit in units])
            for unit, gradient in zip(units, gradients, strict=True):
                layer = model.get_submodule(unit.consumer)
                x = features(layer, activations[unit.consumer][0].detach())
                x = x - origins.setdefault(unit.name, x.mean(0))
                g = outputs_of(layer, gradient)
                # Means and covariances are averaged over an image's positions, of which windowed attention has more rows than images.
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
        mean.add_(origins[name])
        moments[name] = UnitMoments(mean=mean, covariance=covariance, sensitivity=sensitivity)
    return moments


@contextmanager
def _frozen(model: nn.Module) -> Generator[None]:
    """Disable parameters' gradients: only those of activations are needed."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trainable:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in trainable:
            parameter.requires_grad = True


# Blocks of neighbours, so that both parts hold all classes whether images are sorted by class or interleaved.
BLOCK, BLOCKS_PER_JUDGED = 8, 4
# With 8 images the fit is unusable, with 32 it is 1.5 points worse than with 128, and 512 add 0.2 (docs/facts.md, "Calibration images and ridge").
MIN_IMAGES = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """Batches of (pixel_values (b, c, h, w), labels), read again on each pass; labels are unused.

    Images are moved to `device` and `dtype`, those of the models.
    """

    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]]
    device: torch.device
    dtype: torch.dtype

    def every(self) -> Iterator[Tensor]:
        """Yield all images, (b, c, h, w)."""
        for pixel_values, _ in self.batches():
            yield pixel_values.to(self.device, self.dtype)

    def fitted(self) -> Iterator[Tensor]:
        """Yield the three quarters that compensation is fitted to."""
        return self._part(judged=False)

    def judged(self) -> Iterator[Tensor]:
        """Yield the held-out quarter that compensation is evaluated on."""
        return self._part(judged=True)

    def _part(self, *, judged: bool) -> Iterator[Tensor]:
        start = 0
        for images in self.every():
            blocks = torch.arange(start, start + len(images), device=self.device) // BLOCK
            start += len(images)
            part = images[(blocks % BLOCKS_PER_JUDGED == BLOCKS_PER_JUDGED - 1) == judged]
            if len(part):
                yield part

    def count_different(self, enough: int) -> int:
        """Return the number of different images, at most `enough`; reading stops there."""
        digests: set[bytes] = set()
        for pixel_values, _ in self.batches():
            digests |= {hashlib.blake2b(image.cpu().numpy().tobytes()).digest() for image in pixel_values}
            if len(digests) >= enough:
                return enough
        return len(digests)


def regrouped(batches: Iterable[Tensor], size: int, *, rest: bool = False) -> Iterator[Tensor]:
    """Yield the same images in batches of exactly `size`; an incomplete last batch is yielded only if `rest`."""
    pending: list[Tensor] = []
    for images in batches:
        pending.append(images)
        if sum(map(len, pending)) >= size:
            *full, last = torch.cat(pending).split(size)
            pending = [last] if len(last) < size else []
            yield from full if pending else (*full, last)
    if rest and pending:
        yield torch.cat(pending)


# Below this share of the second moment a variance is rounding error of float32 products.
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedMoments:
    """Averages over positions, float64: z is what the pruned consumer multiplies, y what the dense one returns.

    Second moments are about the means. A position is a token, or an output pixel of a convolution.
    """

    read_mean: Tensor  # E[z], (columns,)
    given_mean: Tensor  # E[y], (outputs,)
    cross: Tensor  # Cov(y, z), (outputs, columns)
    gram: Tensor  # Cov(z), (columns, columns)


def paired_moments(
    dense: Walk, pruned: Walk, layer: nn.Module, name: str, rows: Sequence[int], batches: Iterable[Tensor]
) -> PairedMoments:
    """Return the moments of the pruned model's `layer`, called `name`; y are the dense layer's outputs `rows`."""
    count, sums, origins = 0, list[Tensor](), list[Tensor]()
    for number, images in enumerate(batches):
        y = outputs_of(layer, dense.reach(name, number, images)[1])[:, list(rows)]
        z = features(layer, pruned.reach(name, number, images)[0])
        # About the first batch's means: next to the square of a channel far from zero, float32 loses the variance of the others.
        origins = origins or [z.mean(0), y.mean(0)]
        z, y = z - origins[0], y - origins[1]
        # Products are in the model's precision: their rounding, 1e-6, is far below the ridge, and float64 takes twice the time. The sums, which
        # grow with the number of images, are float64, and stored once: a Gram matrix of a wide convolution is as large as the model (170 MB on
        # ResNet-101).
        parts = (z.sum(0, dtype=torch.float64), y.sum(0, dtype=torch.float64), y.T @ z, second_moment(z))
        sums = sums or [torch.zeros_like(part, dtype=torch.float64) for part in parts]
        for total, part in zip(sums, parts, strict=True):
            total.add_(part)
        count += len(z)
    read_mean, given_mean, cross, gram = (total.div_(count) for total in sums)
    cross.addr_(given_mean, read_mean, alpha=-1)
    gram.addr_(read_mean, read_mean, alpha=-1)
    return PairedMoments(read_mean=read_mean + origins[0], given_mean=given_mean + origins[1], cross=cross, gram=gram)


def fit_(moments: PairedMoments, start: Tensor, *, centred: bool, ridge: float = RIDGE) -> tuple[Tensor, Tensor]:
    """Return (W, b) that predict the dense outputs y from the pruned consumer's inputs z, near the weight `start`.

    W = start + (E[y z'] - start E[z z']) (E[z z'] + ridge m I)^-1 and b = E[y] - W E[z], m the mean of E[z z']'s diagonal. Moments are about the
    means if `centred`; otherwise they are about zero, and b is zero. `start` (outputs, columns), float64, is the dense weight of the kept columns,
    so that an infinite ridge changes nothing. If z is the dense activations x_K, W is W_K + W_P C_PK (C_KK + ridge m I)^-1 (ThiNet, 2017; He et al.,
    2017). If no column varies, W is `start`.

    The second moments are overwritten: those of a wide convolution are as large as the model.
    """
    cross, gram = moments.cross, moments.gram
    if not centred:
        cross.addr_(moments.given_mean, moments.read_mean)
        gram.addr_(moments.read_mean, moments.read_mean)
    weight, mean_variance = start, gram.diagonal().mean()
    if mean_variance > ROUNDING * moments.read_mean.square().mean():
        residual = cross.sub_(start @ gram)
        # Without an inverse `start` is the best known weight.
        with contextlib.suppress(SingularError):
            weight = start + divide_(residual, damp_(gram, mean_variance, ridge))
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
    """Fit the consumer of every cut unit in `pruned` to the dense outputs, in the order in which the network runs.

    Each is fitted to activations that earlier, already fitted units produce, so errors don't add up. That takes one pass of both models, one
    stretch per unit. A convolution is fitted in all its taps: on the shared ResNet cut by a quarter that leaves a KL of 0.081 nats, instead of
    0.098 with taps that share one mixing of channels, and 0.220 if every unit is fitted to the dense activations only (docs/decisions/LOG.md).
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
        parameter = layer.get_parameter("weight")
        parameter.copy_(weight.reshape(parameter.shape))
        if has_bias(layer):
            layer.get_parameter("bias").copy_(shift)
        elif norm is not None:
            mean = baseline.get_submodule(norm).get_buffer("running_mean")[list(rows)]
            pruned.get_submodule(norm).get_buffer("running_mean").copy_(mean - shift)


# Batch norms are skipped below this KL: as many nats go with a quarter of a point of top-1 (docs/decisions/LOG.md).
NEGLIGIBLE_KL = 5e-3
# Batch norms are re-estimated from whole batches of one size: every batch weighs the same, and the variance of few images is poor.
NORM_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Compensated:
    """The pruned model, compensated by the `steps` that helped, and its KL divergence to the dense model, in nats.

    If no step helped, `model` is the pruned model itself; `note` is the reason if none was tried.
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
    expected: Tensor | None = None,
    progress: Progress = silent,
) -> Compensated:
    """Return a compensated copy of `pruned`, which `cuts` and `keep` made from `baseline`; both are unchanged.

    `batches` begins a pass over the calibration images: (pixel_values, labels), labels unused. Steps are fitted to three quarters of them, and each
    is kept only if it lowers the mean KL(unpruned || pruned) of the other quarter. With fewer than 128 different images none is tried, and the KL
    is that of all images. `expected` are the unpruned model's logits on that quarter, if known, (images, classes).

    Raises:
        PruningError: there is no image, or a model returns logits that aren't finite.
    """
    weight = next(parameter for parameter in baseline.parameters() if parameter.is_floating_point())
    calibration = Calibration(batches=batches, device=device_of(baseline), dtype=weight.dtype)
    with preserving_state(baseline), preserving_state(pruned), torch.no_grad():
        baseline.eval()
        pruned.eval()
        num_different = calibration.count_different(MIN_IMAGES)
        if num_different < MIN_IMAGES:
            kl = mean_kl(_logits(baseline, calibration.every()), _logits(pruned, calibration.every()))
            note = f"not compensated: {num_different} different calibration images, at least {MIN_IMAGES} are needed"
            return Compensated(model=pruned, kl_before=_check_finite(kl), kl_after=kl, note=note)
        expected = _logits(baseline, calibration.judged()) if expected is None else expected.to(calibration.device)
        # Steps are taken on one copy, and undone if they don't help; a copy per step would hold one more model in memory.
        model, helpful = copy.deepcopy(pruned), list[str]()

        def fit_consumers_() -> None:
            compensate_units_(baseline, model, cuts, keep, calibration.fitted, progress)

        def fitted_tensors() -> list[Tensor]:
            consumers = [model.get_submodule(cut.unit.consumer) for cut in cuts]
            return [*(tensor for consumer in consumers for tensor in consumer.parameters()), *model.buffers()]

        # Each with the tensors that it changes; batch norms have to see the folded weights.
        steps = [("least squares", fit_consumers_, fitted_tensors)]
        if batch_norms(pruned):
            steps.append(
                ("batch norm", lambda: reestimate_(model, calibration.fitted()), lambda: list(model.buffers()))
            )
        before = kl = _check_finite(mean_kl(expected, _logits(pruned, calibration.judged())))
        for name, run, changed in steps:
            if helpful and kl <= NEGLIGIBLE_KL:
                break
            saved = [tensor.clone() for tensor in changed()]
            run()
            stepped_kl = mean_kl(expected, _logits(model, calibration.judged()))
            # Also false if a step made logits that aren't finite.
            if stepped_kl < kl:
                kl = stepped_kl
                helpful.append(name)
                continue
            for tensor, original in zip(changed(), saved, strict=True):
                tensor.copy_(original)
    for module, original in zip(model.modules(), pruned.modules(), strict=True):
        module.training = original.training
    return Compensated(model=model if helpful else pruned, kl_before=before, kl_after=kl, steps=tuple(helpful))


def _logits(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    logits = [model(pixel_values=images).logits for images in batches]
    if not logits:
        raise PruningError("there are 0 calibration images: raise num_samples")
    return torch.cat(logits)


def _check_finite(kl: float) -> float:
    if not math.isfinite(kl):
        raise PruningError(f"the KL of the pruned model to the unpruned one is {kl!r} on calibration images; cut less")
    return kl


def reestimate_(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set the running statistics of every batch norm to the average over batches of 32 of `batches` (b, c, h, w).

    Other modules keep their mode, so dropout stays off; modes and momenta are restored at the end. Needs 32 images.
    """
    with preserving_state(model):
        for norm in batch_norms(model):
            norm.reset_running_stats()
            # Momentum None means the cumulative average.
            norm.train().momentum = None
        for images in regrouped(batches, NORM_BATCH):
            model(pixel_values=images)
