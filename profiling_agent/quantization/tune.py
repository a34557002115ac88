"""A float model made ready for int8, with what each of its layers would cost."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor, nn

from profiling_agent.errors import QuantizationError
from profiling_agent.progress import Progress, silent
from profiling_agent.quantization.quantize import EVERYTHING, quantize_model
from profiling_agent.quantization.sensitivity import mark_kept, measure_layers
from profiling_agent.quantization.smoothing import smooth
from profiling_agent.records import FoldedSite, LayerCost, QuantizationRecommendation

# More tell the same at a higher price: every pass is over all of them.
MAX_IMAGES = 32

TunedScheme = Literal["dynamic", "static"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """`model` is the given one where no site was folded; KLs are with all layers quantized, nats."""

    model: nn.Module
    sites: tuple[FoldedSite, ...]
    rows: tuple[LayerCost, ...]
    kl: float
    kl_unfolded: float
    num_images: int


def tune(
    model: nn.Module,
    images: Iterable[Tensor],
    scheme: TunedScheme,
    latency_shares: Mapping[str, float] | None = None,
    *,
    progress: Progress = silent,
) -> Tuning:
    """Fold LayerNorm scales where that helps, and measure what quantizing each layer alone costs.

    `model` is a float model on the CPU and isn't touched; of `images`, batches (b, c, h, w), the first 32 are used.
    `latency_shares` has the layers' shares of the time by name, where they are known.

    Raises:
        PlanError: the model has no layer that the scheme takes.
        QuantizationError: images are missing, too few for the scheme, or don't fit; or a weight isn't finite.
    """
    taken = _first(images)
    everything = QuantizationRecommendation(layer=EVERYTHING, quantization_type=scheme, dtype="qint8")
    quantized = quantize_model(model, [everything], calibration=lambda: [taken])
    smoothed = smooth(model, quantized.model, taken, progress=progress)
    best = smoothed.model if smoothed.sites else model
    rows = measure_layers(
        best, replace(quantized, model=smoothed.quantized), taken, latency_shares=latency_shares, progress=progress
    )
    return Tuning(
        model=best,
        sites=smoothed.sites,
        rows=mark_kept(rows),
        kl=smoothed.kl,
        kl_unfolded=smoothed.kl_unfolded,
        num_images=len(taken),
    )


def _first(images: Iterable[Tensor]) -> Tensor:
    """Return the first 32 images, or as many as there are."""
    taken = list[Tensor]()
    for batch in images:
        if taken and batch.shape[1:] != taken[0].shape[1:]:
            raise QuantizationError(
                f"calibration images have the shapes {tuple(taken[0].shape[1:])!r} and {tuple(batch.shape[1:])!r}: "
                "give them one"
            )
        taken.append(batch)
        if sum(map(len, taken)) >= MAX_IMAGES:
            break
    if not taken:
        raise QuantizationError("calibration images are needed, none were given: raise num_samples")
    return torch.cat(taken)[:MAX_IMAGES]
