"""Mean KL divergence between what two models say of the same images."""

import torch
from torch import Tensor


def mean_kl(expected: Tensor, logits: Tensor) -> float:
    """Return the mean KL(softmax(expected) || softmax(logits)) over images in nats; both are (images, classes)."""
    target, found = (torch.log_softmax(each.double(), dim=1) for each in (expected, logits))
    return float((target.exp() * (target - found)).sum(1).mean())
