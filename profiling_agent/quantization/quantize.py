"""Quantization of a model: a copy with the recommended layers quantized."""

import copy
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.errors import PlanError, QuantizationError
from profiling_agent.lib.layer_names import matching_names, near_names
from profiling_agent.lib.modules import module_counts, preserving_state
from profiling_agent.quantization.calibrate import (
    MIN_IMAGES,
    Images,
    Sampler,
    correct_biases_if_nearer_,
    fold_norms_,
    judged_logits,
    observe,
    output_means,
)
from profiling_agent.quantization.kinds import MULTIPLE, RowwiseLinear, has_float8, supports
from profiling_agent.quantization.layers import CastLayer, DynamicLinear, QuantizedModule, StaticLayer, num_levels
from profiling_agent.schemas import EVERYTHING, QuantizationRecommendation

# Images on which folding must not change the logits.
NUM_CHECKED = 4


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized copy of a model, and the names of its quantized layers, in the model's order.

    `folded` names the batch norms folded into the convolutions before them, which have no effect now; `shifts` has the bias corrections by layer.
    """

    model: nn.Module
    layers: tuple[str, ...]
    folded: tuple[str, ...] = ()
    shifts: Mapping[str, Tensor] = field(default_factory=dict[str, Tensor])


def quantize_model(
    model: nn.Module,
    recommendations: Sequence[QuantizationRecommendation],
    *,
    calibration: Images | None = None,
    reduce_range: bool | None = None,
) -> Quantized:
    """Return a copy of `model` on the CPU with the recommended layers quantized; `model` is unchanged.

    `layer` is `all` or an RE2 pattern searched for in live module names; the last recommendation that matches a layer wins, and `cast float32`
    leaves it in float. Dynamic quantization supports `nn.Linear`, static and bfloat16 `nn.Conv2d` as well; subclasses are never quantized, because
    third-party code may read their weights. `calibration` begins a pass over images (b, c, h, w): static quantization needs at least 8. It first
    folds batch norms into the convolutions that it quantizes, corrects the biases of these, and skips layers that no image reaches. `reduce_range`
    gives the inputs of int8 layers 7 bits; by default, and always for dynamic layers, it is what torch needs on this CPU. Callers that execute
    static layers in another runtime pass what that needs.

    Raises:
        PlanError: a pattern is invalid or matches no layer.
        QuantizationError: the matched layers don't support the kind; a layer's weights or inputs aren't finite; the images are missing, too few, or
            don't fit.
    """
    choices = chosen_layers(model, recommendations)
    quantized = copy.deepcopy(model).cpu()
    static = [name for name, choice in choices.items() if choice.quantization_type == "static"]
    folded, observed = _fold_and_observe_(quantized, static, calibration) if static else ((), {})
    layers: dict[str, QuantizedModule] = {}
    for name, choice in choices.items():
        layer: Any = quantized.get_submodule(name)
        with _naming(name):
            if choice.quantization_type == "cast":
                layers[name] = CastLayer.from_float(layer)
            elif choice.quantization_type == "dynamic":
                dtype = "float16" if choice.dtype == "float16" else "qint8"
                layers[name] = DynamicLinear.from_linear(layer, dtype, reduce_range=reduce_range)
            elif name in observed:
                low, high = observed[name].range(num_levels(reduce_range=reduce_range))
                layers[name] = StaticLayer.from_float(layer, low, high, reduce_range=reduce_range)
    expected: Mapping[str, Sequence[Tensor]] = {}
    logits, shifts = torch.empty(0), dict[str, Tensor]()
    if calibration:
        # A layer used in two places becomes two layers, while its means cover both.
        num_places = module_counts(quantized)
        is_static = {
            name: isinstance(layer, StaticLayer) and layer.border is not None for name, layer in layers.items()
        }
        corrected = [name for name in layers if is_static[name] and num_places[name] == 1]
        expected = output_means(quantized, corrected, calibration)
        logits = judged_logits(quantized, calibration) if expected else logits
    _replace_(quantized, layers, model)
    if calibration and expected:
        shifts = correct_biases_if_nearer_(quantized, logits, expected, calibration)
    return Quantized(model=quantized, layers=tuple(layers), folded=folded, shifts=shifts)


def quantize_rowwise(model: nn.Module, recommendations: Sequence[QuantizationRecommendation]) -> nn.Module:
    """Return a copy of `model` on the CPU with the recommended linear layers in int8 or float8.

    The classifier, whose rows are images, and layers whose widths aren't multiples of 16 stay in float.

    Raises:
        PlanError: a pattern is invalid or matches no layer.
        QuantizationError: no layer is left to quantize, a weight isn't finite, or the device can't multiply float8.
    """
    choices = chosen_layers(model, recommendations)
    if any(choice.dtype == "float8" for choice in choices.values()) and torch.cuda.is_available() and not has_float8():
        raise QuantizationError("float8 needs a GPU of compute capability 8.9 or higher (H100, L40S, RTX 4090)")
    quantized = copy.deepcopy(model).cpu()
    last = [name for name, layer in quantized.named_modules() if isinstance(layer, nn.Linear)][-1:]
    num_classes = getattr(getattr(model, "config", None), "num_labels", None)
    layers: dict[str, QuantizedModule] = {}
    for name, choice in choices.items():
        layer: Any = quantized.get_submodule(name)
        is_inner = type(layer) is nn.Linear and name not in last and layer.out_features != num_classes
        if choice.dtype in ("qint8", "float8") and is_inner and not any(n % MULTIPLE for n in layer.weight.shape):
            with _naming(name):
                layers[name] = RowwiseLinear.from_linear(layer, choice.dtype)
    if not layers:
        raise QuantizationError(
            f"no nn.Linear that is chosen, besides the classifier, has widths that are multiples of {MULTIPLE}, which alone int8 and float8 take on CUDA"
        )
    _replace_(quantized, layers, model)
    return quantized


def _replace_(quantized: nn.Module, layers: Mapping[str, QuantizedModule], original: nn.Module) -> None:
    for name, layer in layers.items():
        quantized.set_submodule(name, layer.train(original.get_submodule(name).training))


@contextmanager
def _naming(name: str) -> Generator[None]:
    """Name the layer in what a block refuses."""
    try:
        yield
    except QuantizationError as error:
        raise QuantizationError(f"layer {name!r} can't be quantized: {error}") from error


def chosen_layers(
    model: nn.Module, recommendations: Sequence[QuantizationRecommendation]
) -> dict[str, QuantizationRecommendation]:
    """Return the recommendation for each layer to quantize, in the model's order.

    Raises:
        PlanError: a pattern is invalid or matches no layer.
        QuantizationError: the matched layers don't support the kind.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    choices: dict[str, QuantizationRecommendation] = {}
    for recommendation in recommendations:
        kind, pattern = recommendation.quantization_type, recommendation.layer
        names = [name for name, module in modules.items() if supports(kind, module)]
        matches = names if pattern == EVERYTHING else matching_names(pattern, names)
        if not matches:
            raise _no_match_error(recommendation, modules)
        choices |= dict.fromkeys(matches, recommendation)
    return {name: choices[name] for name in modules if name in choices and choices[name].dtype != "float32"}


def _no_match_error(
    recommendation: QuantizationRecommendation, modules: Mapping[str, nn.Module]
) -> PlanError | QuantizationError:
    """Return the error of a recommendation that matches no layer of its kind.

    If the pattern matches layers of other kinds, it is a QuantizationError, which rules out the scheme; otherwise a PlanError.
    """
    pattern, kind = recommendation.layer, recommendation.quantization_type
    layer_types = "nn.Linear" if kind == "dynamic" else "nn.Linear or nn.Conv2d"
    quantizable = [name for name, module in modules.items() if supports("static", module)]
    if pattern == EVERYTHING or matching_names(pattern, quantizable):
        subject = "the model has" if pattern == EVERYTHING else f"the layer pattern {pattern!r} hits"
        addition = "; static int8 and bfloat16 take nn.Conv2d as well" if kind == "dynamic" else ""
        return QuantizationError(f"{subject} no {layer_types}, which alone this quantizes{addition}")
    near = near_names(pattern, [name for name in quantizable if supports(kind, modules[name])] or quantizable)
    advice = f"near names: {', '.join(map(repr, near))}" if near else f"use {EVERYTHING!r} for every layer"
    return PlanError(f"the layer pattern {pattern!r} hits no {layer_types} to quantize; {advice}")


def _fold_and_observe_(
    model: nn.Module, names: Sequence[str], calibration: Images | None
) -> tuple[tuple[str, ...], dict[str, Sampler]]:
    """Fold the batch norms that follow the convolutions in `names`; return their names, and the observed inputs."""
    first_batch = next(iter(calibration()), None) if calibration else None
    if calibration is None or first_batch is None:
        raise QuantizationError(
            f"static quantization needs at least {MIN_IMAGES} calibration images, none were given: "
            "give some, or quantize dynamically"
        )
    convolutions = [name for name in names if isinstance(model.get_submodule(name), nn.Conv2d)]
    # No inference mode: its tensors could not be used in later training or exports.
    with preserving_state(model), torch.no_grad():
        folded = fold_norms_(model.eval(), convolutions, first_batch[:NUM_CHECKED]) if convolutions else ()
    return folded, observe(model, names, calibration)
