"""Tiny real models, one per family, with every norm, bias and table randomised so that equivalence checks bite."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
    ViTImageProcessorPil,
)

from profiling_agent.lib.costs import count_complexity
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.schemas import Cut, InputSpec, Unit, UnitKind

SPEC = InputSpec(channels=3, height=32, width=32, source="zoo")
LABELS = {index: f"class {index}" for index in range(5)}


def inside(model: nn.Module) -> Any:
    """Return the model to be reached into: to torch's types, each of its attributes is a tensor or a module."""
    return model


def randomised(model: nn.Module, seed: int = 0) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor.add_(torch.rand(tensor.shape, generator=generator) * 0.3)
            else:
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * 0.08)
        for name, buffer in model.named_buffers():
            if name.endswith(("running_mean", "running_var")):
                buffer.add_(torch.rand(buffer.shape, generator=generator))
    return model.eval()


PLAIN: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 256,
    "image_size": 32,
    "patch_size": 8,
    "id2label": LABELS,
}


def vit(**changes) -> Any:
    return randomised(ViTForImageClassification(ViTConfig(**(PLAIN | changes))))


def deit() -> Any:
    return randomised(DeiTForImageClassification(DeiTConfig(**PLAIN)))


def swin() -> Any:
    config = SwinConfig(
        image_size=32, patch_size=2, embed_dim=32, depths=[2, 2], num_heads=[2, 4], window_size=4, id2label=LABELS
    )
    return randomised(SwinForImageClassification(config))


def resnet(layer_type: str = "bottleneck", **changes) -> Any:
    plain: dict[str, Any] = {"embedding_size": 32, "hidden_sizes": [128, 256], "depths": [2, 2], "id2label": LABELS}
    return randomised(ResNetForImageClassification(ResNetConfig(layer_type=layer_type, **(plain | changes))))


FAMILIES = {"vit": vit, "deit": deit, "swin": swin, "resnet": resnet}
EVERY = {**FAMILIES, "resnet_basic": lambda: resnet("basic")}


def processor() -> ViTImageProcessorPil:
    return ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def save(model: Any, folder: Path) -> Path:
    """Write an ordinary local Hugging Face folder."""
    model.save_pretrained(folder)
    processor().save_pretrained(folder)
    return folder


def units_of(model: nn.Module) -> tuple[Unit, ...]:
    return find_units(model, SPEC, {}).units


def cuts_of(model: nn.Module, ratio: float = 0.4, kinds=tuple(UnitKind)) -> list[Cut]:
    """Return a cut of every unit of these kinds by this share of its width."""
    units = [unit for unit in units_of(model) if unit.kind in kinds]
    return [Cut(unit=unit, keep=snap(unit, ratio), requested_ratio=ratio) for unit in units]


def logits(model: nn.Module, images: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(pixel_values=images).logits


def halved(units) -> tuple[Cut, ...]:
    """Return cuts that leave half of each width, all heads."""
    widths: list[Unit] = [unit for unit in units if unit.kind is not UnitKind.HEADS]
    return tuple(Cut(unit=unit, keep=unit.width // 2, requested_ratio=0.5) for unit in widths)


@contextmanager
def left_alone(*models: nn.Module) -> Iterator[None]:
    """Assert that a block changes no weight, statistic, mode, flag, gradient, attribute or hook of these models."""
    tensors = [{name: tensor.clone() for name, tensor in model.state_dict().items()} for model in models]
    parts, computes_gradients = [_parts(model) for model in models], torch.is_grad_enabled()
    yield
    for model, held, before in zip(models, tensors, parts, strict=True):
        after = model.state_dict()
        assert after.keys() == held.keys()
        assert all(torch.equal(after[name], tensor) for name, tensor in held.items())
        assert _parts(model) == before
    assert torch.is_grad_enabled() == computes_gradients


def _parts(model: nn.Module) -> list[Any]:
    plain = (bool, int, float, tuple, str)
    modules = [
        (
            {name: value if isinstance(value, plain) else None for name, value in vars(module).items()},
            (len(module._forward_hooks), len(module._forward_pre_hooks)),
        )
        for module in model.modules()
    ]
    return [modules, [(parameter.requires_grad, parameter.grad is None) for parameter in model.parameters()]]


def counted(model: nn.Module, spec: InputSpec = SPEC) -> tuple[int, dict[str, int]]:
    """Return the params of a model, and the MACs of each of its layers."""
    rows = count_complexity(model, spec)
    return sum(row.params for row in rows.values()), {name: row.macs for name, row in rows.items()}
