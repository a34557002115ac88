"""Every model that a process opens with torch.compile is compiled, however many were before it, or is refused with the compiler's reason."""

import errno
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers.modeling_outputs import ImageClassifierOutput

from profiling_agent.errors import ArtifactError
from profiling_agent.runtimes.torch_session import MAX_SIZES, InductorSession


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 3)

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=self.layer(pixel_values.flatten(1)))


@pytest.mark.matrix
def test_a_process_compiles_more_models_than_torch_keeps_of_one():
    images = torch.ones(2, 3, 2, 2).numpy()
    counters.clear()

    for _ in range(MAX_SIZES + 2):
        InductorSession(Tiny().eval(), device="cpu").run(images)

    assert counters["stats"]["unique_graphs"] == MAX_SIZES + 2


class Rounded(nn.Module):
    """A convolution of int8 whose border has a name, which the kernel that the compiler chooses for it doesn't take."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.ones(8, 16, 3, 3, dtype=torch.int8))
        self.register_buffer("scale", torch.full((8,), 0.1))
        self.register_buffer("zeros", torch.zeros(8, dtype=torch.int64))

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        operators = torch.ops.quantized_decomposed
        grid = (0.1, 0, 0, 255, torch.uint8)
        x = operators.dequantize_per_tensor(operators.quantize_per_tensor(pixel_values, *grid), *grid)
        weight = operators.dequantize_per_channel(self.steps, self.scale, self.zeros, 0, -128, 127, torch.int8)
        return ImageClassifierOutput(logits=nn.functional.conv2d(x, weight, padding="valid").mean((2, 3)))


@pytest.mark.slow
def test_what_can_not_be_compiled_says_what_the_compiler_said():
    session = InductorSession(Rounded().eval(), device="cpu")

    with pytest.raises(
        ArtifactError,
        match=r"^compiled by torch\.compile the model can't be run .*padding only.*: deploy it in another",
    ):
        session.run(torch.ones(2, 16, 8, 8).numpy())


def taken(error: BaseException | None, pixel_values: torch.Tensor) -> torch.Tensor:
    """What asks for more than a machine has, or finds its disk full."""
    if error:
        raise error
    return torch.empty(2**55).sum() + pixel_values


# Run as it is, in the midst of what is compiled.
TAKEN: Any = torch.compiler.disable(taken)


class Short(nn.Module):
    def __init__(self, error: BaseException | None) -> None:
        super().__init__()
        self.error = error

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=TAKEN(self.error, pixel_values).mean((2, 3)))


@pytest.mark.parametrize("error", [MemoryError("none left"), OSError(errno.ENOSPC, "No space left on device"), None])
def test_what_the_machine_is_short_of_is_no_refusal_of_the_model(error: BaseException | None):
    session = InductorSession(Short(error).eval(), device="cpu")

    with pytest.raises(type(error) if error else RuntimeError) as raised:
        session.run(torch.ones(2, 3, 2, 2).numpy())

    assert not isinstance(raised.value, ArtifactError)
    assert error is None or raised.value is error
