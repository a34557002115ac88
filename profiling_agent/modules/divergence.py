"""Differences between what two models say of the same images: KL is what a change costs, distance whether it is a change."""

import torch
from torch import Tensor


def divergences(expected: Tensor, logits: Tensor) -> Tensor:
    """Return KL(softmax(expected) || softmax(logits)) of each image in nats; both are (images, classes)."""
    target, found = (torch.log_softmax(each, dim=1) for each in (expected, logits))
    return (target.exp() * (target - found)).sum(1)


def mean_kl(expected: Tensor, logits: Tensor) -> float:
    """Return the mean KL(softmax(expected) || softmax(logits)) over images in nats; both are (images, classes)."""
    return float(divergences(expected.double(), logits.double()).mean())


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| / ||expected|| of logits."""
    return float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny))
