"""Cost of each module: parameters and multiply-accumulates (MACs), time, and activations.

Counted are linear and convolution layers, as ptflops counts them (one MAC for each bias addition too: 17.58 G for
ViT-B/16), and attention's two matrix products. Activations, norms, pools, softmax, einsum and additions are not
counted.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from profiling_agent.errors import RequestError
from profiling_agent.lib.logs import checked_logits
from profiling_agent.lib.modules import device_of, has_bias, preserving_state, tensors, watching
from profiling_agent.schemas import InputSpec

LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
PRODUCTS = (torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.mm)


@dataclass(frozen=True, slots=True, kw_only=True)
class Complexity:
    """The type, parameters and MACs of one module without its children; `macs` are for one image."""

    kind: str
    params: int
    macs: int


def count_complexity(model: nn.Module, spec: InputSpec) -> dict[str, Complexity]:
    """Return the complexity of every module with own parameters or MACs, by module name in the model's order.

    One forward pass of one image. A tensor that several modules share is counted at the first, so the rows add up to
    `sum(p.numel() for p in model.parameters())`. A product of two activations counts for the innermost module that
    runs, masked positions included. The model may be on the meta device.

    Raises:
        RequestError: the model doesn't run on `spec`.
    """
    modules, params, macs, running = dict(model.named_modules()), Counter[str](), Counter[str](), list[str]()
    # `named_parameters` yields a shared one once.
    for name, parameter in model.named_parameters():
        params[name.rpartition(".")[0]] += parameter.numel()

    class Products(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            output = func(*args, **(kwargs or {}))
            if running and func is F.scaled_dot_product_attention:
                query, key, value, *_ = (*args, *(kwargs or {}).values())
                macs[running[-1]] += query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
            elif running and func in PRODUCTS:
                first, *_ = (*args, *(kwargs or {}).values())
                macs[running[-1]] += output.numel() * first.shape[-1]
            return output

    def leave(name: str, _input: Any, output: Any) -> None:
        running.pop()
        if isinstance(layer := modules[name], LAYERS):
            macs[name] += output.numel() * (layer.weight[0].numel() + has_bias(layer))

    def refuse(problem: str) -> RequestError:
        shape = spec.batch(1)[1:]
        return RequestError(f"{type(model).__name__!r} doesn't run on an image of {shape!r}, it gives {problem}")

    hooks = watching(model, before=lambda name, _input: running.append(name), after=leave)
    with preserving_state(model), torch.inference_mode(), hooks, Products():
        checked_logits(model.eval(), torch.zeros(spec.batch(1), device=device_of(model)), refuse)
    return {
        name: Complexity(kind=type(module).__name__, params=params[name], macs=macs[name])
        for name, module in modules.items()
        if params[name] or macs[name]
    }


def layer_latency(
    model: nn.Module, batch: Tensor, *, passes: int, clock: Callable[[], int] = time.perf_counter_ns
) -> dict[str, float]:
    """Return the milliseconds of every called module without its children: the median over `passes` forward passes.

    The rows add up to the whole pass; a module that is called several times has the sum, and the hooks' own time, some
    microseconds, counts for the enclosing one. `clock` gives nanoseconds; on CUDA, times are between events in the
    stream.
    """
    calls: list[tuple[str, Any]] = []
    # The name of each call, its beginning and end, and the name of the call around it.
    spans: list[tuple[str, Any, Any, str | None]] = []

    def mark() -> Any:
        if not batch.is_cuda:
            return clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def enter(name: str, _input: Any) -> None:
        calls.append((name, mark()))

    def leave(_name: str, _input: Any, _output: Any) -> None:
        name, begin = calls.pop()
        spans.append((name, begin, mark(), calls[-1][0] if calls else None))

    def synchronize() -> None:
        if batch.is_cuda:
            torch.cuda.synchronize(batch.device)

    samples_ms: dict[str, list[float]] = {}
    for _ in range(passes):
        spans.clear()
        synchronize()
        with torch.inference_mode(), watching(model, before=enter, after=leave):
            model(pixel_values=batch)
        synchronize()
        own_ms: dict[str, float] = {}
        for name, begin, end, parent in spans:
            span_ms = begin.elapsed_time(end) if batch.is_cuda else (end - begin) / 1e6
            own_ms[name] = own_ms.get(name, 0.0) + span_ms
            if parent is not None:
                own_ms[parent] = own_ms.get(parent, 0.0) - span_ms
        for name, ms in own_ms.items():
            samples_ms.setdefault(name, []).append(ms)
    # Events resolve half a microsecond at best, so a child may seem to take longer than its parent.
    return {name: max(median(times), 0.0) for name, times in samples_ms.items()}


def activation_bytes(model: nn.Module, batch: Tensor) -> dict[str, int]:
    """Return the bytes of the tensors that each called module creates, in one forward pass of `batch`.

    A tensor is counted at the first module that returns it: a container that returns its last child's output creates
    none.
    """
    num_bytes = Counter[str]()
    # Weak, so that the pass needs no more memory than usual.
    seen: WeakIdKeyDictionary = WeakIdKeyDictionary()

    def leave(name: str, _input: Any, output: Any) -> None:
        new_tensors = [tensor for tensor in tensors(output) if tensor not in seen]
        seen.update((tensor, True) for tensor in new_tensors)
        num_bytes[name] += sum(tensor.nbytes for tensor in new_tensors)

    with torch.inference_mode(), watching(model, after=leave):
        model(pixel_values=batch)
    return dict(num_bytes)
