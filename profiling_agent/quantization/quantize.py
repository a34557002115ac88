"""Quantization of a model: recommendations to a copy with the layers quantized that they name."""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.errors import PlanError, QuantizationError
from profiling_agent.modules.inference import left_as_found, places
from profiling_agent.modules.layer_names import matching_names, near_names
from profiling_agent.quantization.calibrate import (
    MIN_IMAGES,
    Images,
    Observed,
    correct_biases_,
    fold_norms_,
    observe,
    output_means,
)
from profiling_agent.quantization.cuda_linear import MULTIPLE, Float8Linear, Int8Linear, has_float8
from profiling_agent.quantization.kinds import can_be
from profiling_agent.quantization.layers import (
    CastLayer,
    DynamicLinear,
    Kind,
    Layer,
    QuantizedModule,
    StaticLayer,
    num_levels,
)
from profiling_agent.schemas import EVERYTHING, QuantizationRecommendation

# Images on which folding has to leave the logits as they are.
NUM_CHECKED = 4


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized copy of a model, and the names of the layers that were quantized, in the model's order.

    `folded` names the batch norms that went into the convolutions before them, and change nothing now; `shifts` is what was added to the biases of
    layers for what rounding does there and in the layers before.
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
    """Return a copy of `model` on the CPU with the recommended layers quantized; the given model isn't touched.

    `layer` is `all` or an RE2 pattern searched for in live module names; of several recommendations that hit a layer
    the last one counts, and `cast float32` leaves it alone. Dynamic quantization takes `nn.Linear`, static and bfloat16
    `nn.Conv2d` as well; never their subclasses, because whoever made those may read their weights. `calibration` begins
    a pass over images (b, c, h, w): static quantization needs at least 8. It first folds batch norms into the
    convolutions that it quantizes, shifts the biases of these by what rounding does to their outputs on average, and leaves a layer alone that no
    image reaches. `reduce_range` gives the inputs of int8 layers 7 bits; by default, and dynamic ones always, they have them where torch needs it on
    this CPU. Whoever has another runtime execute what is static says what that needs.

    Raises:
        PlanError: a pattern is invalid or hits no layer.
        QuantizationError: what it hits is of kinds that aren't quantized so; a layer's weights or inputs aren't finite; the images are missing, too
            few, or don't fit.
    """
    chosen = chosen_layers(model, recommendations)
    quantized = copy.deepcopy(model).cpu()
    static = [name for name, choice in chosen.items() if choice.quantization_type == "static"]
    folded, observed = _prepare_(quantized, static, calibration) if static else ((), {})
    made: dict[str, QuantizedModule] = {}
    for name, choice in chosen.items():
        if choice.quantization_type == "static" and name not in observed:
            continue
        layer = quantized.get_submodule(name)
        assert isinstance(layer, nn.Linear | nn.Conv2d), "names were taken from the same model"
        try:
            made[name] = quantized_layer(
                layer, choice.quantization_type, choice.dtype, observed.get(name), reduce_range=reduce_range
            )
        except QuantizationError as error:
            raise QuantizationError(f"layer {name!r} can't be quantized: {error}") from error
    # One that stands in two places becomes two layers, and its means are of both.
    count = places(quantized)
    convolutions = [
        name
        for name, layer in made.items()
        if isinstance(layer, StaticLayer) and layer.geometry is not None and count[name] == 1
    ]
    expected = output_means(quantized, convolutions, calibration) if calibration else {}
    for name, layer in made.items():
        quantized.set_submodule(name, layer.train(model.get_submodule(name).training))
    shifts = correct_biases_(quantized, expected, calibration) if calibration else {}
    return Quantized(model=quantized, layers=tuple(made), folded=folded, shifts=shifts)


def quantize_rowwise(model: nn.Module, recommendations: Sequence[QuantizationRecommendation]) -> nn.Module:
    """Return a copy of `model` on the CPU with the recommended linear layers in int8 or float8.

    The classifier, whose rows are images, and layers whose widths aren't multiples of 16 are left as they are.

    Raises:
        PlanError: a pattern is invalid or hits no layer.
        QuantizationError: no layer is left to quantize, a weight isn't finite, or the device multiplies no float8.
    """
    chosen = chosen_layers(model, recommendations)
    dtypes = {choice.dtype for choice in chosen.values()}
    if "float8" in dtypes and torch.cuda.is_available() and not has_float8():
        raise QuantizationError("float8 needs a GPU of compute capability 8.9 or higher (H100, L40S, RTX 4090)")
    quantized = copy.deepcopy(model).cpu()
    heads = _classifiers(quantized)
    made: dict[str, QuantizedModule] = {}
    for name, choice in chosen.items():
        layer: Any = quantized.get_submodule(name)
        is_linear = type(layer) is nn.Linear and name not in heads
        if choice.dtype in ("qint8", "float8") and is_linear and not any(n % MULTIPLE for n in layer.weight.shape):
            try:
                made[name] = (Int8Linear if choice.dtype == "qint8" else Float8Linear).from_float(layer)
            except QuantizationError as error:
                raise QuantizationError(f"layer {name!r} can't be quantized: {error}") from error
    if not made:
        raise QuantizationError(
            f"no nn.Linear that is chosen, besides the classifier, has widths that are multiples of {MULTIPLE}, which alone int8 and float8 take on CUDA"
        )
    for name, layer in made.items():
        quantized.set_submodule(name, layer.train(model.get_submodule(name).training))
    return quantized


def _classifiers(model: nn.Module) -> set[str]:
    """Return the last linear layer, and all that have as many outputs as there are classes."""
    linear = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    num_classes = getattr(getattr(model, "config", None), "num_labels", None)
    return {*[*linear][-1:], *(name for name, layer in linear.items() if layer.out_features == num_classes)}


def chosen_layers(
    model: nn.Module, recommendations: Sequence[QuantizationRecommendation]
) -> dict[str, QuantizationRecommendation]:
    """Return what is to become of each layer that isn't left alone, in the model's order.

    Raises:
        PlanError: a pattern is invalid or hits no layer.
        QuantizationError: there are layers, and none is of a kind that is quantized so.
    """
    modules = dict(model.named_modules(remove_duplicate=False))
    chosen: dict[str, QuantizationRecommendation] = {}
    for recommendation in recommendations:
        kind, pattern = recommendation.quantization_type, recommendation.layer
        names = [name for name, module in modules.items() if can_be(kind, module)]
        hits = names if pattern == EVERYTHING else matching_names(pattern, names)
        if not hits:
            raise _missed(recommendation, modules)
        chosen |= dict.fromkeys(hits, recommendation)
    return {name: chosen[name] for name in modules if name in chosen and chosen[name].dtype != "float32"}


def _missed(
    recommendation: QuantizationRecommendation, modules: Mapping[str, nn.Module]
) -> PlanError | QuantizationError:
    """Return what is wrong with a recommendation that hits no layer of its kind.

    A scheme that has nothing to do in a model, or in the layers that were asked for, costs that scheme its place; a pattern that no layer of any kind
    is meant by is a mistake of whoever wrote it.
    """
    pattern, kind = recommendation.layer, recommendation.quantization_type
    takes = "nn.Linear" if kind == "dynamic" else "nn.Linear or nn.Conv2d"
    every = [name for name, module in modules.items() if can_be("static", module)]
    if pattern == EVERYTHING or matching_names(pattern, every):
        whose = "the model has" if pattern == EVERYTHING else f"the layer pattern {pattern!r} hits"
        more = "; static int8 and bfloat16 take nn.Conv2d as well" if kind == "dynamic" else ""
        return QuantizationError(f"{whose} no {takes}, which alone this quantizes{more}")
    near = near_names(pattern, [name for name in every if can_be(kind, modules[name])] or every)
    advice = f"near names: {', '.join(map(repr, near))}" if near else f"use {EVERYTHING!r} for every layer"
    return PlanError(f"the layer pattern {pattern!r} hits no {takes} to quantize; {advice}")


def _prepare_(
    model: nn.Module, names: Sequence[str], calibration: Images | None
) -> tuple[tuple[str, ...], dict[str, Observed]]:
    """Fold the batch norms that follow the convolutions in `names`; return theirs, and what each layer is given."""
    first = next(iter(calibration()), None) if calibration else None
    if calibration is None or first is None:
        raise QuantizationError(
            f"static quantization needs at least {MIN_IMAGES} calibration images, none were given: "
            "give some, or quantize dynamically"
        )
    convolutions = [name for name in names if isinstance(model.get_submodule(name), nn.Conv2d)]
    # No inference mode: its tensors could be used neither in training nor in an export later.
    with left_as_found(model), torch.no_grad():
        folded = fold_norms_(model.eval(), convolutions, first[:NUM_CHECKED]) if convolutions else ()
    return folded, observe(model, names, calibration)


def quantized_layer(
    layer: Layer, kind: Kind, dtype: str, observed: Observed | None = None, *, reduce_range: bool | None = None
) -> QuantizedModule:
    """Return `layer` quantized, `reduce_range` as for `quantize_model`; a static one has to have been observed.

    Raises:
        QuantizationError: its weights or inputs aren't finite.
    """
    if kind == "cast":
        return CastLayer.from_float(layer)
    if kind == "static":
        assert observed is not None, "static layers are observed first"
        low, high = observed.range(num_levels(reduce_range=reduce_range))
        return StaticLayer.from_float(layer, low, high, reduce_range=reduce_range)
    assert isinstance(layer, nn.Linear), "dynamic quantization takes linear layers"
    return DynamicLinear.from_linear(layer, "float16" if dtype == "float16" else "qint8", reduce_range=reduce_range)
