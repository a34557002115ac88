"""Trials: are the heads of a stranger's attention what its names say? One is cut for real, on random weights, and compared.

What a forward pass does with its heads isn't seen from names and shapes: it may count them by a number of its own, mix them, or
norm over all of them. So the attention alone is run on noise of the shapes that it gets in the model, with a head cut and with
that head masked: only where both give the same can heads go.
"""

import copy
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from profiling_agent.errors import PruningError
from profiling_agent.foreign import foreign_code, logits_of
from profiling_agent.modules.hooks import tensors
from profiling_agent.modules.inference import device_of
from profiling_agent.pruning.gate import MAX_MASK_ERROR, masked_parameters
from profiling_agent.pruning.surgery import cut_units
from profiling_agent.records import Cut, InputSpec, Unit

Given = tuple[tuple[Any, ...], Mapping[str, Any]]


@dataclass(slots=True)
class Trials:
    """Trials of one model's attention; blocks that are alike are tried once."""

    model: nn.Module
    skeleton: nn.Module
    spec: InputSpec
    _given: dict[str, Given] | str | None = None
    _known: dict[str, str | None] = field(default_factory=dict[str, str | None])

    def refusal(self, unit: Unit, scopes: Iterable[str]) -> str | None:
        """Return why the heads of `unit` can't be cut, None where they can; `scopes` name all that its attention is made of."""
        scope = _shared(scopes)
        if self._given is None:
            self._given = _given_to_all(self.skeleton, self.spec)
        if isinstance(self._given, str):
            return self._given
        if scope not in self._given:
            return "unused: the forward pass doesn't reach it"
        given, module = self._given[scope], self.model.get_submodule(scope)
        alike = f"{module} {_told(module)} {tree_map(_shape, given)}"
        if alike not in self._known:
            self._known[alike] = _tried(module, _within(unit, scope), given)
        return self._known[alike]


def _shared(names: Iterable[str]) -> str:
    """Return the name of the innermost module that has all of these in it, or is one of them."""
    first, *others = (name.split(".") for name in names)
    length = len(first)
    for other in others:
        alike = [one == two for one, two in zip(first[:length], other, strict=False)]
        length = alike.index(False) if False in alike else min(length, len(other))
    return ".".join(first[:length])


def _given_to_all(skeleton: nn.Module, spec: InputSpec) -> dict[str, Given] | str:
    """Return what each module is called with in one pass of a copy on the meta device, or why there is no such pass."""
    found: dict[str, Given] = {}

    def note(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        found.setdefault(name, (args, kwargs))

    hooks = [
        module.register_forward_pre_hook(partial(note, name), with_kwargs=True)
        for name, module in skeleton.named_modules()
    ]
    dtype = next((parameter.dtype for parameter in skeleton.parameters() if parameter.is_floating_point()), None)
    image = torch.zeros(spec.batch(1), device=device_of(skeleton), dtype=dtype)
    try:
        with torch.no_grad():
            logits_of(skeleton.eval(), image, PruningError)
    except PruningError as error:
        return f"untraceable: {error}"
    finally:
        for hook in hooks:
            hook.remove()
    return found


def _told(module: nn.Module) -> str:
    """Return what modules state beside their parts: numbers of heads, scales, sizes of windows."""
    plain = (bool, int, float, str, tuple, type(None))
    return str(
        [{k: v for k, v in vars(m).items() if isinstance(v, plain) and k != "training"} for m in module.modules()]
    )


def _shape(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _within(unit: Unit, scope: str) -> Unit:
    """Return the unit by the names that its modules have in `scope`."""
    start = len(scope) + 1 if scope else 0

    def cut(names: Iterable[str]) -> tuple[str, ...]:
        return tuple(name[start:] for name in names)

    return unit.model_copy(
        update={
            "name": unit.name[start:],
            "producers": cut(unit.producers),
            "consumer": unit.consumer[start:],
            "inner": cut(unit.inner),
        }
    )


def _tried(module: nn.Module, unit: Unit, given: Given) -> str | None:
    """Return what is against cutting a head of `unit` in a module that is called with what is `given`."""
    generator = torch.Generator().manual_seed(0)
    trial = _randomised(module, generator)
    args, kwargs = tree_map(partial(_noise, generator=generator), given)
    kept = list(range(1, unit.width))
    cut = Cut(unit=unit, keep=len(kept), requested_ratio=1 / unit.width)
    try:
        with foreign_code(PruningError), torch.no_grad():
            masked = masked_parameters(trial, unit, kept)
            expected = next(tensors(functional_call(trial, masked, _copied(args), _copied(kwargs))))
            pruned = cut_units(trial, [cut], {unit.name: kept})
            found = next(tensors(pruned(*_copied(args), **_copied(kwargs))))
    except PruningError as error:
        return f"unknown_heads: with a head cut its attention fails with {error}"
    if found.shape == expected.shape and bool((found - expected).norm() <= MAX_MASK_ERROR * expected.norm()):
        return None
    return "unknown_heads: with a head cut its attention computes something else than with that head masked"


def _copied(given: Any) -> Any:
    """Return arguments whose tensors a forward pass may change."""
    return tree_map(_clone, given)


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _randomised(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a float32 copy on the CPU with random weights; buffers, as indices of a table, are as they were where they are known."""
    memo: dict[int, Any] = {
        id(tensor): nn.Parameter(_noise(tensor, generator=generator) / max(tensor.shape[-1], 1) ** 0.5)
        for tensor in module.parameters()
    }
    memo |= {
        id(tensor): _noise(tensor, generator=generator) if tensor.is_meta else tensor.detach().cpu().clone()
        for tensor in module.buffers()
    }
    return copy.deepcopy(module, memo).eval()


def _noise(value: Any, *, generator: torch.Generator) -> Any:
    """Return noise of a tensor's shape, zeros where it holds no numbers but indices; any other value as it is."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator)
    return torch.zeros(value.shape, dtype=value.dtype)
