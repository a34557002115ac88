"""Sensitivity to quantization: the cost of quantizing each layer by itself, and the layers that stay in float."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.lib.progress import Progress, silent
from profiling_agent.modules.complexity import count_complexity
from profiling_agent.modules.hooks import watching
from profiling_agent.modules.inference import mean_kl
from profiling_agent.modules.prefix import Replay, find_prefixes
from profiling_agent.quantization.calibrate import fold_norms_, run
from profiling_agent.quantization.kinds import quantized_modules
from profiling_agent.quantization.layers import QuantizedModule
from profiling_agent.quantization.quantize import NUM_CHECKED, Quantized
from profiling_agent.schemas import InputSpec, LayerCost

# Images whose intermediate outputs are stored at once: half a gigabyte for ResNet-101 at 224 x 224.
CHUNK = 8
# Another layer stays in float only if the remaining KL is at least this, in nats: it changes about one prediction in a thousand.
MIN_REMAINING_KL = 1e-3
# Largest total share of time and params that stays in float, and for each layer the least ratio of its KL's share to its own share, and the least
# share of the whole KL. (By time only, a real MobileNet kept a layer with 22% of its params, for 5% of the KL: docs/decisions/LOG.md, 2026-11-24.)
MAX_SHARE, MIN_RATIO, MIN_KL_SHARE = 0.05, 4.0, 0.02


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
    called = set[str]()
    names = [name for name, _ in model.named_modules() if name]
    with torch.no_grad(), watching(model, names, before=lambda name, _input: called.add(name)):
        run(model, images[:1])
    layers = {name: module for name, module in quantized_modules(quantized.model).items() if name in called}
    # With only one layer quantized no earlier layer needs a correction.
    layers |= {name: _undo_shift(layers[name], shift) for name, shift in quantized.shifts.items() if name in layers}
    float_model = _float_copy(model, quantized, layers, images)
    counts = count_complexity(float_model, spec_of(images))
    macs, params = sum(row.macs for row in counts.values()), sum(row.params for row in counts.values())
    swaps = {name: {name: layer} for name, layer in layers.items()}
    with torch.no_grad():
        expected, logits = swapped_logits(float_model, swaps, images, progress=progress)
    shares = latency_shares or {}
    return tuple(
        LayerCost(
            layer=name,
            kl=mean_kl(expected, logits[name]),
            macs_share=counts[name].macs / macs if name in counts and macs else 0.0,
            params_share=counts[name].params / params if name in counts and params else 0.0,
            latency_share=shares.get(name),
        )
        for name in layers
    )


def _undo_shift(layer: QuantizedModule, shift: Tensor) -> QuantizedModule:
    unshifted: Any = copy.deepcopy(layer)
    unshifted.bias = unshifted.bias - shift
    return unshifted


def _float_copy(
    model: nn.Module, quantized: Quantized, layers: Mapping[str, QuantizedModule], images: Tensor
) -> nn.Module:
    """Return a float copy for swapping single layers: batch norms are folded as in `quantized`."""
    float_model = copy.deepcopy(model).cpu().eval()
    convolutions = [name for name in layers if isinstance(float_model.get_submodule(name), nn.Conv2d)]
    with torch.no_grad():
        if quantized.folded:
            fold_norms_(float_model, convolutions, images[:NUM_CHECKED])
    return float_model


def spec_of(images: Tensor) -> InputSpec:
    """Return the input spec of these images."""
    _, channels, height, width = images.shape
    return InputSpec(channels=channels, height=height, width=width, source="calibration images")


def swapped_logits(
    model: nn.Module,
    swaps: Mapping[str, Mapping[str, nn.Module]],
    images: Tensor,
    *,
    message: str = "layers",
    progress: Progress = silent,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of `model`, and by key those with one swap's modules in place.

    The model is in eval mode, gradients are off, and each swapped module is called. One full pass computes all that precedes them. The model is
    unchanged.
    """
    readers = {key: list(modules) for key, modules in swaps.items()}
    prefixes = find_prefixes(model, readers, images[:1]) if swaps else {}
    expected, logits = list[Tensor](), {key: list[Tensor]() for key in swaps}
    chunks = images.split(CHUNK)
    for index, chunk in enumerate(chunks):
        replay = Replay(model, prefixes, chunk)
        expected.append(replay.logits)
        for swap_index, (key, modules) in enumerate(swaps.items()):
            progress(message, index * len(swaps) + swap_index, len(chunks) * len(swaps))
            originals = place_(model, modules)
            logits[key].append(replay.run_from(key))
            place_(model, originals)
    return torch.cat(expected), {key: torch.cat(parts) for key, parts in logits.items()}


def place_(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Put modules in their places; return the modules that were there."""
    originals = {name: model.get_submodule(name) for name in modules}
    for name, module in modules.items():
        model.set_submodule(name, module)
    return originals


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
