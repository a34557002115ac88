"""Tuning: a float model made ready for int8, with the cost of each of its layers."""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from profiling_agent.errors import QuantizationError
from profiling_agent.modules.complexity import count_complexity
from profiling_agent.modules.divergence import mean_kl
from profiling_agent.progress import Progress, silent
from profiling_agent.quantization.calibrate import run
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.quantization.sensitivity import CHUNK, mark_kept, measure_layers, spec_of
from profiling_agent.quantization.smoothing import smooth
from profiling_agent.records import EVERYTHING, FoldedSite, LayerCost, QuantizationRecommendation

# More tell the same at a higher price.
MAX_IMAGES = 32
# Below that many nats, a third of what goes with a point of top-1, nobody looks for layers to blame: on models without outliers folding gains
# next to nothing and no layer is worth float (docs/decisions/LOG.md, 2026-11-21: 0.0001 to 0.0004 nats in all, with outliers 0.007 to 0.017),
# and looking costs more than everything else about a conversion.
SMALL_KL = 5e-3
# Images on which KLs are measured, at least, and the MACs of one pass over them. About a pass for each layer is run: for
# a ViT-B/16 that is minutes with 8 images, and four times as many with 32.
MIN_JUDGED, JUDGED_MACS = 8, 64e9

TunedScheme = Literal["dynamic", "static"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """`model` is the given one where no site was folded; KLs are with all layers quantized, nats, on `num_images`.

    There are no `rows` where nobody looked at single layers.
    """

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
    """Quantize all layers, and where that costs more than a little, fold LayerNorm scales where that helps and measure what each layer costs.

    `model` is a float model on the CPU and isn't touched; of `images`, batches (b, c, h, w), the first 32 are used.
    All of them set ranges and scales; a large model's KLs are measured on fewer, at least 8.
    `latency_shares` has the layers' shares of the time by name, where they are known.

    Raises:
        QuantizationError: the model has no layer that the scheme takes; images are missing, too few for the scheme, or don't fit; or a weight isn't finite.
    """
    taken = _first(images)
    everything = QuantizationRecommendation(layer=EVERYTHING, quantization_type=scheme, dtype="qint8")
    quantized = quantize_model(model, [everything], calibration=partial(taken.split, CHUNK))
    macs = sum(row.macs for row in count_complexity(model, spec_of(taken)).values())
    num_judged = min(len(taken), max(MIN_JUDGED, int(JUDGED_MACS / max(macs, 1))))
    both, chunks = (copy.deepcopy(model).cpu().eval(), quantized.model), taken[:num_judged].split(CHUNK)
    with torch.no_grad():
        kl = mean_kl(*(torch.cat([run(each, chunk) for chunk in chunks]) for each in both))
    if kl < SMALL_KL:
        return Tuning(model=model, sites=(), rows=(), kl=kl, kl_unfolded=kl, num_images=num_judged)
    smoothed = smooth(model, quantized.model, taken, num_judged=num_judged, progress=progress)
    best = smoothed.model if smoothed.sites else model
    made = replace(quantized, model=smoothed.quantized)
    rows = measure_layers(best, made, taken[:num_judged], latency_shares=latency_shares, progress=progress)
    return Tuning(
        model=best,
        sites=smoothed.sites,
        rows=mark_kept(rows),
        kl=smoothed.kl,
        kl_unfolded=smoothed.kl_unfolded,
        num_images=num_judged,
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
