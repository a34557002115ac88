"""A convolution, a batch norm with its activation in it, as timm has them, and a classifier that reads its images' type off itself."""

from types import SimpleNamespace

import torch
from torch import nn


class ActivatedNorm(nn.BatchNorm2d):
    def __init__(self, channels: int):
        super().__init__(channels)
        self.drop, self.act = nn.Identity(), nn.ReLU(inplace=True)

    def forward(self, input):
        return self.act(self.drop(super().forward(input)))


class Activated(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv, self.norm, self.head = nn.Conv2d(3, 16, 3, bias=False), ActivatedNorm(16), nn.Linear(16, 5)

    def forward(self, pixel_values):
        dtype = next(parameter.dtype for parameter in self.parameters() if parameter.is_floating_point())
        return SimpleNamespace(logits=self.head(self.norm(self.conv(pixel_values.to(dtype))).mean((2, 3))))


def activated() -> nn.Module:
    """Return the model with a norm that moves half of what it reads below zero."""
    torch.manual_seed(0)
    model = Activated()
    assert model.norm.running_var is not None
    model.norm.running_var.uniform_(0.5, 2.0)
    return model.eval()
