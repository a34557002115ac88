"""Compensation: a prune is made up for without training, as far as images that it was not fitted to say that it helps."""

import copy
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from profiling_agent.errors import PruningError
from profiling_agent.modules.divergence import mean_kl
from profiling_agent.modules.inference import device_of, left_as_found
from profiling_agent.modules.norms import batch_norms
from profiling_agent.progress import Progress, silent
from profiling_agent.pruning.calibration import MIN_IMAGES, Calibration, regrouped
from profiling_agent.pruning.least_squares import compensate_units_
from profiling_agent.records import Cut

# What batch norms could still bring back is no more than this, where no more is left: as many nats go with a quarter of a point of top-1 (docs/decisions/LOG.md).
NEGLIGIBLE_KL = 5e-3
# Batch norms are estimated anew from whole batches of one size, whatever the run's: every batch weighs the same, and the
# variance of few is poor.
NORM_BATCH = 32


@dataclass(frozen=True, slots=True, kw_only=True)
class Compensated:
    """The pruned model, compensated by the `steps` that helped, and its KL divergence to the dense model, in nats.

    Where no step was kept, `model` is the pruned model itself; `note` says why none was tried.
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
    """Return a compensated copy of `pruned`, which `cuts` and `keep` made of `baseline`; both are left as found.

    `batches` begins a pass over the calibration images: (pixel_values, labels), labels unused. Steps are fitted to
    three quarters of them, and each is kept only if it lowers the mean KL(unpruned || pruned) of the other quarter.
    With fewer than 128 different images none is tried, and the KL is that of all images. `expected` are the unpruned
    model's logits on that quarter, where they are known, (images, classes).

    Raises:
        PruningError: there is no image, or a model gives logits that aren't finite.
    """
    weight = next(parameter for parameter in baseline.parameters() if parameter.is_floating_point())
    calibration = Calibration(batches=batches, device=device_of(baseline), dtype=weight.dtype)
    with left_as_found(baseline), left_as_found(pruned), torch.no_grad():
        baseline.eval()
        pruned.eval()
        found = calibration.count_different(MIN_IMAGES)
        if found < MIN_IMAGES:
            kl = mean_kl(_logits(baseline, calibration.every()), _logits(pruned, calibration.every()))
            note = f"not compensated: {found} different calibration images, at least {MIN_IMAGES} are needed"
            return Compensated(model=pruned, kl_before=_finite(kl), kl_after=kl, note=note)
        steps = _steps(baseline, pruned, cuts, keep, calibration, progress)
        expected = _logits(baseline, calibration.judged()) if expected is None else expected.to(calibration.device)
        compensated = _best(expected, pruned, steps, calibration)
    for module, like in zip(compensated.model.modules(), pruned.modules(), strict=True):
        module.training = like.training
    return compensated


@dataclass(frozen=True, slots=True)
class _Step:
    """A change made to a model in place, and the tensors that it changes."""

    name: str
    run: Callable[[nn.Module], None]
    changed: Callable[[nn.Module], Iterable[Tensor]]


def _steps(
    baseline: nn.Module,
    pruned: nn.Module,
    cuts: Sequence[Cut],
    keep: Mapping[str, list[int]],
    calibration: Calibration,
    progress: Progress,
) -> list[_Step]:
    """Return what is tried, in this order: batch norms have to see the folded weights."""

    def fitted(model: nn.Module) -> Iterable[Tensor]:
        consumers = [model.get_submodule(cut.unit.consumer) for cut in cuts]
        return [*(tensor for consumer in consumers for tensor in consumer.parameters()), *model.buffers()]

    def fit_(model: nn.Module) -> None:
        compensate_units_(baseline, model, cuts, keep, calibration.fitted, progress)

    steps = [_Step("least squares", fit_, fitted)]
    if batch_norms(pruned):
        steps.append(_Step("batch norm", lambda model: reestimate_(model, calibration.fitted()), nn.Module.buffers))
    return steps


def _best(expected: Tensor, pruned: nn.Module, steps: Sequence[_Step], calibration: Calibration) -> Compensated:
    """Take each step on one copy, and take back those that don't help: a copy for each would be a model more held."""
    model, kept = copy.deepcopy(pruned), list[str]()
    before = kl = _finite(mean_kl(expected, _logits(pruned, calibration.judged())))
    for step in steps:
        if kept and kl <= NEGLIGIBLE_KL:
            break
        held = [tensor.clone() for tensor in step.changed(model)]
        step.run(model)
        stepped_kl = mean_kl(expected, _logits(model, calibration.judged()))
        # Also false where a step gave logits that aren't finite.
        if stepped_kl < kl:
            kl = stepped_kl
            kept.append(step.name)
            continue
        for tensor, like in zip(step.changed(model), held, strict=True):
            tensor.copy_(like)
    return Compensated(model=model if kept else pruned, kl_before=before, kl_after=kl, steps=tuple(kept))


def _logits(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    logits = [model(pixel_values=images).logits for images in batches]
    if not logits:
        raise PruningError("there are 0 calibration images: raise num_samples")
    return torch.cat(logits)


def _finite(kl: float) -> float:
    if not math.isfinite(kl):
        raise PruningError(f"the KL of the pruned model to the unpruned one is {kl!r} on calibration images; cut less")
    return kl


def reestimate_(model: nn.Module, batches: Iterable[Tensor]) -> None:
    """Set the running statistics of every batch norm to the average over batches of 32 of `batches` (b, c, h, w).

    All else stays in the mode it is in, so nothing is dropped; modes and momenta are as found at the end. Needs 32
    images.
    """
    norms = batch_norms(model)
    found = [(norm, norm.training, norm.momentum) for norm in norms]
    try:
        for norm in norms:
            norm.reset_running_stats()
            # No momentum is the cumulative average.
            norm.train().momentum = None
        for images in regrouped(batches, NORM_BATCH):
            model(pixel_values=images)
    finally:
        for norm, training, momentum in found:
            norm.train(training).momentum = momentum
