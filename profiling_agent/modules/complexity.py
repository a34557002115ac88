"""Parameters and multiply-accumulates (MACs) of each module, by ptflops; attention, which ptflops misses, is added here.

Counted are linear and convolution layers, as ptflops counts them (one MAC for each bias addition too: 17.58 G for ViT-B/16),
and attention's two matrix products. Activations, norms, pools, softmax and additions are not counted.
"""

import math
from collections import Counter
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from ptflops import get_model_complexity_info
from ptflops.pytorch_ops import MODULES_MAPPING
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from profiling_agent.errors import RequestError
from profiling_agent.modules.hooks import watching
from profiling_agent.modules.inference import device_of, preserving_state
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


FORMULAS: Mapping[Callable[..., Any], Callable[..., int]] = {
    F.scaled_dot_product_attention: sdpa_macs,
    torch.matmul: matmul_macs,
    torch.bmm: matmul_macs,
    torch.mm: matmul_macs,
    Tensor.matmul: matmul_macs,
    Tensor.__matmul__: matmul_macs,
    Tensor.bmm: matmul_macs,
    Tensor.mm: matmul_macs,
}


@contextmanager
def counted_matmuls(model: nn.Module) -> Generator[Counter[str]]:
    """Count the MACs of products of two activations, by the name of the module whose forward called them.

    The innermost module counts: attention's products belong to the attention module, not to the layer around it.
    `torch.einsum` is not counted.
    """
    counter = _MatmulCounter()

    def leave(_name: str, _inputs: Any, _output: Any) -> None:
        counter.call_stack.pop()

    with watching(model, before=lambda name, _: counter.call_stack.append(name), after=leave), counter:
        yield counter.macs


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
    params, macs = Counter[str](), _macs(model, spec)
    # `named_parameters` yields a shared one once.
    for name, parameter in model.named_parameters():
        params[name.rpartition(".")[0]] += parameter.numel()
    return {
        name: Complexity(kind=type(module).__name__, params=params[name], macs=macs[name])
        for name, module in model.named_modules()
        if params[name] or macs[name]
    }


def _macs(model: nn.Module, spec: InputSpec) -> Counter[str]:
    names = {module: name for name, module in model.named_modules()}
    macs = Counter[str]()

    def add(module: Any, inputs: Any, output: Any, *, formula: Callable[..., None]) -> None:
        before = module.__flops__
        formula(module, inputs, output)
        macs[names[module]] += module.__flops__ - before

    def image(shape: Any) -> Any:
        # ptflops declares a dict here, but prints a warning for every model given a dict.
        return torch.zeros(shape, device=device_of(model))

    hooks = {
        # Without its own hook, ptflops would skip a subclass of `nn.Linear`.
        type(module): partial(add, formula=MODULES_MAPPING[kind])
        for module in names
        if (kind := next((kind for kind in COUNTED if isinstance(module, kind)), None)) is not None
    }
    with preserving_state(model), torch.inference_mode(), counted_matmuls(model) as matmul_macs:
        total, _ = get_model_complexity_info(
            model,
            spec.batch(1),
            input_constructor=image,
            print_per_layer_stat=False,
            as_strings=False,
            backend="pytorch",
            ignore_modules=[kind for kind in MODULES_MAPPING if kind not in COUNTED],
            custom_modules_hooks=hooks,
            # ptflops adds patched functions to the total only; counted_matmuls counts them at their module.
            backend_specific_config={"count_functional": False},
        )
    if total is None:
        raise RequestError(
            f"ptflops can't count {type(model).__name__!r} on an image of {spec.batch(1)[1:]!r}; check the input shape"
        )
    return macs + matmul_macs
