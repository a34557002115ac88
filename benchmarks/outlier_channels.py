"""Activations that stick out, made on purpose: the same function in float32, and a hard one in int8."""

from typing import Any

import torch
from torch import nn

# Every eighth channel of a LayerNorm is scaled, by 30 to 100.
OUTLIERS, EVERY = (30.0, 100.0), 8


def stick_out(model: nn.Module) -> int:
    """Scale channels of each LayerNorm up and the columns of what reads it down, in place; return how many norms."""
    generator, num_norms = torch.Generator().manual_seed(0), 0
    for name, norm in model.named_modules():
        readers = _readers(model, name)
        if not isinstance(norm, nn.LayerNorm) or not readers:
            continue
        width = norm.weight.numel()
        scales = torch.ones(width)
        picked = torch.arange(0, width, EVERY)
        low, high = OUTLIERS
        scales[picked] = low + (high - low) * torch.rand(len(picked), generator=generator)
        with torch.no_grad():
            norm.weight.mul_(scales)
            norm.bias.mul_(scales)
            for reader in readers:
                reader.weight /= scales
        num_norms += 1
    return num_norms


def _readers(model: nn.Module, name: str) -> list[Any]:
    """Return the linear layers that read a LayerNorm of a ViT, by transformers' names."""
    layer, _, norm = name.rpartition(".")
    inside = {
        "layernorm_before": [f"attention.{which}_proj" for which in "qkv"],
        "layernorm_after": ["mlp.fc1"],
    }.get(norm, [])
    return [model.get_submodule(f"{layer}.{reader}") for reader in inside]
