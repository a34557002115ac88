"""Running models: threads, random batches, faster products, and the distance between two models' logits.

Products: torch multiplies float32 matrices by MKL, which takes a slow path on processors that aren't Intel's: of a ViT-B/16's layers on two cores of
an AMD EPYC 98 GMAC/s, where oneDNN, which comes with torch as well, reaches 210. Convolutions are oneDNN's anyway, but it stores channels last, and
torch puts them back in front after each one when the images come that way. All are sums of the same products, in another order.
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


# Below so many rows and columns a product is over before oneDNN has looked up how to make it.
MIN_ROWS, MIN_COLUMNS = 32, 32
# Dimensions of images in a batch.
BATCHED = 4
INTEL = "GenuineIntel"


@contextmanager
def quick_products() -> Generator[None]:
    """Let float32 layers on the CPU be quick: linear ones multiply through oneDNN where torch itself is slower, convolutions leave channels last.

    What comes out differs by rounding. Nothing is to be exported, compiled or timed meanwhile.
    """
    with _Quick(linear=mkl_is_slow(), convolutions=torch.backends.mkldnn.is_available()):
        yield


@cache
def mkl_is_slow() -> bool:
    """Say whether torch multiplies by MKL on a processor that isn't Intel's, and has oneDNN as well."""
    has_both = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()
    return has_both and cpu_vendor() not in ("", INTEL)


class _Quick(TorchFunctionMode):
    def __init__(self, *, linear: bool, convolutions: bool) -> None:
        super().__init__()
        self._linear, self._convolutions = linear, convolutions

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if self._linear and func is F.linear and _fits(*args, **(kwargs or {})):
            return _Linear.apply(*_named(*args, **(kwargs or {})))
        if self._convolutions and args and _is_plain(args[0]) and args[0].dim() == BATCHED:
            if func is F.conv2d:
                args = (args[0].contiguous(memory_format=torch.channels_last), *args[1:])
            elif func is Tensor.view and args[0].is_contiguous(memory_format=torch.channels_last):
                # Whoever views a tensor counts on the order that torch would have left it in.
                args = (args[0].contiguous(), *args[1:])
        return func(*args, **(kwargs or {}))


def _fits(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    given = (input, weight) if bias is None else (input, weight, bias)
    return (
        all(map(_is_plain, given))
        and weight.dim() == 2
        and min(weight.shape) >= MIN_COLUMNS
        and input.numel() >= MIN_ROWS * weight.shape[1]
        and input.shape[-1] == weight.shape[1]
    )


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in PLAIN and tensor.dtype == torch.float32 and tensor.device.type == "cpu"


# What other tensors do with a layer is theirs: quantized ones, meta ones, those that are traced.
PLAIN = (Tensor, torch.nn.Parameter)


def _named(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor | None]:
    return input, weight, bias


def product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return rows W' + b, (..., outputs), for rows (..., inputs) and W (outputs, inputs), float32 on the CPU, by oneDNN.

    The operator is the one that inductor has for such a product.
    """
    return torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(rows if weight.requires_grad else None, weight)
        return product(rows, weight, bias)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        (gradient,), (rows, weight) = gradients, ctx.saved_tensors
        by_rows, by_weight, by_bias = ctx.needs_input_grad
        flat = gradient.reshape(-1, gradient.shape[-1])
        return (
            product(gradient, weight.T) if by_rows else None,
            product(flat.T.contiguous(), rows.reshape(-1, rows.shape[-1]).T) if by_weight else None,
            flat.sum(0) if by_bias else None,
        )


def places(model: nn.Module) -> dict[str, int]:
    """Return in how many places the module of each name stands."""
    named = list(model.named_modules(remove_duplicate=False))
    count = Counter(id(module) for _, module in named)
    return {name: count[id(module)] for name, module in named}
