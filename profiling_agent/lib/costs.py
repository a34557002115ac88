"""Cost of each module: parameters and multiply-accumulates (MACs) by ptflops, time, and activations.

Counted are linear and convolution layers, as ptflops counts them (one MAC for each bias addition too: 17.58 G for
ViT-B/16), and attention's two matrix products, which it misses. Activations, norms, pools, softmax and additions are
not counted.
"""

import time
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from ptflops import get_model_complexity_info  # noqa: TID251 (the only use)
from ptflops.pytorch_ops import MODULES_MAPPING  # noqa: TID251
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from profiling_agent.errors import RequestError
from profiling_agent.lib.modules import device_of, preserving_state, tensors, watching
from profiling_agent.schemas import InputSpec


def sdpa_macs(_output: Any, query: Tensor, key: Tensor, value: Tensor, *_: Any, **__: Any) -> int:
    """Return the MACs of both matrix products: heads x L x S x (E + Ev), masked positions included.

    Shapes as in torch's documentation: query (..., heads, L, E), key (..., heads, S, E), value (..., heads, S, Ev).
    """
    return query.shape[:-1].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])


def matmul_macs(output: Tensor, *args: Tensor, **kwargs: Tensor) -> int:
    """Return the MACs of a matrix product, given the output and the arguments of torch.matmul, mm or bmm."""
    return output.numel() * (args[0] if args else kwargs["input"]).shape[-1]


PRODUCTS = (torch.matmul, torch.bmm, torch.mm, Tensor.matmul, Tensor.__matmul__, Tensor.bmm, Tensor.mm)
FORMULAS: Mapping[Callable[..., Any], Callable[..., int]] = {
    F.scaled_dot_product_attention: sdpa_macs,
    **dict.fromkeys(PRODUCTS, matmul_macs),
}


@contextmanager
def counted_matmuls(model: nn.Module) -> Generator[Counter[str]]:
    """Count the MACs of products of two activations, by the name of the module whose forward called them.

    The innermost module counts, for attention's products the attention module. `torch.einsum` is not counted.
    """
    macs, calls = Counter[str](), list[str]()

    class Products(TorchFunctionMode):
        def __torch_function__(
            self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
        ) -> Any:
            output = func(*args, **(kwargs or {}))
            if calls and (formula := FORMULAS.get(func)) is not None:
                macs[calls[-1]] += formula(output, *args, **(kwargs or {}))
            return output

    def leave(_name: str, _input: Any, _output: Any) -> None:
        calls.pop()

    with watching(model, before=lambda name, _input: calls.append(name), after=leave), Products():
        yield macs


COUNTED = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


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

    Raises:
        RequestError: ptflops can't run the model on `spec`.
    """
    names = {module: name for name, module in model.named_modules()}
    params, macs = Counter[str](), Counter[str]()
    # `named_parameters` yields a shared one once.
    for name, parameter in model.named_parameters():
        params[name.rpartition(".")[0]] += parameter.numel()

    def add(module: Any, inputs: Any, output: Any, *, formula: Callable[..., None]) -> None:
        before = module.__flops__
        formula(module, inputs, output)
        macs[names[module]] += module.__flops__ - before

    # ptflops declares a dict here, but prints a warning for every model given a dict.
    image: Any = partial(torch.zeros, device=device_of(model))
    # Without its own hook, ptflops would skip a subclass of `nn.Linear`.
    kinds = {type(module): [kind for kind in COUNTED if isinstance(module, kind)] for module in names}
    with preserving_state(model), torch.inference_mode(), counted_matmuls(model) as matmuls:
        total, _ = get_model_complexity_info(
            model,
            spec.batch(1),
            input_constructor=image,
            print_per_layer_stat=False,
            as_strings=False,
            backend="pytorch",
            ignore_modules=[kind for kind in MODULES_MAPPING if kind not in COUNTED],
            custom_modules_hooks={
                kind: partial(add, formula=MODULES_MAPPING[counted[0]]) for kind, counted in kinds.items() if counted
            },
            # ptflops adds patched functions to the total only; counted_matmuls counts them at their module.
            backend_specific_config={"count_functional": False},
        )
    if total is None:
        raise RequestError(
            f"ptflops can't count {type(model).__name__!r} on an image of {spec.batch(1)[1:]!r}; check the input shape"
        )
    macs += matmuls
    return {
        name: Complexity(kind=type(module).__name__, params=params[name], macs=macs[name])
        for name, module in model.named_modules()
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
