"""Quantization of a model: layers chosen, calibrated on images and replaced in a copy, and what each of them costs."""

import copy
import math
from collections.abc import Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval

from profiling_agent.errors import PlanError, QuantizationError
from profiling_agent.lib import modules
from profiling_agent.lib.costs import count_complexity
from profiling_agent.lib.inference import Folded, quick_products
from profiling_agent.lib.logs import Progress, checked_logits, silent
from profiling_agent.lib.replay import Walk, in_order
from profiling_agent.pruning.widths import matching_names, near_names
from profiling_agent.quantization import layers as quantized_layers
from profiling_agent.quantization.layers import LEVELS, REDUCED_LEVELS, Grid, QuantizedModule, StaticLayer, supports
from profiling_agent.schemas import EVERYTHING, InputSpec, LayerCost, QuantizationRecommendation

# Batches of images, (b, c, h, w).
Images = Sequence[Tensor]
Means = Mapping[str, Sequence[Tensor]]

MIN_IMAGES = 8
# Images of which means are taken, as more add nothing: a mean is over all positions of each.
MAX_IMAGES = 32
# Images on which folding must not change the logits, and their relative distance for float32 products in another order.
NUM_CHECKED, TOLERANCE = 4, 1e-4
# Sampled values per call: TAIL from both ends of each image, and BODY drawn from all.
TAIL, BODY = 16, 8192
# Sampled values per layer, a megabyte: those of 32 calls with eight images each.
CAPACITY = 32 * (BODY + 2 * TAIL * 8)
# Shares of the whole range that are tried for clipping, of each end, the upper first.
SHARES = (0.95, 0.9, 0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized copy of a model, and the names of its quantized layers, in the model's order.

    `folded` names the batch norms folded into the convolutions before them, which have no effect now; `shifts` has the
    bias corrections by layer.
    """

    model: nn.Module
    layers: tuple[str, ...]
    folded: tuple[str, ...] = ()
    shifts: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def quantize_model(
    model: nn.Module,
    recommendations: Sequence[QuantizationRecommendation],
    *,
    calibration: Images = (),
    reduce_range: bool | None = None,
) -> Quantized:
    """Return a copy of `model` on the CPU with the recommended layers quantized; `model` is unchanged.

    `layer` is `all` or an RE2 pattern searched for in live module names; the last recommendation that matches a layer
    wins, and `cast float32` leaves it in float. Dynamic quantization supports `nn.Linear`, static and bfloat16
    `nn.Conv2d` as well; subclasses are never quantized, because third-party code may read their weights. `calibration` are
    batches of images (b, c, h, w): static quantization needs at least 8 images. It first folds batch norms into the
    convolutions that it quantizes, corrects the biases of these, and skips layers that no image reaches. `reduce_range`
    gives the inputs of static layers 7 bits; by default, and always for dynamic layers, it is what torch needs on this
    CPU. Callers that execute static layers in another runtime pass what that needs.

    Raises what `chosen_layers` does, and QuantizationError if weights or inputs aren't finite, or images are too few.
    """
    choices = chosen_layers(model, recommendations)
    quantized = copy.deepcopy(model).cpu()
    reduces = not quantized_layers.torch_has_vnni() if reduce_range is None else reduce_range
    levels = REDUCED_LEVELS if reduces else LEVELS
    static = [name for name, choice in choices.items() if choice.quantization_type == "static"]
    folded, observed = tuple[str, ...](), dict[str, Sampler]()
    if static:
        if (num_images := sum(map(len, calibration))) < MIN_IMAGES:
            raise QuantizationError(
                f"static quantization needs at least {MIN_IMAGES} calibration images, {num_images} were given: "
                "raise num_samples"
            )
        convolutions = [name for name in static if isinstance(quantized.get_submodule(name), nn.Conv2d)]
        # No inference mode: its tensors could not be used in later training or exports.
        with modules.preserving_state(quantized), torch.no_grad():
            folded = fold_norms_(quantized.eval(), convolutions, calibration[0][:NUM_CHECKED]) if convolutions else ()
        observed = observe(quantized, static, calibration)
    layers: dict[str, QuantizedModule] = {}
    for name, choice in choices.items():
        layer: Any = quantized.get_submodule(name)
        with _naming(name):
            if choice.quantization_type == "cast":
                layers[name] = quantized_layers.CastLayer.from_float(layer)
            elif choice.quantization_type == "dynamic":
                dtype = "float16" if choice.dtype == "float16" else "qint8"
                layers[name] = quantized_layers.DynamicLinear.from_linear(layer, dtype)
            elif name in observed:
                layers[name] = StaticLayer.from_float(layer, *observed[name].range(levels), levels)
    # A layer used in two places becomes two layers, while its means cover both.
    num_places = modules.module_counts(quantized)
    corrected = [
        name
        for name, layer in layers.items()
        if isinstance(layer, StaticLayer) and layer.border and layer.bias is not None and num_places[name] == 1
    ]
    if not corrected:
        _replace_(quantized, layers, model)
        return Quantized(model=quantized, layers=tuple(layers), folded=folded)
    expected, logits = output_means(quantized, corrected, calibration), judged_logits(quantized, calibration)
    _replace_(quantized, layers, model)
    shifts = correct_biases_(quantized, expected, calibration, logits)
    return Quantized(model=quantized, layers=tuple(layers), folded=folded, shifts=shifts)


def quantize_rowwise(model: nn.Module, recommendations: Sequence[QuantizationRecommendation]) -> nn.Module:
    """Return a copy of `model` on the CPU with the recommended linear layers in int8 or float8.

    The classifier, whose rows are images, and layers whose widths aren't multiples of 16 stay in float. Raises what
    `chosen_layers` does, and QuantizationError if no layer is left to quantize, or a weight isn't finite.
    """
    choices, multiple = chosen_layers(model, recommendations), quantized_layers.MULTIPLE
    quantized = copy.deepcopy(model).cpu()
    config: Any = model.config
    layers: dict[str, QuantizedModule] = {}
    for name, choice in choices.items():
        layer: Any = quantized.get_submodule(name)
        is_inner = type(layer) is nn.Linear and layer.out_features != config.num_labels
        if choice.dtype in ("qint8", "float8") and is_inner and not any(n % multiple for n in layer.weight.shape):
            with _naming(name):
                layers[name] = quantized_layers.RowwiseLinear.from_linear(layer, choice.dtype)
    if not layers:
        raise QuantizationError(
            f"no nn.Linear that is chosen, besides the classifier, has widths that are multiples of {multiple}, "
            "which int8 and float8 need on CUDA"
        )
    _replace_(quantized, layers, model)
    return quantized


def _replace_(quantized: nn.Module, layers: Mapping[str, QuantizedModule], original: nn.Module) -> None:
    for name, layer in layers.items():
        quantized.set_submodule(name, layer.train(original.get_submodule(name).training))


@contextmanager
def _naming(name: str) -> Generator[None]:
    try:
        yield
    except QuantizationError as error:
        raise QuantizationError(f"layer {name!r} can't be quantized: {error}") from error


def chosen_layers(
    model: nn.Module, recommendations: Sequence[QuantizationRecommendation]
) -> dict[str, QuantizationRecommendation]:
    """Return the recommendation for each layer to quantize, in the model's order.

    PlanError if a pattern is invalid or matches no layer; QuantizationError, which rules out the scheme, if only layers
    of other kinds.
    """
    named = dict(model.named_modules(remove_duplicate=False))
    quantizable = [name for name, module in named.items() if supports("static", module)]
    choices: dict[str, QuantizationRecommendation] = {}
    for recommendation in recommendations:
        kind, pattern = recommendation.quantization_type, recommendation.layer
        names = [name for name, module in named.items() if supports(kind, module)]
        matches, others = (
            group if pattern == EVERYTHING else matching_names(pattern, group) for group in (names, quantizable)
        )
        layer_types = "nn.Linear" if kind == "dynamic" else "nn.Linear or nn.Conv2d"
        if not matches and (others or pattern == EVERYTHING):
            subject = "the model has" if pattern == EVERYTHING else f"the layer pattern {pattern!r} hits"
            raise QuantizationError(f"{subject} no {layer_types}, which alone this quantizes")
        if not matches:
            near = near_names(pattern, names or quantizable)
            advice = f"near names: {', '.join(map(repr, near))}" if near else f"use {EVERYTHING!r} for every layer"
            raise PlanError(f"the layer pattern {pattern!r} hits no {layer_types} to quantize; {advice}")
        choices |= dict.fromkeys(matches, recommendation)
    return {name: choices[name] for name in named if name in choices and choices[name].dtype != "float32"}


class Sampler:
    """A layer's inputs, gathered call by call: the exact ends of their range, and weighted samples.

    Its memory is allocated before the first call. A small tensor per call would lie between activations of megabytes,
    and none of their memory could be freed: 16 batches of a ViT-B/16 held 7 GB for a sample of 40 MB.
    """

    def __init__(self) -> None:
        self.low = self.high = 0.0
        self.size = 0
        self._values, self._weights = torch.empty(CAPACITY), torch.empty(CAPACITY)

    def add(self, x: Tensor, generator: torch.Generator) -> None:
        """Add the input of one call, (b, ...)."""
        rows = x.detach().float().cpu().reshape(len(x), -1)
        low, high = float(rows.min()), float(rows.max())
        # Comparisons ignore a NaN, which is the least and the greatest.
        self.low, self.high = min(self.low, low), math.inf if math.isnan(high) else max(self.high, high)
        # The ends of each image are kept whole: a few values that random draws would miss determine what clipping
        # costs.
        tail = min(TAIL, rows.shape[1] // 4)
        if not tail:
            self._store(rows.flatten(), 1.0)
            return
        top, bottom = rows.topk(tail, dim=1).values, rows.topk(tail, dim=1, largest=False).values
        if self.size + top.numel() + bottom.numel() + BODY > CAPACITY:
            return
        self._store(top.flatten(), 1.0)
        self._store(bottom.flatten(), 1.0)
        indices = torch.randint(rows.numel(), (min(BODY, rows.numel()),), generator=generator)
        body, image_index = rows.flatten()[indices], indices // rows.shape[1]
        body_values = body[(body < top[image_index, -1]) & (body > bottom[image_index, -1])]
        self._store(body_values, rows.numel() / len(indices))

    def _store(self, values: Tensor, weight: float) -> None:
        end = min(self.size + len(values), CAPACITY)
        self._values[self.size : end] = values[: end - self.size]
        self._weights[self.size : end] = weight
        self.size = end

    def range(self, levels: int = LEVELS) -> tuple[float, float]:
        """Return the ends of the grid that includes zero and has the least mean squared error on the sample.

        The search of Choukroun et al. (2019, "Low-bit quantization of neural networks for efficient inference"), with
        separate ends because outputs of GELU and ReLU aren't symmetric.
        """
        low, high = self.low, self.high
        if not math.isfinite(high - low):
            return low, high
        values, weights = self._values[: self.size], self._weights[: self.size]

        def error(ends: tuple[float, float]) -> float:
            return float((weights * (Grid.spanning(*ends, levels).rounded(values) - values).square()).sum())

        # The first of equals: clipping has to pay.
        _, high = min([(low, high), *((low, high * share) for share in SHARES)], key=error)
        return min([(low, high), *((low * share, high) for share in SHARES)], key=error)


def observe(model: nn.Module, names: Collection[str], images: Images) -> dict[str, Sampler]:
    """Return the inputs of each named layer that images reach."""
    samplers, generator = {name: Sampler() for name in names}, torch.Generator().manual_seed(0)
    watched = modules.watching(model, names, before=lambda name, x: samplers[name].add(x, generator))
    with watched, _running(model):
        for batch in images:
            run(model, batch)
    return {name: sampler for name, sampler in samplers.items() if sampler.size}


@contextmanager
def _running(model: nn.Module) -> Generator[None]:
    """Run `model` in eval mode, without gradients and quickly; its state is restored."""
    with modules.preserving_state(model), torch.inference_mode(), quick_products():
        model.eval()
        yield


def run(model: nn.Module, images: Tensor) -> Tensor:
    """Return the logits of calibration images (b, c, h, w); QuantizationError if the model doesn't accept them."""
    shape = tuple(images.shape[1:])
    return checked_logits(
        model,
        images,
        lambda problem: QuantizationError(f"the model can't be run on images of shape {shape!r}, it gives {problem}"),
    )


def fold_norms_(model: nn.Module, convolutions: Collection[str], images: Tensor) -> tuple[str, ...]:
    """Fold into `convolutions` the batch norms that are their only readers; return the names of those norms.

    `model` is in eval mode. A norm stays as a module that does the rest of its work. Its input must be the very tensor
    that a convolution returned; that nothing else reads it is checked by the logits of `images` (b, c, h, w): a pair
    that changes them isn't folded.
    """
    expected = run(model, images)
    count, named = modules.module_counts(model), dict(model.named_modules())
    # Modules that are used in several places are left out.
    pairs = [
        (convolution, norm)
        for convolution, norm in modules.following_norms(model, convolutions, images[:1]).items()
        if isinstance(named[norm], nn.BatchNorm2d) and count[norm] == count[convolution] == 1
    ]

    def are_folded(chosen: Sequence[tuple[str, str]]) -> bool:
        """Fold these pairs, and return whether the logits stay; else undo it."""
        for convolution, norm in chosen:
            layer, norm_layer = named[convolution], named[norm]
            model.set_submodule(convolution, fuse_conv_bn_eval(layer, norm_layer))  # pyright: ignore[reportArgumentType]
            model.set_submodule(norm, Folded(norm_layer))
        # `<=` is false for a NaN.
        if modules.relative_distance(run(model, images), expected) <= TOLERANCE:
            return True
        for name in (name for pair in chosen for name in pair):
            model.set_submodule(name, named[name])
        return False

    if are_folded(pairs):
        return tuple(norm for _, norm in pairs)
    return tuple(norm for convolution, norm in pairs if are_folded([(convolution, norm)]))


def output_means(model: nn.Module, names: Iterable[str], images: Images) -> Means:
    """Return the mean of each output channel, (c,), in each call of the named convolutions on the first 32 images."""
    means: dict[str, list[Tensor]] = {name: [] for name in names}
    watched = modules.watching(model, means, after=lambda name, _, output: means[name].append(output.mean((0, 2, 3))))
    with watched, _running(model):
        for batch in first_images(images):
            run(model, batch)
    return means


def correct_biases_(quantized: nn.Module, expected: Means, images: Images, logits: Tensor) -> dict[str, Tensor]:
    """Shift the biases of int8 convolutions so that output means match `expected`; return the shifts by layer name.

    Rounding shifts a filter's few weights (a depthwise filter has nine) mostly to one side, and every later layer reads
    the sum. Empirical bias correction of Nagel et al. (2019, "Data-Free Quantization Through Weight Equalization and
    Bias Correction"): from the first layer to the last, each on the outputs of the corrected ones before it. `expected`
    is of `output_means` for the float model on the same images. Linear layers stay unchanged: on a ViT that wouldn't
    lower the KL to float32, on a MobileNet the correction makes it 0.4 of what it was (docs/decisions/LOG.md,
    2026-11-25).

    It is undone if `judged_logits` then lie further from `logits`, those of the float model. Where most of every image
    is one background, a channel's mean is that of the background: a real LCNet's KL rose from 0.0004 to 0.09 nats.
    """
    before = modules.mean_kl(logits, judged_logits(quantized, images), quantized)
    means = {name: iter(means) for name, means in expected.items()}
    layers: dict[str, Any] = {name: quantized.get_submodule(name) for name in means}
    biases = {name: layer.bias for name, layer in layers.items()}
    # The mean difference of `expected` and a layer's means over its calls so far, and the number of images in them.
    shifts: dict[str, tuple[Tensor, int]] = {}

    def shift(_module: nn.Module, _args: Any, output: Tensor, *, name: str) -> Tensor:
        target = next(means[name])
        mean, num_images = shifts.get(name, (torch.zeros_like(target), 0))
        num_images += len(output)
        difference = target - output.mean(dim=(0, 2, 3))
        mean = mean + (difference - mean) * (len(output) / num_images)
        shifts[name] = mean, num_images
        return output + mean.view(-1, 1, 1)

    with ExitStack() as hooks:
        for name, layer in layers.items():
            hooks.callback(layer.register_forward_hook(partial(shift, name=name)).remove)
        with _running(quantized):
            for batch in first_images(images):
                run(quantized, batch)
    # Clones, as tensors of inference mode can't be used in training.
    mean_shifts = {name: mean.clone() for name, (mean, _) in shifts.items()}
    for name, mean in mean_shifts.items():
        layers[name].bias = biases[name] + mean
    if modules.mean_kl(logits, judged_logits(quantized, images), quantized) <= before:
        return mean_shifts
    for name, bias in biases.items():
        layers[name].bias = bias
    return {}


def judged_logits(model: nn.Module, images: Images) -> Tensor:
    """Return the logits of the 32 images after the first, or of the last 32 if there are fewer than 64."""
    batches = torch.cat([*first_images(images, 2 * MAX_IMAGES)])
    with _running(model):
        return run(model, batches[-MAX_IMAGES:])


def first_images(batches: Iterable[Tensor], num_images: int = MAX_IMAGES) -> Iterable[Tensor]:
    """Yield the first images, 32 by default, or all if fewer, in their batches."""
    for batch in batches:
        yield batch[:num_images]
        num_images -= len(batch)
        if num_images <= 0:
            return


# Images whose intermediate outputs are stored at once: half a gigabyte for ResNet-101 at 224 x 224.
CHUNK = 8
# Below this KL in nats, a third of what goes with a point of top-1, single layers aren't measured: no layer is worth
# float (docs/decisions/LOG.md, 2026-11-21: models without outliers have 0.0001 to 0.0004 nats in all), and measuring
# costs more than the rest of a conversion.
SMALL_KL = 5e-3
# Minimum number of images for KLs, and the MACs of one pass over them. About one pass per layer is run: for a ViT-B/16
# that is minutes with 8 images, and four times as many with 32.
MIN_JUDGED, JUDGED_MACS = 8, 64e9


def measure_quantization_sensitivity(
    model: nn.Module,
    images: Iterable[Tensor],
    scheme: Literal["dynamic", "static"],
    latency_shares: Mapping[str, float] | None = None,
    *,
    progress: Progress = silent,
) -> tuple[float, tuple[LayerCost, ...], int]:
    """Return the KL of quantizing all layers, in nats, the cost of each if that isn't small, and the number of images.

    `model` is a float model on the CPU and is unchanged; of `images`, batches (b, c, h, w), the first 32 are used. All
    of them set ranges; a large model's KLs are measured on fewer, at least 8. `latency_shares` has the layers' shares
    of the time by name, if known. Raises QuantizationError as `quantize_model` does.
    """
    sample = torch.cat(list(first_images(images)))
    everything = QuantizationRecommendation(layer=EVERYTHING, quantization_type=scheme, dtype="qint8")
    quantized = quantize_model(model, [everything], calibration=sample.split(CHUNK))
    _, channels, height, width = sample.shape
    spec = InputSpec(channels=channels, height=height, width=width, source="calibration images")
    counts = count_complexity(model, spec)
    macs, params = (sum(getattr(row, name) for row in counts.values()) for name in ("macs", "params"))
    judged = sample[: max(MIN_JUDGED, int(JUDGED_MACS / max(macs, 1)))]
    models = (copy.deepcopy(model).eval(), quantized.model)
    with torch.no_grad():
        expected, logits = (torch.cat([run(each, chunk) for chunk in judged.split(CHUNK)]) for each in models)
        kl = modules.mean_kl(expected, logits, model)
    if kl < SMALL_KL:
        return kl, (), len(judged)
    rows = tuple(
        LayerCost(
            layer=name,
            kl=layer_kl,
            macs_share=counts[name].macs / macs if name in counts and macs else 0.0,
            params_share=counts[name].params / params if name in counts and params else 0.0,
            latency_share=(latency_shares or {}).get(name),
        )
        for name, layer_kl in measure_layers(model, quantized, judged, progress=progress).items()
    )
    return kl, mark_float_layers(rows), len(judged)


def measure_layers(
    model: nn.Module, quantized: Quantized, images: Tensor, *, progress: Progress = silent
) -> dict[str, float]:
    """Return the KL to `model`, in nats, with only one of the layers of `quantized` quantized, by that layer's name.

    `quantized` was made from `model` on the CPU; both are unchanged. `images` (b, c, h, w) run through the whole model
    once, and for each layer from there on. Layers are in the model's order; one that isn't called has no KL.
    """
    float_model, layers = copy.deepcopy(model).eval(), quantized_layers.quantized_modules(quantized.model)
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
    return {name: modules.mean_kl(torch.cat(expected), torch.cat(logits[name]), model) for name in layers}


# Another layer stays in float only if the remaining KL is at least this, in nats: it changes about one prediction in a
# thousand.
MIN_REMAINING_KL = 1e-3
# Largest total share of time and params that stays in float, and for each layer the least ratio of its KL's share to
# its own share, and the least share of the whole KL. (By time only, a real MobileNet kept a layer with 22% of its
# params, for 5% of the KL: docs/decisions/LOG.md, 2026-11-24.)
MAX_SHARE, MIN_RATIO, MIN_KL_SHARE = 0.05, 4.0, 0.02


def mark_float_layers(rows: Sequence[LayerCost]) -> tuple[LayerCost, ...]:
    """Return the rows with those marked that stay in float: most KL for least time and fewest bytes.

    The share is that of the time (of the MACs if no time was measured), or that of the params if larger.
    """

    def share(row: LayerCost) -> float:
        return max(row.macs_share if row.latency_share is None else row.latency_share, row.params_share)

    total = remaining_kl = sum(row.kl for row in rows)
    kept_share, kept_layers = 0.0, set[str]()
    # A share of zero still needs an order.
    for row in sorted(rows, key=lambda row: row.kl / max(share(row), 1e-9), reverse=True):
        is_costly = row.kl >= total * max(MIN_RATIO * share(row), MIN_KL_SHARE)
        if is_costly and remaining_kl >= MIN_REMAINING_KL and kept_share + share(row) <= MAX_SHARE:
            kept_layers.add(row.layer)
            remaining_kl, kept_share = remaining_kl - row.kl, kept_share + share(row)
    return tuple(row.model_copy(update={"kept": row.layer in kept_layers}) for row in rows)
