"""Second moments of what units' consumers read, as matrices, and ridge solutions from them."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from scipy.linalg import LinAlgError, cho_factor, cho_solve, get_blas_funcs
from torch import Tensor, nn
from torch.nn import functional as F

from profiling_agent.modules.borders import border_of
from profiling_agent.modules.hooks import watching
from profiling_agent.modules.products import mkl_is_slow, product
from profiling_agent.records import Unit

# Pixels of one image that a convolution's statistics are taken from: more of them repeat each other.
MAX_PIXELS = 256


def matrix_of(layer: nn.Module) -> Tensor:
    """Return the weight of a Linear or Conv2d as (outputs, columns), a channel's taps side by side, float32."""
    weight = layer.get_parameter("weight").detach().float()
    return weight.reshape(len(weight), -1)


def columns_of(unit: Unit, layer: nn.Module, kept: Sequence[int]) -> list[int]:
    """Return the columns of `matrix_of(layer)` that belong to the channels or heads `kept`, `layer` being unpruned."""
    size = matrix_of(layer).shape[1] // unit.width
    return [index * size + column for index in kept for column in range(size)]


def features(layer: nn.Module, inputs: Tensor) -> Tensor:
    """Return what `layer` multiplies its matrix with: (positions, columns), a position a token or an output pixel."""
    if not isinstance(layer, nn.Conv2d):
        return inputs.reshape(-1, inputs.shape[-1])
    mode = "constant" if layer.padding_mode == "zeros" else layer.padding_mode
    padded = F.pad(inputs, border_of(layer), mode=mode)
    patches = F.unfold(padded, layer.kernel_size, layer.dilation, stride=layer.stride)
    return _thinned(patches).transpose(1, 2).reshape(-1, patches.shape[1])


def outputs_of(layer: nn.Module, outputs: Tensor) -> Tensor:
    """Return the outputs at the positions of `features`: (positions, outputs)."""
    if not isinstance(layer, nn.Conv2d):
        return outputs.reshape(-1, outputs.shape[-1])
    return _thinned(outputs.flatten(2)).transpose(1, 2).reshape(-1, outputs.shape[1])


def _thinned(pixels: Tensor) -> Tensor:
    """Return evenly spread ones of the pixels in the last dimension, at most MAX_PIXELS."""
    count = pixels.shape[-1]
    if count <= MAX_PIXELS:
        return pixels
    chosen = torch.linspace(0, count - 1, MAX_PIXELS, device=pixels.device).round().long()
    return pixels[..., chosen]


# Share of the columns' mean second moment, so that the noise of few images isn't fitted (docs/facts.md, "Calibration
# images and ridge").
RIDGE = 1e-2
(SYRK,) = get_blas_funcs(("syrk",), dtype=np.float32)
SingularError = torch.linalg.LinAlgError  # pyright: ignore[reportPrivateImportUsage]


def second_moment(rows: Tensor) -> Tensor:
    """Return z'z for the rows z (positions, columns), (columns, columns).

    Torch computes both halves of what is symmetric, BLAS's own routine one. Where torch is slow oneDNN computes both in less: 1,568 rows of 2,304
    columns took 177 ms by torch, 104 to 168 by BLAS's routine and 95 by oneDNN (AMD EPYC, 2 cores, busy).
    """
    if rows.device.type != "cpu" or rows.dtype != torch.float32:
        return rows.T @ rows
    if mkl_is_slow():
        across = rows.detach().T.contiguous()
        return product(across, across)
    # It goes down columns, so that the lower half of the transpose is what it calls the upper one.
    lower = torch.from_numpy(SYRK(1.0, rows.detach().contiguous().numpy().T).T)
    return lower.tril().add_(lower.tril(-1).T)


def damp_(gram: Tensor, mean: Tensor, ridge: float = RIDGE) -> Tensor:
    """Add `ridge` times `mean`, of the diagonal that is meant, to the diagonal of `gram`; return it."""
    gram.diagonal().add_(ridge * mean)
    return gram


def divide_(rows: Tensor, gram: Tensor) -> Tensor:
    """Return rows gram^-1 for a symmetric `gram`, float64, in place of both: torch would hold three more of them.

    Raises:
        SingularError: `gram` isn't positive definite.
    """
    square, rest = gram.cpu().numpy(), rows.cpu().numpy()
    try:
        # LAPACK goes down columns: the transpose of a symmetric matrix is itself, and lies as it has to for that.
        factor = cho_factor(square.T, overwrite_a=True, check_finite=False)
    except LinAlgError as error:
        raise SingularError(str(error)) from error
    return torch.from_numpy(cho_solve(factor, rest.T, overwrite_b=True, check_finite=False).T).to(rows)


def damped_inverse(covariance: Tensor) -> Tensor:
    """Return (C + ridge m I)^-1, m the mean variance; columns that don't vary at all get a large finite number."""
    mean = covariance.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    return torch.cholesky_inverse(torch.linalg.cholesky(damp_(covariance.clone(), mean)))


FIELDS = ("mean", "covariance", "sensitivity")


@dataclass(slots=True, kw_only=True)
class UnitMoments:
    """Averages for one unit; x is what its consumer multiplies, g the gradient of the loss at its output.

    The loss is the cross-entropy with labels drawn from the model's own answers, whose squared gradients are the
    Fisher information: no labels are needed.
    """

    mean: Tensor  # E[x], (columns,)
    covariance: Tensor  # (columns, columns)
    sensitivity: Tensor  # sum over an image's positions of E[g g'], (outputs, outputs)

    @property
    def is_felt(self) -> bool:
        """Return whether gradients tell anything: those of a network whose signals all but die out have squares that float32 can't hold."""
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

    The model has to be in eval mode; its parameters' gradients are neither needed nor touched.
    """
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, UnitMoments] = {}
    seen: dict[str, tuple[Tensor, Tensor]] = {}
    # Where a channel stands at 1,000 and varies by 1, its square in float32 has lost what varies: moments are taken about
    # the first batch's mean.
    about: dict[str, Tensor] = {}
    num_images = 0

    def note(name: str, inputs: Tensor, output: Tensor) -> None:
        seen[name] = (inputs, output)

    with torch.enable_grad(), _frozen(model), watching(model, [unit.consumer for unit in units], after=note):
        for images in batches:
            logits = model(pixel_values=images.detach().requires_grad_()).logits.float()
            drawn = torch.multinomial(logits.detach().softmax(1).cpu(), 1, generator=generator)[:, 0]
            loss = F.cross_entropy(logits, drawn.to(logits.device), reduction="sum")
            gradients = torch.autograd.grad(loss, [seen[unit.consumer][1] for unit in units])
            for unit, gradient in zip(units, gradients, strict=True):
                layer = model.get_submodule(unit.consumer)
                z = features(layer, seen[unit.consumer][0].detach())
                z = z - about.setdefault(unit.name, z.mean(0))
                batch = _batch_moments(layer, len(images), z, gradient)
                if (total := sums.setdefault(unit.name, batch)) is not batch:
                    for field in FIELDS:
                        getattr(total, field).add_(getattr(batch, field))
            num_images += len(images)
            seen.clear()
    for name, moments in sums.items():
        for field in FIELDS:
            getattr(moments, field).div_(num_images)
        moments.covariance.addr_(moments.mean, moments.mean, alpha=-1)
        moments.mean.add_(about[name])
    return sums


@contextmanager
def _frozen(model: nn.Module) -> Generator[None]:
    """Spare the gradients of parameters: only those of activations are needed."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad = False
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad = True


def _batch_moments(layer: nn.Module, num_images: int, z: Tensor, dy: Tensor) -> UnitMoments:
    """Return the sums over the images of one batch, the mean and the second moment averaged over an image's positions.

    z is (positions, columns), dy the gradient of what the layer gives.
    """
    g = outputs_of(layer, dy)
    # Windowed attention has more rows than images, those of one image side by side.
    seen, there = len(z) / num_images, dy.numel() / g.shape[1] / num_images
    return UnitMoments(
        mean=z.sum(0).float() / seen,
        covariance=second_moment(z).float() / seen,
        sensitivity=second_moment(g).float() * (there / seen),
    )
