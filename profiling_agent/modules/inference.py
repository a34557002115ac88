"""Running models: threads, a batch to run, a copy without weights, and a model left as it was found."""

import copy
from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from profiling_agent.errors import RunError
from profiling_agent.records import InputSpec
from profiling_agent.reproducibility import available_threads


def pin_threads(num_threads: int | None = None) -> int:
    """Fix the number of compute threads of this process; by default one per core it may use."""
    count = num_threads or available_threads()
    torch.set_num_threads(count)
    return count


def random_batch(spec: InputSpec, batch_size: int, *, seed: int = 0) -> torch.Tensor:
    """Return standard normal noise in the model's input shape: (batch, channels, height, width), float32."""
    return torch.randn(spec.batch(batch_size), generator=torch.Generator().manual_seed(seed))


@contextmanager
def left_as_found(model: nn.Module) -> Generator[nn.Module]:
    """Put back the plain attributes of every module at the end: train or eval mode, and what forward passes change.

    Swin shrinks its window for good when it is shown a small image, and ptflops leaves methods on the model.
    Tensors that are changed in place are not restored.
    """
    before = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield model
    finally:
        for module, attributes in before:
            vars(module).clear()
            vars(module).update(attributes)


def device_of(model: nn.Module) -> torch.device:
    """Return where the model's first parameter or buffer lies, the CPU if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def floating_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype in which a model takes its images: float32, or that of a model in half precision as a whole."""
    # Quantized layers, whose weights and scales are buffers, cast their inputs by themselves.
    tensors = [*model.parameters()] or [*model.buffers()]
    found = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return found.pop() if len(found) == 1 else torch.float32


def on_device(model: nn.Module, device: str) -> nn.Module:
    """Return `model` on a device, where float32 is then float32 for the whole process.

    On CUDA convolutions round to ten bits of a mantissa unless they are told not to, a thousandth off: golden logits would call that another model.

    Raises:
        RunError: the device was there when the run began, and is no more; no plan is at fault.
    """
    if device == "cuda":
        if not torch.cuda.is_available():
            raise RunError(
                "torch finds no CUDA device: use device cpu, or resume a run that began on one where there is one"
            )
        # Not by `fp32_precision`, after which exporting a model is an error in torch 2.11 to 2.13: it reads the older switch.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
    return model.to(device)


def without_weights(model: nn.Module) -> nn.Module:
    """Return a copy of `model` on the meta device: its structure and shapes, no memory and no arithmetic."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def logits_of(model: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the logits in eval mode, in float32 on the CPU; the model's mode is left as found."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            return model(pixel_values=pixel_values.to(device_of(model), floating_dtype(model))).logits.float().cpu()
    finally:
        model.train(was_training)
