"""Every model that a process opens with torch.compile is compiled, however many were before it, or is refused with the compiler's reason."""

import errno
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters
from transformers.modeling_outputs import ImageClassifierOutput

from profiling_agent.errors import ArtifactError
from profiling_agent.runtimes.torch_session import MAX_SIZES, Compiled


class Model(nn.Module):
    """A function of images to logits as a classifier."""

    def __init__(self, logits: Any) -> None:
        super().__init__()
        self.logits = logits

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        return ImageClassifierOutput(logits=self.logits(pixel_values))


def compiled(logits: Any, images: torch.Tensor) -> torch.Tensor:
    with torch.inference_mode():
        return Compiled(Model(logits).eval(), device="cpu")(images)


@pytest.mark.matrix
def test_a_process_compiles_more_models_than_torch_keeps_of_one():
    counters.clear()

    for _ in range(MAX_SIZES + 2):
        compiled(nn.Sequential(nn.Flatten(), nn.Linear(12, 3)), torch.ones(2, 3, 2, 2))

    assert counters["stats"]["unique_graphs"] == MAX_SIZES + 2


class Rounded(nn.Module):
    """A convolution of int8 whose border has a name, which the kernel that the compiler chooses for it doesn't take."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("steps", torch.ones(8, 16, 3, 3, dtype=torch.int8))
        self.register_buffer("scale", torch.full((8,), 0.1))
        self.register_buffer("zeros", torch.zeros(8, dtype=torch.int64))

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        operators = torch.ops.quantized_decomposed
        grid = (0.1, 0, 0, 255, torch.uint8)
        x = operators.dequantize_per_tensor(operators.quantize_per_tensor(pixel_values, *grid), *grid)
        weight = operators.dequantize_per_channel(self.steps, self.scale, self.zeros, 0, -128, 127, torch.int8)
        return nn.functional.conv2d(x, weight, padding="valid").mean((2, 3))


@pytest.mark.slow
def test_what_can_not_be_compiled_says_what_the_compiler_said():
    with pytest.raises(ArtifactError, match=r"^compiled by .* can't be run .*padding only.*: deploy it in another"):
        compiled(Rounded(), torch.ones(2, 16, 8, 8))


@pytest.mark.parametrize("error", [MemoryError("none left"), OSError(errno.ENOSPC, "No space left on device"), None])
def test_what_the_machine_is_short_of_is_no_refusal_of_the_model(error: BaseException | None):
    # Run as it is, in the midst of what is compiled.
    @torch.compiler.disable
    def taken(pixel_values: torch.Tensor) -> Any:
        if error:
            raise error
        return torch.empty(2**55).sum() + pixel_values

    run: Any = taken
    with pytest.raises(type(error) if error else RuntimeError) as raised:
        compiled(lambda pixel_values: run(pixel_values).mean((2, 3)), torch.ones(2, 3, 2, 2))

    assert not isinstance(raised.value, ArtifactError)
    assert error is None or raised.value is error
