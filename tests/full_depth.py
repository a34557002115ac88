"""The paper's models in all their depth and none of their width, so that their names and groups are the real ones."""

from collections.abc import Callable
from typing import Any

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
from profiling_agent.records import InputSpec, LayerProfile, ModelProfile

SPEC = InputSpec(channels=3, height=32, width=32, source="made")


def _vit() -> Any:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=48,
            intermediate_size=192,
            num_attention_heads=12,
            num_hidden_layers=12,
            image_size=32,
            patch_size=8,
        )
    )


def _swin() -> Any:
    return SwinForImageClassification(
        SwinConfig(
            image_size=32,
            patch_size=1,
            embed_dim=16,
            depths=[2, 2, 18, 2],
            num_heads=[4, 8, 16, 32],
            window_size=4,
        )
    )


def _resnet() -> Any:
    return ResNetForImageClassification(
        ResNetConfig(embedding_size=16, hidden_sizes=[64, 128, 256, 512], depths=[3, 4, 23, 3])
    )


DEEP: dict[str, Callable[[], Any]] = {"ViT-B": _vit, "Swin-B": _swin, "ResNet-101": _resnet}


def judged_deep(name: str) -> ModelProfile:
    """Return a profile whose evidence is unlike for every unit: the longest that a prompt can get."""
    model = DEEP[name]().eval()
    rows = count_complexity(model, SPEC)
    layers = tuple(
        LayerProfile(name=n, kind=r.kind, params=r.params, macs=r.macs, latency_ms=0.1, activation_bytes=8)
        for n, r in rows.items()
    )
    units = find_units(model, SPEC, {row.name: row.macs for row in layers}).units
    kls = {
        unit.name: tuple(1.23e-5 * 3 ** (index % 9) * 2**step for step in range(4)) for index, unit in enumerate(units)
    }
    found = evidence(units, kls, latency=lambda keep: 9.87 / (1 + keep))
    return profile().model_copy(
        update={
            "architecture": type(model).__name__,
            "layers": layers,
            "params": sum(row.params for row in layers),
            "macs": sum(row.macs for row in layers),
            "units": units,
            "evidence": found,
        }
    )
