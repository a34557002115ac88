"""Sensitivity to quantization: the cost of quantizing all layers, and each by itself, and the layers that stay in float."""

import copy
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn

from profiling_agent.errors import QuantizationError
from profiling_agent.lib.costs import count_complexity
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.modules import mean_kl
from profiling_agent.lib.replay import Walk, in_order
from profiling_agent.quantization.calibrate import first_images, fold_norms_, run
from profiling_agent.quantization.kinds import quantized_modules
from profiling_agent.quantization.quantize import NUM_CHECKED, Quantized, quantize_model
from profiling_agent.schemas import EVERYTHING, InputSpec, LayerCost, QuantizationRecommendation

# Images whose intermediate outputs are stored at once: half a gigabyte for ResNet-101 at 224 x 224.
CHUNK = 8
# Another layer stays in float only if the remaining KL is at least this, in nats: it changes about one prediction in a thousand.
MIN_REMAINING_KL = 1e-3
# Largest total share of time and params that stays in float, and for each layer the least ratio of its KL's share to its own share, and the least
# share of the whole KL. (By time only, a real MobileNet kept a layer with 22% of its params, for 5% of the KL: docs/decisions/LOG.md, 2026-11-24.)
MAX_SHARE, MIN_RATIO, MIN_KL_SHARE = 0.05, 4.0, 0.02
# Below this KL in nats, a third of what goes with a point of top-1, single layers aren't measured: no layer is worth float (docs/decisions/LOG.md,
# 2026-11-21: models without outliers have 0.0001 to 0.0004 nats in all), and measuring costs more than the rest of a conversion.
SMALL_KL = 5e-3
# Minimum number of images for KLs, and the MACs of one pass over them. About one pass per layer is run: for a ViT-B/16 that is minutes with 8
# images, and four times as many with 32.
MIN_JUDGED, JUDGED_MACS = 8, 64e9


def measure_costs(
    model: nn.Module,
    images: Iterable[Tensor],
    scheme: Literal["dynamic", "static"],
    latency_shares: Mapping[str, float] | None = None,
    *,
    progress: Progress = silent,
) -> tuple[float, tuple[LayerCost, ...], int]:
    """Return the KL of quantizing all layers, in nats, the cost of each by itself if that is more than a little, and the number of images.

    `model` is a float model on the CPU and is unchanged; of `images`, batches (b, c, h, w), the first 32 are used. All of them set ranges; a large
    model's KLs are measured on fewer, at least 8. `latency_shares` has the layers' shares of the time by name, if known.

    Raises:
        QuantizationError: the model has no layer that the scheme supports; images are missing, too few for the scheme, or don't fit; or a weight
            isn't finite.
    """
    batches = list(first_images(images))
    if not batches:
        raise QuantizationError("calibration images are needed, none were given: raise num_samples")
    sample = torch.cat(batches)
    everything = QuantizationRecommendation(layer=EVERYTHING, quantization_type=scheme, dtype="qint8")
    quantized = quantize_model(model, [everything], calibration=partial(sample.split, CHUNK))
    macs = sum(row.macs for row in count_complexity(model, _spec_of(sample)).values())
    judged = sample[: max(MIN_JUDGED, int(JUDGED_MACS / max(macs, 1)))]
    models = (copy.deepcopy(model).eval(), quantized.model)
    with torch.no_grad():
        kl = mean_kl(*(torch.cat([run(each, chunk) for chunk in judged.split(CHUNK)]) for each in models))
    if kl < SMALL_KL:
        return kl, (), len(judged)
    rows = measure_layers(model, quantized, judged, latency_shares=latency_shares, progress=progress)
    return kl, mark_float_layers(rows), len(judged)


def measure_layers(
    model: nn.Module,
    quantized: Quantized,
    images: Tensor,
    *,
    latency_shares: Mapping[str, float] | None = None,
    progress: Progress = silent,
) -> tuple[LayerCost, ...]:
    """Return the KL to `model`, in nats, with only one of the layers of `quantized` quantized, for each layer.

    `quantized` was made from `model` on the CPU; both are unchanged. `images` (b, c, h, w) run through the whole model once, and for each layer from
    there on. Rows are in the model's order; a layer that isn't called has none.
    """
    float_model, layers = copy.deepcopy(model).eval(), quantized_modules(quantized.model)
    with torch.no_grad():
        if quantized.folded:
            convolutions = [name for name in layers if isinstance(float_model.get_submodule(name), nn.Conv2d)]
            fold_norms_(float_model, convolutions, images[:NUM_CHECKED])
        names = [name for name, _ in float_model.named_modules() if name in layers]
        called = in_order(float_model, names, images[:1])
        layers = {name: layer for name, layer in layers.items() if name in called}
        for name in layers.keys() & quantized.shifts.keys():
            # Without its bias correction: with only one layer quantized no earlier one needs it.
            unshifted: Any = copy.deepcopy(layers[name])
            unshifted.bias = unshifted.bias - quantized.shifts[name]
            layers[name] = unshifted
        # One full pass of each chunk computes all before the layers.
        walk = Walk(float_model, called, images[:1])
        expected, logits = list[Tensor](), {name: list[Tensor]() for name in layers}
        chunks = images.split(CHUNK)
        for index, chunk in enumerate(chunks):
            expected.append(float_model(pixel_values=chunk).logits)
            chunk_walk = walk.through(float_model)
            for number, name in enumerate(called):
                progress("layers", index * len(layers) + number, len(chunks) * len(layers))
                chunk_walk.reach(name, 0, chunk)
                original = float_model.get_submodule(name)
                float_model.set_submodule(name, layers[name])
                logits[name].append(chunk_walk.logits_from_here(0, chunk))
                float_model.set_submodule(name, original)
    counts, shares = count_complexity(float_model, _spec_of(images)), latency_shares or {}
    macs, params = sum(row.macs for row in counts.values()), sum(row.params for row in counts.values())
    return tuple(
        LayerCost(
            layer=name,
            kl=mean_kl(torch.cat(expected), torch.cat(logits[name])),
            macs_share=counts[name].macs / macs if name in counts and macs else 0.0,
            params_share=counts[name].params / params if name in counts and params else 0.0,
            latency_share=shares.get(name),
        )
        for name in layers
    )


def _spec_of(images: Tensor) -> InputSpec:
    _, channels, height, width = images.shape
    return InputSpec(channels=channels, height=height, width=width, source="calibration images")


def mark_float_layers(rows: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
    """Return the rows with those marked that stay in float: most KL for least time and fewest bytes.

    None if all layers' KLs add up to less than 1e-3 nats. Otherwise the layers with the highest ratio of KL to share, as long as these add up to at
    most 5% and the remaining KL is at least 1e-3 nats; each must cause at least 4 times its share of the total KL, and 2% of it. The share is that
    of the time (of the MACs if no time was measured), or that of the params if larger.
    """
    total = sum(row.kl for row in rows)
    remaining_kl, kept_share = total, 0.0
    kept_layers = set[str]()
    # A share of zero still needs an order.
    for row in sorted(rows, key=lambda row: row.kl / max(_share(row), 1e-9), reverse=True):
        share = _share(row)
        is_costly = row.kl >= total * max(MIN_RATIO * share, MIN_KL_SHARE)
        if is_costly and remaining_kl >= MIN_REMAINING_KL and kept_share + share <= MAX_SHARE:
            kept_layers.add(row.layer)
            remaining_kl, kept_share = remaining_kl - row.kl, kept_share + share
    return tuple(row.model_copy(update={"kept": row.layer in kept_layers}) for row in rows)


def _share(row: LayerCost) -> float:
    return max(row.macs_share if row.latency_share is None else row.latency_share, row.params_share)
