"""Attention as exporters like it: two products and a softmax, and no mask where nothing is masked.

Under tracing transformers builds a mask of ones for every encoder, since it can't look whether anything is padded. In the
exported graph each layer then fills, adds and checks for rows without a number, which costs ONNX Runtime 12% on ViT-B.
Images have no padding.
"""

from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import bidirectional_mask_function, sdpa_mask

NAME = "profiling_agent_plain"


def _attend(
    module: nn.Module,  # noqa: ARG001
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """Return softmax(QK'·scaling + mask)V, (batch, tokens, heads, width), of inputs (batch, heads, tokens, width)."""
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if attention_mask is not None and attention_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attention_mask, torch.finfo(scores.dtype).min)
    elif attention_mask is not None:
        scores = scores + attention_mask
    return (scores.softmax(dim=-1) @ value).transpose(1, 2).contiguous(), None


def _mask(
    *,
    mask_function: Any,
    attention_mask: Tensor | None = None,
    allow_is_bidirectional_skip: bool = False,
    **rest: Any,
) -> Tensor | None:
    # Not allowed where a model puts another mask beside this one.
    if allow_is_bidirectional_skip and mask_function is bidirectional_mask_function and attention_mask is None:
        return None
    return sdpa_mask(mask_function=mask_function, attention_mask=attention_mask, **rest)


AttentionInterface.register(NAME, _attend)
AttentionMaskInterface.register(NAME, _mask)


def attend_plainly(model: nn.Module) -> None:
    """Have a transformers model compute attention so; one that has no choice of attention stays as it is."""
    if callable(choose := getattr(model, "set_attn_implementation", None)):
        choose(NAME)
