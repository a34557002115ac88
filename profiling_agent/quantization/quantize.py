"""A model and recommendations to a quantized copy; and torch's own dynamic quantization, behind one function."""

import copy
import warnings
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.ao.quantization import quantize_dynamic  # pyright: ignore[reportDeprecated]
from torch.ao.quantization.qconfig import (
    QConfig,
    default_dynamic_qconfig,
    float16_dynamic_qconfig,
    per_channel_dynamic_qconfig,
)

from profiling_agent.errors import PlanError, QuantizationError
from profiling_agent.pruning.names import matching_names, near_names
from profiling_agent.quantization.linear import Dtype, DynamicLinear
from profiling_agent.records import QuantizationRecommendation

EVERYTHING = "all"


@dataclass(frozen=True, slots=True)
class Quantized:
    """A quantized copy of a model, and the names of the layers that were quantized, in the model's order."""

    model: nn.Module
    layers: tuple[str, ...]


def _choose(names: Sequence[str], recommendations: Sequence[QuantizationRecommendation]) -> dict[str, Dtype]:
    """Return the dtype of each layer that is to be quantized; the last recommendation that hits a layer wins."""
    chosen: dict[str, Dtype] = {}
    for recommendation in recommendations:
        pattern = recommendation.layer
        hits = names if pattern == EVERYTHING else matching_names(pattern, names)
        if not hits:
            near = near_names(pattern, names)
            advice = f"near names: {', '.join(map(repr, near))}" if near else f"use {EVERYTHING!r} for every layer"
            raise PlanError(f"the layer pattern {pattern!r} hits no nn.Linear to quantize; {advice}")
        chosen |= dict.fromkeys(hits, recommendation.dtype)
    return {name: chosen[name] for name in names if name in chosen}


def quantize_model(model: nn.Module, recommendations: Sequence[QuantizationRecommendation]) -> Quantized:
    """Return a copy of `model` with the recommended `nn.Linear` layers quantized dynamically, int8 per output channel.

    `layer` is `all` or an RE2 pattern searched for in live module names; subclasses of `nn.Linear` are left alone,
    because whoever made them may read their weights. The given model isn't touched.

    Raises:
        PlanError: a pattern is invalid or hits no layer.
        QuantizationError: a layer's weights aren't finite.
    """
    names = [name for name, module in model.named_modules(remove_duplicate=False) if type(module) is nn.Linear]
    chosen = _choose(names, recommendations)
    quantized = copy.deepcopy(model)
    for name, dtype in chosen.items():
        linear = quantized.get_submodule(name)
        assert isinstance(linear, nn.Linear), "names were taken from the same model"
        try:
            layer = DynamicLinear.from_linear(linear, dtype)
        except QuantizationError as error:
            raise QuantizationError(f"layer {name!r} can't be quantized: {error}") from error
        quantized.set_submodule(name, layer.train(linear.training))
    return Quantized(model=quantized, layers=tuple(chosen))


def torch_quantize_dynamic(
    model: nn.Module, names: Collection[str], dtype: Dtype, *, per_channel: bool = True
) -> nn.Module:
    """Return a copy of `model` with the named layers quantized by torch.ao, which always takes 7-bit activations.

    `per_channel=False` with every `nn.Linear` named is the paper's recipe: torch's default, one scale per tensor.
    """
    qint8 = per_channel_dynamic_qconfig if per_channel else default_dynamic_qconfig
    qconfig: QConfig = float16_dynamic_qconfig if dtype == "float16" else qint8
    torch_dtype = torch.float16 if dtype == "float16" else torch.qint8
    with warnings.catch_warnings():
        # torch.ao announces its own removal on every call, and that of the tensors that it is made of.
        warnings.filterwarnings("ignore", message="torch.ao.quantization is deprecated", category=DeprecationWarning)
        warnings.filterwarnings("ignore", message=".*quantized tensor creation functions", category=UserWarning)
        return quantize_dynamic(model, dict.fromkeys(names, qconfig), dtype=torch_dtype)  # pyright: ignore[reportDeprecated]
