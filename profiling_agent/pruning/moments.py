"""T0 of the evidence: one forward and one backward pass say what every channel carries and how much the loss feels it."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812 (PyTorch's own name for it)

from profiling_agent.pruning.consumers import features, outputs_of, watched
from profiling_agent.records import Unit


@dataclass(slots=True, kw_only=True)
class UnitMoments:
    """Averages for one unit; x is what its consumer multiplies, g the gradient of the loss at its output.

    The loss is the cross-entropy with labels drawn from the model's own answers, whose squared gradients are the
    Fisher information: no labels are needed.
    """

    mean: Tensor  # E[x], (columns,)
    gram: Tensor  # E[x x'], (columns, columns)
    sensitivity: Tensor  # sum over an image's positions of E[g g'], (outputs, outputs)
    taylor: Tensor  # E|gate|, (width,): gate is the derivative of an image's loss by a factor on the channel
    fisher: Tensor  # E[gate^2], (width,)

    @property
    def covariance(self) -> Tensor:
        """Return Cov(x), (columns, columns)."""
        return self.gram - torch.outer(self.mean, self.mean)


def gather_moments(
    model: nn.Module, units: Sequence[Unit], batches: Iterable[Tensor], *, seed: int = 0
) -> dict[str, UnitMoments]:
    """Return the moments of every unit by name, over `batches` of pixel values (b, c, h, w).

    The model has to be in eval mode; its parameters' gradients are neither needed nor touched.
    """
    generator = torch.Generator().manual_seed(seed)
    sums: dict[str, UnitMoments] = {}
    num_images = 0
    frozen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in frozen:
            parameter.requires_grad_(requires_grad=False)
        with torch.enable_grad(), watched(model, [unit.consumer for unit in units]) as seen:
            for images in batches:
                seen.clear()
                logits = model(pixel_values=images.detach().requires_grad_()).logits
                drawn = torch.multinomial(logits.detach().float().softmax(1).cpu(), 1, generator=generator)
                loss = F.cross_entropy(logits.float(), drawn[:, 0].to(logits.device), reduction="sum")
                ends = [tensor for unit in units for tensor in seen[unit.consumer]]
                gradients = torch.autograd.grad(loss, ends)
                num_images += len(images)
                for position, unit in enumerate(units):
                    layer = model.get_submodule(unit.consumer)
                    x, _ = seen[unit.consumer]
                    dx, dy = gradients[2 * position : 2 * position + 2]
                    _add(sums, unit, _batch_moments(unit, layer, len(images), x.detach(), dx, dy))
                del logits, loss, ends, gradients
    finally:
        for parameter in frozen:
            parameter.requires_grad_(requires_grad=True)
    for moments in sums.values():
        for name in ("mean", "gram", "sensitivity", "taylor", "fisher"):
            getattr(moments, name).div_(num_images)
    return sums


def _batch_moments(unit: Unit, layer: nn.Module, num_images: int, x: Tensor, dx: Tensor, dy: Tensor) -> UnitMoments:
    """Return the sums over the images of one batch, the mean and the Gram matrix averaged over an image's positions."""
    z, g = features(layer, x), outputs_of(layer, dy)
    # Windowed attention has more rows than images, those of one image side by side.
    seen, there = len(z) / num_images, dy.numel() / g.shape[1] / num_images
    product = (x * dx).movedim(1, -1) if isinstance(layer, nn.Conv2d) else x * dx
    gate = product.reshape(num_images, -1, unit.width, product.shape[-1] // unit.width).float().sum((1, 3))
    return UnitMoments(
        mean=z.sum(0).float() / seen,
        gram=(z.T @ z).float() / seen,
        sensitivity=(g.T @ g).float() * (there / seen),
        taylor=gate.abs().sum(0),
        fisher=gate.square().sum(0),
    )


def _add(sums: dict[str, UnitMoments], unit: Unit, batch: UnitMoments) -> None:
    if (total := sums.setdefault(unit.name, batch)) is not batch:
        for name in ("mean", "gram", "sensitivity", "taylor", "fisher"):
            getattr(total, name).add_(getattr(batch, name))
