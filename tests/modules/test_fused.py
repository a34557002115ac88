"""Batch norms in their convolutions: the same answers, and nothing changed where a norm isn't its convolution's alone."""

from types import SimpleNamespace

import pytest
import torch
import zoo
from activated import activated
from torch import nn

from profiling_agent.modules.norms import Folded, fuse_norms_

IMAGES = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def lively(model: nn.Module) -> nn.Module:
    """Return the model with norms that have seen something."""
    generator = torch.Generator().manual_seed(1)
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            for tensor in (module.weight, module.running_var):
                assert tensor is not None
                tensor.data.uniform_(0.5, 2.0, generator=generator)
            assert module.running_mean is not None
            module.running_mean.normal_(generator=generator)
    return model.eval()


def test_a_resnet_answers_as_before_without_a_norm():
    model = lively(zoo.resnet())
    norms = sum(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    with torch.no_grad():
        expected = model(pixel_values=IMAGES).logits
        fused = fuse_norms_(model, IMAGES)
        found = model(pixel_values=IMAGES).logits

    assert fused == norms > 0
    assert not any(isinstance(module, nn.BatchNorm2d) for module in model.modules())
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_a_norm_that_has_an_activation_leaves_it_behind():
    model = activated()
    with torch.no_grad():
        expected = model(pixel_values=IMAGES).logits
        fused = fuse_norms_(model, IMAGES)
        found = model(pixel_values=IMAGES).logits

    assert fused == 1
    assert isinstance(zoo.inside(model).norm, Folded)
    assert isinstance(zoo.inside(model).norm.act, nn.ReLU)
    assert torch.allclose(found, expected, rtol=1e-4, atol=1e-5)


class Shared(nn.Module):
    """A convolution that somebody reads beside its norm, or that runs twice."""

    def __init__(self, *, twice: bool):
        super().__init__()
        self.conv, self.norm, self.twice = nn.Conv2d(3, 3, 3, padding=1), nn.BatchNorm2d(3), twice

    def forward(self, x):
        y = self.conv(x)
        return self.conv(self.norm(y)) if self.twice else self.norm(y) + y


@pytest.mark.parametrize("twice", [False, True])
def test_what_somebody_else_reads_is_left_as_it_is(twice: bool):
    torch.manual_seed(0)
    shared = Shared(twice=twice)
    model = zoo.inside(nn.Sequential())
    model.part, model.last = shared, nn.Linear(3, 4)
    model.forward = lambda pixel_values: SimpleNamespace(logits=model.last(model.part(pixel_values).mean((2, 3))))
    lively(model)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    assert fuse_norms_(model, IMAGES) == 0
    assert type(shared.norm) is nn.BatchNorm2d
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())


def test_a_transformer_has_none():
    assert fuse_norms_(zoo.vit().eval(), IMAGES) == 0
