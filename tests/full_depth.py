"""The paper's models as large as they are, on torch's meta device: real names, units and groups, and made-up measurements of them."""

from collections.abc import Callable
from typing import Any

import torch
from made import evidence, profile
from transformers import (
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from profiling_agent.modules.complexity import count_complexity
from profiling_agent.pruning.units import find_units
from profiling_agent.records import InputSpec, LayerProfile, ModelProfile, OperatorProfile

SPEC = InputSpec(channels=3, height=224, width=224, source="made")
# So many layers of a model take so long each, and operators are as torch names them.
LAYER_MS, PASS_MS = 0.123, 456.7
OPERATORS = ("aten::addmm", "aten::mkldnn_convolution", "aten::_scaled_dot_product_flash_attention_for_cpu")


# transformers' stubs don't name it.
LABELS: dict[str, Any] = {"num_labels": 1000}


def _vit() -> Any:
    return ViTForImageClassification(ViTConfig(**LABELS))


def _swin() -> Any:
    return SwinForImageClassification(
        SwinConfig(embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32], **LABELS)
    )


def _resnet() -> Any:
    return ResNetForImageClassification(ResNetConfig(depths=[3, 4, 23, 3], **LABELS))


DEEP: dict[str, Callable[[], Any]] = {"ViT-B": _vit, "Swin-B": _swin, "ResNet-101": _resnet}


def judged_deep(name: str) -> ModelProfile:
    """Return a profile whose evidence is unlike for every unit: the longest that a prompt can get."""
    with torch.device("meta"):
        model = DEEP[name]().eval()
    rows = count_complexity(model, SPEC)
    layers = tuple(
        LayerProfile(
            name=n, kind=r.kind, params=r.params, macs=r.macs, latency_ms=LAYER_MS, activation_bytes=4 * 196 * 768
        )
        for n, r in rows.items()
    )
    operators = tuple(
        OperatorProfile(
            name=OPERATORS[index % 3],
            calls=12,
            cpu_time_ms=LAYER_MS * (20 - index),
            memory_bytes=123_456_789,
            input_shapes="[[768], [6304, 3072], [3072, 768], [], []]",
        )
        for index in range(20)
    )
    units = find_units(model, SPEC, {row.name: row.macs for row in layers}).units
    kls = {
        unit.name: tuple(1.23e-5 * 3 ** (index % 9) * 2**step for step in range(6)) for index, unit in enumerate(units)
    }
    made = profile()
    params = sum(row.params for row in layers)
    # Of a unit's ten milliseconds more go the more is cut, but for the widest of each, which brings nothing.
    widest = {unit.width: max(keep for keep in range(unit.step, unit.width, unit.step)) for unit in units}
    found = evidence(units, kls, latency=lambda keep: 0.0 if keep in widest.values() else 9.87 / (1 + keep))
    return made.model_copy(
        update={
            "architecture": type(model).__name__,
            "input": SPEC,
            "layers": layers,
            "operators": operators,
            "params": params,
            "macs": sum(row.macs for row in layers),
            "parameter_bytes": 4 * params,
            "size_bytes": 4 * params + 10_000,
            "headline": made.headline.model_copy(
                update={"latency": made.headline.latency.model_copy(update={"median_ms": PASS_MS})}
            ),
            "units": units,
            "evidence": found,
        }
    )
