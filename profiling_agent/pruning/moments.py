"""T0 of the evidence: one forward and one backward pass say what every channel carries and how much the loss feels it."""

from collections.abc import Generator, Iterable, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from profiling_agent.modules.hooks import watching
from profiling_agent.pruning.consumers import features, outputs_of
from profiling_agent.pruning.ridge import second_moment
from profiling_agent.records import Unit

FIELDS = ("mean", "covariance", "sensitivity", "taylor", "fisher")


@dataclass(slots=True, kw_only=True)
class UnitMoments:
    """Averages for one unit; x is what its consumer multiplies, g the gradient of the loss at its output.

    The loss is the cross-entropy with labels drawn from the model's own answers, whose squared gradients are the
    Fisher information: no labels are needed.
    """

    mean: Tensor  # E[x], (columns,)
    covariance: Tensor  # (columns, columns)
    sensitivity: Tensor  # sum over an image's positions of E[g g'], (outputs, outputs)
    taylor: Tensor  # E|gate|, (width,): gate is the derivative of an image's loss by a factor on the channel
    fisher: Tensor  # E[gate^2], (width,)

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
            ends = [tensor for unit in units for tensor in seen[unit.consumer]]
            gradients = torch.autograd.grad(loss, ends)
            for position, unit in enumerate(units):
                layer, x = model.get_submodule(unit.consumer), seen[unit.consumer][0].detach()
                dx, dy = gradients[2 * position : 2 * position + 2]
                z = features(layer, x)
                z = z - about.setdefault(unit.name, z.mean(0))
                _add(sums, unit, _batch_moments(unit, layer, len(images), z, x * dx, dy))
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


def _batch_moments(
    unit: Unit, layer: nn.Module, num_images: int, z: Tensor, product: Tensor, dy: Tensor
) -> UnitMoments:
    """Return the sums over the images of one batch, the mean and the second moment averaged over an image's positions.

    z is (positions, columns), `product` what the layer reads times its gradient, dy the gradient of what it gives.
    """
    g = outputs_of(layer, dy)
    # Windowed attention has more rows than images, those of one image side by side.
    seen, there = len(z) / num_images, dy.numel() / g.shape[1] / num_images
    product = product.movedim(1, -1) if isinstance(layer, nn.Conv2d) else product
    gate = product.reshape(num_images, -1, unit.width, product.shape[-1] // unit.width).float().sum((1, 3))
    return UnitMoments(
        mean=z.sum(0).float() / seen,
        covariance=second_moment(z).float() / seen,
        sensitivity=second_moment(g).float() * (there / seen),
        taylor=gate.abs().sum(0),
        fisher=gate.square().sum(0),
    )


def _add(sums: dict[str, UnitMoments], unit: Unit, batch: UnitMoments) -> None:
    if (total := sums.setdefault(unit.name, batch)) is not batch:
        for field in FIELDS:
            getattr(total, field).add_(getattr(batch, field))
