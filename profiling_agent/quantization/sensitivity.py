"""Sensitivity: what quantizing one layer alone costs, and which layers the rules leave in float for it."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.lib.progress import Progress, silent
from profiling_agent.modules.complexity import count_complexity
from profiling_agent.modules.hooks import watching
from profiling_agent.modules.inference import mean_kl
from profiling_agent.modules.prefix import Prefixes, Replay, find_prefixes
from profiling_agent.quantization.calibrate import fold_norms_, run
from profiling_agent.quantization.kinds import quantized_modules
from profiling_agent.quantization.layers import QuantizedModule
from profiling_agent.quantization.quantize import NUM_CHECKED, Quantized
from profiling_agent.schemas import InputSpec, LayerCost

# Images whose intermediate outputs are held at once: half a gigabyte for ResNet-101 at 224 x 224.
CHUNK = 8
# Layers are left in float only where all of them together cost as much: a divergence that moves about one prediction
# in a thousand.
MATTERS = 1e-3
# Of the time and of the params, at most; a layer has to cost so many times its share of either, and so much of the whole divergence.
# (By time alone a real MobileNet kept a layer with 22% of its params, for 5% of the divergence: docs/decisions/LOG.md, 2026-11-24.)
MAX_SHARE, MIN_RATIO, MIN_KL_SHARE = 0.05, 4.0, 0.02


def measure_layers(
    model: nn.Module,
    quantized: Quantized,
    images: Tensor,
    *,
    latency_shares: Mapping[str, float] | None = None,
    progress: Progress = silent,
) -> tuple[LayerCost, ...]:
    """Return the KL to `model`, in nats, of each layer that `quantized` has quantized, with that layer alone quantized.

    `quantized` came of `model` on the CPU; neither is touched. `images` (b, c, h, w) are run through the whole model
    once, and for each layer from there on. Rows are in the model's order; a layer that isn't called has none.
    """
    called = set[str]()
    names = [name for name, _ in model.named_modules() if name]
    with torch.no_grad(), watching(model, names, before=lambda name, _input: called.add(name)):
        run(model, images[:1])
    layers = {name: module for name, module in quantized_modules(quantized.model).items() if name in called}
    # With one layer quantized nothing before it has to be made up for.
    layers |= {name: _shifted_back(layers[name], shift) for name, shift in quantized.shifts.items() if name in layers}
    plain = _plain(model, quantized, layers, images)
    counts = count_complexity(plain, spec_of(images))
    macs, params = sum(row.macs for row in counts.values()), sum(row.params for row in counts.values())
    swaps = {name: {name: layer} for name, layer in layers.items()}
    with torch.no_grad():
        expected, found = swapped_logits(plain, swaps, images, progress=progress)
    shares = latency_shares or {}
    return tuple(
        LayerCost(
            layer=name,
            kl=mean_kl(expected, found[name]),
            macs_share=counts[name].macs / macs if name in counts and macs else 0.0,
            params_share=counts[name].params / params if name in counts and params else 0.0,
            latency_share=shares.get(name),
        )
        for name in layers
    )


def _shifted_back(layer: QuantizedModule, shift: Tensor) -> QuantizedModule:
    plain: Any = copy.deepcopy(layer)
    plain.bias = plain.bias - shift
    return plain


def _plain(model: nn.Module, quantized: Quantized, layers: Mapping[str, QuantizedModule], images: Tensor) -> nn.Module:
    """Return a float copy in which one layer can be exchanged: batch norms are folded as they are in `quantized`."""
    plain = copy.deepcopy(model).cpu().eval()
    convolutions = [name for name in layers if isinstance(plain.get_submodule(name), nn.Conv2d)]
    with torch.no_grad():
        if quantized.folded:
            fold_norms_(plain, convolutions, images[:NUM_CHECKED])
    return plain


def spec_of(images: Tensor) -> InputSpec:
    """Return the input shape of a model that takes these images."""
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
    """Return the logits of `model`, and by key those with the modules of each swap in their places, one swap at a time.

    The model is in eval mode, gradients are off, and each exchanged module is called. What is computed before the first
    of them is taken from one full pass. The model is left as it was found.
    """
    readers = {key: list(modules) for key, modules in swaps.items()}
    prefixes = find_prefixes(model, readers, images[:1]) if swaps else Prefixes({})
    expected, found = list[Tensor](), {key: list[Tensor]() for key in swaps}
    chunks = images.split(CHUNK)
    for index, chunk in enumerate(chunks):
        replay = Replay(model, prefixes, chunk)
        expected.append(replay.logits)
        for done, (key, modules) in enumerate(swaps.items()):
            progress(message, index * len(swaps) + done, len(chunks) * len(swaps))
            before = place_(model, modules)
            found[key].append(replay.run_from(key))
            place_(model, before)
    return torch.cat(expected), {key: torch.cat(parts) for key, parts in found.items()}


def place_(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Set modules in their places; return those that stood there."""
    before = {name: model.get_submodule(name) for name in modules}
    for name, module in modules.items():
        model.set_submodule(name, module)
    return before


def mark_kept(rows: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
    """Return the rows with those marked that stay in float: what costs most KL for least time and fewest bytes.

    Nothing where all layers' KLs add up to less than 1e-3 nats. Else the layers with the highest ratio of KL to their share,
    as long as together these are at most 5%, and what is left matters; each has to cost 4 times its share and 2% of the whole KL.
    The share is that of the time, of the MACs where no time was measured, or that of the params where it is larger.
    """
    total = sum(row.kl for row in rows)
    left, spent = total, 0.0
    kept = set[str]()
    # What takes nothing at all still has an order.
    for row in sorted(rows, key=lambda row: row.kl / max(_share(row), 1e-9), reverse=True):
        share = _share(row)
        costs = row.kl >= total * max(MIN_RATIO * share, MIN_KL_SHARE)
        if costs and left >= MATTERS and spent + share <= MAX_SHARE:
            kept.add(row.layer)
            left, spent = left - row.kl, spent + share
    return tuple(row.model_copy(update={"kept": row.layer in kept}) for row in rows)


def _share(row: LayerCost) -> float:
    return max(row.macs_share if row.latency_share is None else row.latency_share, row.params_share)
