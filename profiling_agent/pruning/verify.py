"""Pruning surgery and its verification: units cut out of a copy, compared with the masked baseline."""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from typing import Any

import torch
import torch_pruning as tp
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_map

from profiling_agent.errors import PruningError
from profiling_agent.lib.costs import count_complexity
from profiling_agent.lib.logs import checked_logits, third_party_errors
from profiling_agent.lib.modules import preserving_state, tensors, without_weights
from profiling_agent.pruning.attention import Attention, find_attention, head_sizes, set_head_attributes_
from profiling_agent.pruning.tracing import blank_image, is_response_norm
from profiling_agent.schemas import Cut, InputSpec, Unit, UnitKind

# Torch-Pruning's types name all layers that its functions take.
SURGERY: Any = tp


def cut_units(model: nn.Module, cuts: Sequence[Cut], keep: Mapping[str, list[int]]) -> nn.Module:
    """Return a copy of `model` that keeps the channels or heads `keep[unit.name]` of every cut unit.

    Indices are those of `model`, even if one layer ends one unit and begins the next: each dimension of a weight is cut once. `head_dim` and
    attention's scaling stay.
    """
    pruned = copy.deepcopy(model)
    attention = find_attention(model)
    for cut in cuts:
        unit, dropped = cut.unit, _invert(keep[cut.unit.name], cut.unit.width)
        # Cut the rows of producers and inner modules, and the columns of all readers.
        for name in unit.producers:
            producer = pruned.get_submodule(name)
            rows = unit.rows_of(dropped, len(producer.get_parameter("weight")))
            is_conv = isinstance(producer, nn.Conv2d)
            (SURGERY.prune_conv_out_channels if is_conv else SURGERY.prune_linear_out_channels)(producer, rows)
        for name in unit.inner:
            _cut_rows_(pruned.get_submodule(name), unit.width, dropped)
        for name in (unit.consumer, *unit.side_readers):
            reader = pruned.get_submodule(name)
            columns = _expand(dropped, reader.get_parameter("weight").shape[1] // unit.width)
            is_conv = isinstance(reader, nn.Conv2d)
            (SURGERY.prune_conv_in_channels if is_conv else SURGERY.prune_linear_in_channels)(reader, columns)
        if unit.kind is UnitKind.HEADS:
            heads = attention[unit.name]
            assert isinstance(heads, Attention), "find_units refuses attention whose heads can't be cut"
            for name, dim in heads.tables.items():
                holder, _, leaf = name.rpartition(".")
                owner = pruned.get_submodule(holder)
                # A table that a layer computes is cut with that layer's rows.
                if not isinstance(owner, nn.Linear):
                    _select_(owner, leaf, dim, _invert(dropped, unit.width))
    sizes = head_sizes(model)
    set_head_attributes_(
        pruned, {cut.unit.name: sizes[cut.unit.name] for cut in cuts if cut.unit.kind is UnitKind.HEADS}
    )
    # A cut parameter is a new one: copy whether it is frozen.
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, parameter in pruned.named_parameters():
        parameter.requires_grad_(trainable[name])
    return pruned


def _invert(indices: Iterable[int], width: int) -> list[int]:
    return sorted(set(range(width)) - set(indices))


def _expand(dropped: Sequence[int], size: int) -> list[int]:
    """Return the consecutive rows or columns of each channel or head."""
    return [index * size + row for index in dropped for row in range(size)]


def _cut_rows_(module: Any, width: int, dropped: Sequence[int]) -> None:
    """Cut the rows of `dropped` out of `width` channels of a layer or norm."""
    if isinstance(module, _BatchNorm):
        SURGERY.prune_batchnorm_out_channels(module, _expand(dropped, module.num_features // width))
    elif isinstance(module, nn.Linear):
        SURGERY.prune_linear_out_channels(module, _expand(dropped, module.out_features // width))
    elif isinstance(module, nn.Conv2d):
        groups = module.groups
        SURGERY.prune_conv_out_channels(module, _expand(dropped, module.out_channels // width))
        if groups > 1:
            # Whole groups go, so each remaining filter reads the remaining channels of its own group.
            module.groups = groups * (width - len(dropped)) // width
            module.in_channels = module.weight.shape[1] * module.groups
    else:
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            _select_(module, leaf, -1, _invert(_expand(dropped, parameter.shape[-1] // width), parameter.shape[-1]))


def _select_(owner: nn.Module, leaf: str, dim: int, indices: Sequence[int]) -> None:
    parameter = owner.get_parameter(leaf).detach()
    index = torch.tensor(indices, device=parameter.device)
    setattr(owner, leaf, nn.Parameter(parameter.index_select(dim, index)))


# Correct surgery differs by the order of fp32 sums, 1e-7 to 1e-6; one wrong index, head or batch-norm mean by 4e-4 and more, even in tiny random
# models, whose logits hardly depend on the image.
MAX_MASK_ERROR = 1e-4


def mask_error(
    baseline: nn.Module, pruned: nn.Module, cuts: Sequence[Cut], keep: Mapping[str, list[int]], images: Tensor
) -> float:
    """Return how far the logits of `pruned` are from those of `baseline` with the cut channels masked.

    Masked: see `masked_parameters`. The result is the largest difference of a logit over the norm of the image's logits, the worst of `images`
    (batch, channels, height, width), nan if a logit isn't finite. Both models run in eval mode and are unchanged.
    """
    masked: dict[str, Tensor] = {}
    for cut in cuts:
        masked |= masked_parameters(baseline, cut.unit, keep[cut.unit.name])
    with preserving_state(baseline), preserving_state(pruned), torch.inference_mode():
        output: Any = functional_call(baseline.eval(), masked, (), {"pixel_values": images})
        expected = output.logits.float()
        logits = pruned.eval()(pixel_values=images).logits.float()
    norms = expected.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    # An infinite logit in both gives nan, which amax propagates.
    return float(((logits - expected).abs().amax(dim=1) / norms).amax())


def masked_parameters(model: nn.Module, unit: Unit, kept: Sequence[int]) -> dict[str, Tensor]:
    """Return, by parameter name, new values that make `model` ignore the channels of `unit` that aren't `kept`.

    The columns of the consumer and of every side reader that read a cut channel are zero. A global response norm on the way divides by a mean over
    channels, including cut ones: there the producers' rows are zero as well, so that cut channels add nothing to the mean, and the norm's weight is
    scaled by kept over all, which makes it a mean over the kept ones. `model` is not changed.
    """
    readers = (unit.consumer, *unit.side_readers)
    masked = {f"{name}.weight": _mask(model, f"{name}.weight", unit, kept, dim=1) for name in readers}
    if not unit.mask_exact:
        rows = [f"{name}.{leaf}" for name in unit.producers for leaf, _ in model.get_submodule(name).named_parameters()]
        masked |= {name: _mask(model, name, unit, kept, dim=0) for name in rows}
        norms = [f"{name}.weight" for name in unit.inner if is_response_norm(model.get_submodule(name))]
        masked |= {name: model.get_parameter(name).detach() * (len(kept) / unit.width) for name in norms}
    return masked


def _mask(model: nn.Module, name: str, unit: Unit, kept_indices: Sequence[int], *, dim: int) -> Tensor:
    tensor = model.get_parameter(name).detach()
    mask = torch.zeros(unit.width, dtype=tensor.dtype, device=tensor.device)
    mask[list(kept_indices)] = 1
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


CallArguments = tuple[tuple[Any, ...], Mapping[str, Any]]
PLAIN = (bool, int, float, str, tuple, type(None))


@dataclass(slots=True)
class Trials:
    """Trial cuts of one model's attention; equal blocks are tried once."""

    model: nn.Module
    skeleton: nn.Module
    spec: InputSpec
    _given: dict[str, CallArguments] | str | None = None
    _known: dict[str, str | None] = field(default_factory=dict[str, str | None])

    def refusal(self, unit: Unit, scopes: Iterable[str]) -> str | None:
        """Return why the heads of `unit` can't be cut, or None; `scopes` name all modules of its attention."""
        scope = common_module(scopes)
        if self._given is None:
            self._given = _record_call_arguments(self.skeleton, self.spec)
        if isinstance(self._given, str):
            return self._given
        if scope not in self._given:
            return "unused: the forward pass doesn't reach it"
        arguments, module = self._given[scope], self.model.get_submodule(scope)
        # Modules' plain attributes: numbers of heads, scales, sizes of windows.
        settings = [
            {k: v for k, v in vars(m).items() if isinstance(v, PLAIN) and k != "training"} for m in module.modules()
        ]
        shapes = tree_map(_shape_and_dtype, arguments)
        fingerprint = f"{module} {settings} {shapes}"
        if fingerprint not in self._known:
            self._known[fingerprint] = _try_cut(module, _relative_to(unit, scope), arguments)
        return self._known[fingerprint]


def common_module(names: Iterable[str]) -> str:
    """Return the name of the innermost module that is or holds all of `names`, empty for the model itself."""
    levels = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _record_call_arguments(skeleton: nn.Module, spec: InputSpec) -> dict[str, CallArguments] | str:
    """Return each module's call arguments in one pass on the meta device, or why the pass failed."""
    arguments: dict[str, CallArguments] = {}

    def record(name: str, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        arguments.setdefault(name, (args, kwargs))

    hooks = [
        module.register_forward_pre_hook(partial(record, name), with_kwargs=True)
        for name, module in skeleton.named_modules()
    ]
    try:
        with torch.no_grad():
            checked_logits(skeleton.eval(), blank_image(skeleton, spec), PruningError)
    except PruningError as error:
        return f"untraceable: {error}"
    finally:
        for hook in hooks:
            hook.remove()
    return arguments


def _relative_to(unit: Unit, scope: str) -> Unit:
    """Return the unit with module names relative to `scope`."""
    start = len(scope) + 1 if scope else 0
    names = {"name": unit.name[start:], "consumer": unit.consumer[start:]}
    members = {key: tuple(name[start:] for name in getattr(unit, key)) for key in ("producers", "inner")}
    return unit.model_copy(update={**names, **members})


def _shape_and_dtype(value: Any) -> Any:
    return (tuple(value.shape), value.dtype) if isinstance(value, Tensor) else value


def _clone(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value


def _try_cut(module: nn.Module, unit: Unit, arguments: CallArguments) -> str | None:
    """Return why a head of `unit` can't be cut in a module called with these arguments, or None."""
    generator = torch.Generator().manual_seed(0)
    trial = _randomised(module, generator)
    inputs = tree_map(partial(_noise, generator=generator), arguments)

    def cloned() -> CallArguments:
        return tree_map(_clone, inputs)

    kept_indices = list(range(1, unit.width))
    cut = Cut(unit=unit, keep=len(kept_indices), requested_ratio=1 / unit.width)
    try:
        with third_party_errors(PruningError), torch.no_grad():
            masked = masked_parameters(trial, unit, kept_indices)
            args, kwargs = cloned()
            expected = next(tensors(functional_call(trial, masked, args, dict(kwargs))))
            pruned = cut_units(trial, [cut], {unit.name: kept_indices})
            args, kwargs = cloned()
            output = next(tensors(pruned(*args, **kwargs)))
    except PruningError as error:
        return f"unknown_heads: with a head cut its attention fails with {error}"
    if output.shape == expected.shape and bool((output - expected).norm() <= MAX_MASK_ERROR * expected.norm()):
        return None
    return "unknown_heads: with a head cut its attention computes something else than with that head masked"


def _randomised(module: nn.Module, generator: torch.Generator) -> nn.Module:
    """Return a float32 CPU copy with random weights; buffers, such as indices of a table, are kept unless on the meta device."""
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
    """Return noise of a tensor's shape, zeros for an integer tensor, any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator)
    return torch.zeros(value.shape, dtype=value.dtype)
