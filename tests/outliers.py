"""A ViT whose activations have outliers, and which says what it said without them."""

from typing import Any

import torch
from torch import nn


def with_outliers(model: Any, factor: float = 30.0) -> nn.Module:
    """Scale two channels of every block's LayerNorms up, and the columns that read them down, by hand."""
    with torch.no_grad():
        for layer in model.vit.layers:
            attention = layer.attention
            for norm, readers in (
                (layer.layernorm_before, (attention.q_proj, attention.k_proj, attention.v_proj)),
                (layer.layernorm_after, (layer.mlp.fc1,)),
            ):
                norm.weight[:2] *= factor
                norm.bias[:2] *= factor
                for reader in readers:
                    reader.weight[:, :2] /= factor
    return model
