"""KL divergence between what two models say of the same images: the one measure of what a change costs."""

import torch
from torch import Tensor


def divergences(expected: Tensor, logits: Tensor) -> Tensor:
    """Return KL(softmax(expected) || softmax(logits)) of each image in nats; both are (images, classes)."""
    target, found = (torch.log_softmax(each, dim=1) for each in (expected, logits))
    return (target.exp() * (target - found)).sum(1)


def mean_kl(expected: Tensor, logits: Tensor) -> float:
    """Return the mean KL(softmax(expected) || softmax(logits)) over images in nats; both are (images, classes)."""
    return float(divergences(expected.double(), logits.double()).mean())
