"""Inference: threads, random batches, faster matrix products on the CPU, and distances between logits.

Products: torch multiplies float32 matrices by MKL, which is slow on processors other than Intel's. For the layers of a
ViT-B/16 on two cores of an AMD EPYC, MKL reaches 98 GMAC/s and oneDNN, which torch includes, 210. Convolutions use oneDNN
anyway, which works with channels last; torch moves the channels back to the front after each one if the images come that way.
Both changes sum the same products in another order.
"""

import copy
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from profiling_agent.errors import RunError
from profiling_agent.lib.machine import available_threads, cpu_vendor
from profiling_agent.schemas import InputSpec


def pin_threads(num_threads: int | None = None) -> int:
    """Set the number of compute threads of this process, by default one per available core, and return it."""
    count = num_threads or available_threads()
    torch.set_num_threads(count)
    return count


def random_batch(spec: InputSpec, batch_size: int, *, seed: int = 0) -> torch.Tensor:
    """Return standard normal noise in the model's input shape: (batch, channels, height, width), float32."""
    return torch.randn(spec.batch(batch_size), generator=torch.Generator().manual_seed(seed))


@contextmanager
def preserving_state(model: nn.Module) -> Generator[nn.Module]:
    """Restore the plain attributes of every module at the end: train or eval mode, and what forward passes change.

    Swin shrinks its window permanently when given a small image, and ptflops leaves methods on the model. Tensors changed in
    place are not restored.
    """
    saved = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield model
    finally:
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter or buffer, or the CPU if it has none."""
    for tensor in (*model.parameters(), *model.buffers()):
        return tensor.device
    return torch.device("cpu")


def floating_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the images that a model takes: that of its parameters if they share one, else float32."""
    # Buffers count only without parameters: quantized layers, whose weights are buffers, cast their own inputs.
    tensors = [*model.parameters()] or [*model.buffers()]
    dtypes = {tensor.dtype for tensor in tensors if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def on_device(model: nn.Module, device: str) -> nn.Module:
    """Move `model` to a device, and make float32 exact for the whole process.

    By default, convolutions on CUDA round to a mantissa of ten bits: errors of a thousandth, too large for golden logits.

    Raises:
        RunError: the device was there when the run began, and is no longer; no plan is at fault.
    """
    if device == "cuda":
        if not torch.cuda.is_available():
            raise RunError(
                "torch finds no CUDA device: use device cpu, or resume a run that began on one where there is one"
            )
        # After setting `fp32_precision` instead, exporting a model fails in torch 2.11 to 2.13, as it reads the older switch.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
    return model.to(device)


def without_weights(model: nn.Module) -> nn.Module:
    """Copy `model` to the meta device: its structure and shapes, without memory or arithmetic."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


def logits_of(model: nn.Module, pixel_values: torch.Tensor) -> torch.Tensor:
    """Return the logits in eval mode, in float32 on the CPU; the model's mode is restored."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            return model(pixel_values=pixel_values.to(device_of(model), floating_dtype(model))).logits.float().cpu()
    finally:
        model.train(was_training)


def divergences(expected: Tensor, logits: Tensor) -> Tensor:
    """Return KL(softmax(expected) || softmax(logits)) of each image in nats; both are (images, classes)."""
    log_p, log_q = (torch.log_softmax(values, dim=1) for values in (expected, logits))
    return (log_p.exp() * (log_p - log_q)).sum(1)


def mean_kl(expected: Tensor, logits: Tensor) -> float:
    """Return the mean KL(softmax(expected) || softmax(logits)) over images in nats; both are (images, classes)."""
    return float(divergences(expected.double(), logits.double()).mean())


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| / ||expected|| of logits."""
    return float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny))


# For fewer rows or columns, a product takes less time than oneDNN needs to look up its kernel.
MIN_ROWS, MIN_COLUMNS = 32, 32
# Dimensions of a batch of images.
IMAGE_DIMS = 4
INTEL = "GenuineIntel"


@contextmanager
def quick_products() -> Generator[None]:
    """Speed up float32 layers on the CPU: linear ones by oneDNN if torch is slower, convolutions with channels last.

    Results differ by rounding. Do not export, compile or time a model inside.
    """
    with _Quick(linear=mkl_is_slow(), convolutions=torch.backends.mkldnn.is_available()):
        yield


@cache
def mkl_is_slow() -> bool:
    """Return whether torch multiplies by MKL on a processor other than Intel's, and has oneDNN as well."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and cpu_vendor() not in ("", INTEL)


class _Quick(TorchFunctionMode):
    def __init__(self, *, linear: bool, convolutions: bool) -> None:
        super().__init__()
        self._linear, self._convolutions = linear, convolutions

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self._linear and func is F.linear and (suited := _onednn_arguments(*args, **(kwargs or {}))):
            return _OneDnnLinear.apply(*suited)
        if self._convolutions and args and _is_plain(args[0]) and args[0].dim() == IMAGE_DIMS:
            if func is F.conv2d:
                args = (args[0].contiguous(memory_format=torch.channels_last), *args[1:])
            elif func is Tensor.view and args[0].is_contiguous(memory_format=torch.channels_last):
                # A caller of `view` relies on the memory order that torch would have left.
                args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


def _onednn_arguments(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor | None] | None:
    suits = (
        all(_is_plain(tensor) for tensor in (input, weight, bias) if tensor is not None)
        and weight.dim() == 2
        and min(weight.shape) >= MIN_COLUMNS
        and input.numel() >= MIN_ROWS * weight.shape[1]
        and input.shape[-1] == weight.shape[1]
    )
    return (input, weight, bias) if suits else None


def _is_plain(tensor: Any) -> bool:
    # Other types (quantized, meta or traced tensors) handle a layer themselves.
    return type(tensor) in (Tensor, nn.Parameter) and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows W' + b, (..., outputs), for rows (..., inputs) and W (outputs, inputs), float32 on the CPU, by oneDNN.

    Inductor uses the same operator for such a product.
    """
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class _OneDnnLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows if weight.requires_grad else None, weight)
        return product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (rows, weight) = gradients, ctx.saved_tensors
        needs_rows, needs_weight, needs_bias = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        return (
            product(gradient, weight.T) if needs_rows else None,
            product(flat.T.contiguous(), rows.reshape(-1, rows.shape[-1]).T) if needs_weight else None,
            flat.sum(0) if needs_bias else None,
        )


def module_counts(model: nn.Module) -> dict[str, int]:
    """Return the number of places in which each named module occurs."""
    modules = list(model.named_modules(remove_duplicate=False))
    counts = Counter(id(module) for _, module in modules)
    return {name: counts[id(module)] for name, module in modules}
