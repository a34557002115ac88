"""Verification: a pruned model computes what the masked baseline computes, for whole models and for single attention modules."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from profiling_agent.errors import PruningError
from profiling_agent.foreign import foreign_code, logits_of
from profiling_agent.modules.complexity import count_complexity
from profiling_agent.modules.hooks import tensors
from profiling_agent.modules.inference import device_of, left_as_found, without_weights
from profiling_agent.pruning.surgery import cut_units
from profiling_agent.pruning.tracing import is_response_norm
from profiling_agent.records import Cut, InputSpec, Unit

# Correct surgery differs by the order of fp32 sums, 1e-7 to 1e-6; one wrong index, head or batch-norm mean by 4e-4 and
# more even in tiny random models, whose logits hardly depend on the image.
MAX_MASK_ERROR = 1e-4


def mask_error(
    baseline: nn.Module, pruned: nn.Module, cuts: Sequence[Cut], keep: Mapping[str, list[int]], images: Tensor
) -> float:
    """Return how far the logits of `pruned` are from those of `baseline` with the cut channels masked.

    Masked: see `masked_parameters`. The result is the largest difference
    of a logit over the norm of the image's logits, the worst of `images` (batch, channels, height, width), nan where
    a logit isn't finite. Both models run in eval mode and are left as they were found.
    """
    masked: dict[str, Tensor] = {}
    for cut in cuts:
        masked |= masked_parameters(baseline, cut.unit, keep[cut.unit.name])
    with left_as_found(baseline), left_as_found(pruned), torch.inference_mode():
        answer: Any = functional_call(baseline.eval(), masked, (), {"pixel_values": images})
        expected = answer.logits.float()
        logits = pruned.eval()(pixel_values=images).logits.float()
    norms = expected.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    # An infinite logit in both makes nan, and amax lets nan through.
    return float(((logits - expected).abs().amax(dim=1) / norms).amax())


def masked_parameters(model: nn.Module, unit: Unit, kept: Sequence[int]) -> dict[str, Tensor]:
    """Return, by parameter name, new values that make `model` blind to the channels of `unit` that aren't `kept`.

    The columns of the consumer and of every side reader that read a cut channel are zero. A global response norm on
    the way divides by a mean over channels, cut ones too: there the producers' rows are zero as well, so that cut
    channels add nothing to the mean, and the norm's weight is scaled by kept over all, which makes it a mean over the
    kept ones. `model` is not changed.
    """
    readers = (unit.consumer, *unit.side_readers)
    masked = {f"{name}.weight": _blind(_held(model, f"{name}.weight"), unit, kept, dim=1) for name in readers}
    if not unit.mask_exact:
        rows = [f"{name}.{leaf}" for name in unit.producers for leaf, _ in model.get_submodule(name).named_parameters()]
        masked |= {name: _blind(_held(model, name), unit, kept, dim=0) for name in rows}
        norms = [name for name in unit.inner if is_response_norm(model.get_submodule(name))]
        masked |= {f"{name}.weight": _held(model, f"{name}.weight") * (len(kept) / unit.width) for name in norms}
    return masked


def _held(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).detach()


def _blind(tensor: Tensor, unit: Unit, kept: Sequence[int], *, dim: int) -> Tensor:
    """Return a copy of a parameter that is zero at the cut channels of `dim`."""
    mask = torch.zeros(unit.width, dtype=tensor.dtype, device=tensor.device)
    mask[list(kept)] = 1
    # A head has as many consecutive rows or columns as it has channels.
    stacks = unit.stacks if dim == 0 else 1
    spread = mask.repeat_interleave(tensor.shape[dim] // unit.width // stacks).repeat(stacks)
    return tensor * spread.view(-1, *(1 for _ in tensor.shape[dim + 1 :]))


def check_mask_error(error: float) -> None:
    """Refuse a prune whose logits differ from the masked baseline's, or aren't finite.

    Raises:
        PruningError: `error` is above 1e-4, or nan.
    """
    if not math.isfinite(error):
        raise PruningError("the pruned model or the masked baseline gives logits that aren't finite; check the weights")
    if error > MAX_MASK_ERROR:
        raise PruningError(
            f"the pruned model doesn't compute what the masked baseline does: its logits differ by {error!r} of "
            f"their norm, at most {MAX_MASK_ERROR:g} is allowed; leave these units alone"
        )


def check_saving(baseline: nn.Module, pruned: nn.Module, spec: InputSpec) -> None:
    """Refuse a prune that saved nothing.

    Raises:
        PruningError: params or MACs did not go down.
    """
    before, after = (count_complexity(without_weights(model), spec).values() for model in (baseline, pruned))
    for name in ("params", "macs"):
        new, old = (sum(getattr(row, name) for row in rows) for rows in (after, before))
        if new >= old:
            raise PruningError(f"the prune saves no {name}: {new!r} after, {old!r} before; cut more")


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
