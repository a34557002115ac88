"""Every model that a process opens with torch.compile is compiled, however many were before it."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers.modeling_outputs import ImageClassifierOutput

from profiling_agent.deployment.torch_session import MAX_SIZES, InductorSession


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=self.layer(pixel_values.flatten(1)))


@pytest.mark.slow
def test_a_process_compiles_more_models_than_torch_keeps_of_one():
    images = torch.ones(2, 3, 2, 2).numpy()
    counters.clear()

    for _ in range(MAX_SIZES + 2):
        InductorSession(Tiny().eval(), device="cpu").run(images)

    assert counters["stats"]["unique_graphs"] == MAX_SIZES + 2
