"""Cost of each module: parameters and multiply-accumulates (MACs), time, and activations.

MACs are those of linear and convolution layers, as ptflops counts them (one for each bias addition too: 17.58 G for ViT-B/16), and
of attention's two matrix products, which ptflops misses. Activations, norms, pools, softmax and additions are not counted.
"""

import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from profiling_agent.lib.modules import device_of, preserving_state, tensors, watching
from profiling_agent.schemas import InputSpec


def sdpa_macs(query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the MACs of both matrix products: heads x L x S x (E + Ev), masked positions included.

    Shapes as in torch's documentation: query (..., heads, L, E), key (..., heads, S, E), value (..., heads, S, Ev).
    """
    *batch_shape, target, width = query.shape
    return math.prod(batch_shape) * target * key.shape[-2] * (width + value.shape[-1])


def matmul_macs(*args: Any, **kwargs: Any) -> int:
    """Return the MACs of a matrix product, given the arguments of torch.matmul, mm or bmm."""
    first, second = (*args, *(kwargs[name] for name in ("input", "mat2", "other") if name in kwargs))[:2]
    if first.dim() == 1 or second.dim() == 1:
        return max(first.numel(), second.numel())
    batch_shape = torch.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    return math.prod(batch_shape) * first.shape[-2] * first.shape[-1] * second.shape[-1]


PRODUCTS = (torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.mm)
FORMULAS: Mapping[Callable[..., Any], Callable[..., int]] = {
    F.scaled_dot_product_attention: sdpa_macs,
    **dict.fromkeys(PRODUCTS, matmul_macs),
}


class _MatmulCounter(TorchFunctionMode):
    def __init__(self) -> None:
        super().__init__()
        self.macs, self.call_stack = Counter[str](), list[str]()

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.call_stack and (formula := FORMULAS.get(func)) is not None:
            self.macs[self.call_stack[-1]] += formula(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def counted_matmuls(model: nn.Module) -> Generator[Counter[str]]:
    """Count the MACs of products of two activations, by the name of the module whose forward called them.

    The innermost module counts: attention's products belong to the attention module, not to the layer around it.
    `torch.einsum` is not counted.
    """
    counter = _MatmulCounter()
    stack = counter.call_stack
    with watching(model, before=lambda name, _: stack.append(name), after=lambda *_: stack.pop()), counter:
        yield counter.macs


TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
COUNTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, *TRANSPOSED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Complexity:
    """The type, parameters and MACs of one module without its children; `macs` are for one image."""

    kind: str
    params: int
    macs: int


def count_complexity(model: nn.Module, spec: InputSpec) -> dict[str, Complexity]:
    """Return the complexity of every module with own parameters or MACs, by module name in the model's order.

    One forward pass of one image. A tensor that several modules share is counted at the first, so the rows add up to
    `sum(p.numel() for p in model.parameters())`. The model may be on the meta device.
    """
    params, macs = Counter[str](), Counter[str]()
    # `named_parameters` yields a shared one once.
    for name, parameter in model.named_parameters():
        params[name.rpartition(".")[0]] += parameter.numel()
    layers: dict[str, Any] = {name: module for name, module in model.named_modules() if isinstance(module, COUNTED)}

    def count(name: str, inputs: Any, output: Any) -> None:
        layer = layers[name]
        positions = inputs if isinstance(layer, TRANSPOSED) else output
        macs[name] += positions.numel() * layer.weight[0].numel()
        macs[name] += output.numel() if layer.bias is not None else 0

    with (
        preserving_state(model),
        torch.inference_mode(),
        counted_matmuls(model) as matmuls,
        watching(model, layers, after=count),
    ):
        weight = next(model.parameters(), None)
        dtype = torch.float32 if weight is None else weight.dtype
        model.eval()(pixel_values=torch.zeros(spec.batch(1), device=device_of(model), dtype=dtype))
    macs += matmuls
    return {
        name: Complexity(kind=type(module).__name__, params=params[name], macs=macs[name])
        for name, module in model.named_modules()
        if params[name] or macs[name]
    }


def layer_latency(model: nn.Module, batch: Tensor, *, passes: int) -> dict[str, float]:
    """Return the milliseconds of every called module without its children: the median over `passes` forward passes.

    The rows add up to the whole pass; a module that is called several times in a pass has the sum. The hooks' own time, some
    microseconds a module, counts for the enclosing module. CUDA times are between events in the stream, read after one
    synchronization a pass.
    """

    def mark() -> Any:
        if not batch.is_cuda:
            return time.perf_counter_ns()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def synchronize() -> None:
        if batch.is_cuda:
            torch.cuda.synchronize(batch.device)

    open_calls: list[tuple[str, Any]] = []
    # The name of each call, its beginning and end, and the name of the call around it.
    calls: list[tuple[str, Any, Any, str | None]] = []

    def leave(_name: str, _input: Any, _output: Any) -> None:
        name, begin = open_calls.pop()
        calls.append((name, begin, mark(), open_calls[-1][0] if open_calls else None))

    samples_ms: dict[str, list[float]] = {}
    for _ in range(passes):
        calls.clear()
        synchronize()
        with (
            torch.inference_mode(),
            watching(model, before=lambda name, _: open_calls.append((name, mark())), after=leave),
        ):
            model(pixel_values=batch)
        synchronize()
        own_ms: dict[str, float] = defaultdict(float)
        for name, begin, end, parent in calls:
            call_ms = begin.elapsed_time(end) if batch.is_cuda else (end - begin) / 1e6
            own_ms[name] += call_ms
            if parent is not None:
                own_ms[parent] -= call_ms
        for name, module_ms in own_ms.items():
            samples_ms.setdefault(name, []).append(module_ms)
    # Events resolve half a microsecond at best, so a child may seem to take longer than its parent.
    return {name: max(median(own_ms), 0.0) for name, own_ms in samples_ms.items()}


def activation_bytes(model: nn.Module, batch: Tensor) -> dict[str, int]:
    """Return the bytes of the tensors that each called module creates, in one forward pass of `batch`.

    A tensor is counted at the first module that returns it: a container that returns its last child's output, or dropout in
    eval mode, creates none.
    """
    num_bytes = Counter[str]()
    # Weak, so that the pass needs no more memory than usual, and the id of a freed tensor is not mistaken for another's.
    seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def leave(name: str, _input: Any, output: Any) -> None:
        new_tensors = [tensor for tensor in tensors(output) if tensor not in seen]
        seen.update((tensor, True) for tensor in new_tensors)
        num_bytes[name] += sum(tensor.nbytes for tensor in new_tensors)

    with torch.inference_mode(), watching(model, after=leave):
        model(pixel_values=batch)
    return dict(num_bytes)
