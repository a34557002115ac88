"""Pruning of a model: surgery on a copy, which has to compute what the baseline does with the cut channels masked.

The same comparison decides whether attention has independent heads: one is cut on trial, in a copy with random weights.
"""

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch_pruning as tp
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_map

from profiling_agent.errors import PruningError, RequestError
from profiling_agent.lib.costs import count_complexity
from profiling_agent.lib.logs import checked_logits, third_party_errors
from profiling_agent.lib.modules import device_of, preserving_state, random_batch, tensors, without_weights
from profiling_agent.pruning.attention import find_attention, head_sizes, set_head_attributes_
from profiling_agent.pruning.criteria import IMPORTANCE, keep_indices, score
from profiling_agent.pruning.tracing import blank_image, is_response_norm
from profiling_agent.schemas import Cut, InputSpec, Unit, UnitKind

# Torch-Pruning's types name all layers that its functions take.
SURGERY: Any = tp


def cut_units(model: nn.Module, cuts: Sequence[Cut], keep: Mapping[str, Sequence[int]]) -> nn.Module:
    """Return a copy of `model` that keeps the channels or heads `keep[unit.name]` of every cut unit.

    Indices are those of `model`, even if one layer ends one unit and begins the next. `head_dim` and attention's
    scaling stay.
    """
    pruned = copy.deepcopy(model)
    attention, sizes = find_attention(model), head_sizes(model)
    for cut in cuts:
        unit, dropped = cut.unit, _others(keep[cut.unit.name], cut.unit.width)
        for name in unit.producers:
            producer = pruned.get_submodule(name)
            _cut_rows_(producer, unit.rows_of(dropped, len(producer.get_parameter("weight"))))
        for name in unit.inner:
            inner: Any = pruned.get_submodule(name)
            # A response norm's weight has its channels last, after ones.
            size = inner.num_features if isinstance(inner, _BatchNorm) else len(inner.weight.squeeze())
            _cut_rows_(inner, _spread(dropped, size // unit.width))
        for name in (unit.consumer, *unit.side_readers):
            reader = pruned.get_submodule(name)
            columns = _spread(dropped, reader.get_parameter("weight").shape[1] // unit.width)
            is_conv = isinstance(reader, nn.Conv2d)
            (SURGERY.prune_conv_in_channels if is_conv else SURGERY.prune_linear_in_channels)(reader, columns)
        if unit.kind is UnitKind.HEADS:
            for name, dim in attention[unit.name].tables.items():
                owner, _, leaf = name.rpartition(".")
                # A table that a layer computes is cut with that layer's rows.
                if not isinstance(pruned.get_submodule(owner), nn.Linear):
                    _select_(pruned.get_submodule(owner), leaf, dim, keep[unit.name])
            set_head_attributes_(pruned, {unit.name: sizes[unit.name]})
    # A cut parameter is a new one: copy whether it is frozen.
    trainable = {name: parameter.requires_grad for name, parameter in model.named_parameters(remove_duplicate=False)}
    for name, parameter in pruned.named_parameters():
        parameter.requires_grad_(trainable[name])
    return pruned


def _others(indices: Iterable[int], width: int) -> list[int]:
    return sorted(set(range(width)) - set(indices))


def _spread(channels: Sequence[int], size: int) -> list[int]:
    """Return the `size` consecutive rows or columns of each channel or head."""
    return [index * size + row for index in channels for row in range(size)]


def _cut_rows_(module: Any, rows: Sequence[int]) -> None:
    if isinstance(module, _BatchNorm):
        SURGERY.prune_batchnorm_out_channels(module, rows)
    elif isinstance(module, nn.Linear):
        SURGERY.prune_linear_out_channels(module, rows)
    elif isinstance(module, nn.Conv2d):
        size, groups = module.out_channels, module.groups
        SURGERY.prune_conv_out_channels(module, rows)
        if groups > 1:
            # Whole groups go, so each remaining filter reads the remaining channels of its own group.
            module.groups = groups * module.out_channels // size
            module.in_channels = module.weight.shape[1] * module.groups
    else:
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            _select_(module, leaf, -1, _others(rows, parameter.shape[-1]))


def _select_(owner: nn.Module, leaf: str, dim: int, indices: Sequence[int]) -> None:
    parameter = owner.get_parameter(leaf).detach()
    index = torch.tensor(indices, device=parameter.device)
    setattr(owner, leaf, nn.Parameter(parameter.index_select(dim, index)))


def masked_parameters(model: nn.Module, unit: Unit, kept: Sequence[int]) -> dict[str, Tensor]:
    """Return, by parameter name, new values that make `model` ignore the channels of `unit` that aren't `kept`.

    The columns of readers that read a cut channel are zero. A global response norm on the way divides by a mean over
    all channels: there the producers' rows are zero as well, and the norm's weight is scaled by the remaining share.
    """
    readers = [f"{name}.weight" for name in (unit.consumer, *unit.side_readers)]
    rows, norms = list[str](), list[str]()
    if not unit.mask_exact:
        rows = [f"{name}.{leaf}" for name in unit.producers for leaf, _ in model.get_submodule(name).named_parameters()]
        norms = [f"{name}.weight" for name in unit.inner if is_response_norm(model.get_submodule(name))]
    masked = {name: model.get_parameter(name).detach() * (len(kept) / unit.width) for name in norms}
    for name, dim, stacks in (*((name, 1, 1) for name in readers), *((name, 0, unit.stacks) for name in rows)):
        tensor = model.get_parameter(name).detach()
        mask = torch.zeros(unit.width, dtype=tensor.dtype, device=tensor.device)
        mask[list(kept)] = 1
        # A head has as many consecutive rows or columns as it has channels.
        mask = mask.repeat_interleave(tensor.shape[dim] // unit.width // stacks).repeat(stacks)
        masked[name] = tensor * mask.view(-1, *(1 for _ in tensor.shape[dim + 1 :]))
    return masked


# Correct surgery differs by the order of fp32 sums, 1e-7 to 1e-6; one wrong index, head or batch-norm mean by 4e-4 and
# more.
MAX_MASK_ERROR = 1e-4


def mask_error(
    baseline: nn.Module, pruned: nn.Module, cuts: Sequence[Cut], keep: Mapping[str, Sequence[int]], images: Tensor
) -> float:
    """Return how far the logits of `pruned` are from those of `baseline` with the cut channels masked.

    The largest difference of a logit over the norm of the image's logits, the worst of `images` (b, c, h, w), nan if a
    logit isn't finite. Both models run in eval mode and are unchanged.
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


# Calibration images that go through the gate, or noise images if there are none.
NUM_GATE_IMAGES = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class Pruned:
    """A pruned model, its distance to the masked baseline, and the kept channels or heads of each unit by name."""

    model: nn.Module
    mask_error: float
    keep: dict[str, list[int]]


def prune_model(
    model: nn.Module,
    cuts: Sequence[Cut],
    *,
    spec: InputSpec,
    importance: str = "l2",
    seed: int = 0,
    images: Tensor | None = None,
    keep: Mapping[str, list[int]] | None = None,
) -> Pruned:
    """Return a pruned copy of `model`, which is unchanged.

    `keep` has the kept indices by unit name: `cut.keep` ascending ones per cut; without it `importance`, a key of
    IMPORTANCE, chooses. `images` (b, c, h, w) go through the gate, by default noise of the model's input shape.

    Example:
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> from profiling_agent.pruning.units import find_units
        >>> config = ViTConfig(image_size=32, patch_size=8, hidden_size=48, num_hidden_layers=1)
        >>> model = ViTForImageClassification(config)
        >>> spec = InputSpec(channels=3, height=32, width=32, source="example")
        >>> mlp = next(unit for unit in find_units(model, spec, {}).units if unit.kind is UnitKind.MLP)
        >>> pruned = prune_model(model, [Cut(unit=mlp, keep=1536, requested_ratio=0.5)], spec=spec)
        >>> pruned.model.vit.layers[0].mlp.fc1
        Linear(in_features=48, out_features=1536, bias=True)
        >>> pruned.mask_error < 1e-5
        True

    Raises:
        RequestError: the importance is unknown.
        PruningError: a weight isn't finite, the cuts or `keep` don't fit the model, the surgery failed, or a gate
        failed.
    """
    if importance not in IMPORTANCE:
        raise RequestError(f"there is no importance {importance!r}; choose one of {', '.join(IMPORTANCE)}")
    # The logits of a model with non-finite weights are undefined.
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not bool(tensor.isfinite().all()):
            raise PruningError(f"the model's {name!r} holds values that aren't finite; load or train it again")
    names = [cut.unit.name for cut in cuts]
    if not cuts or len(set(names)) < len(names):
        raise PruningError(f"the cuts {names!r} have to name at least one unit, and each once")
    kept: dict[str, list[int]] = {}

    def to_pruning_error(exception: str) -> PruningError:
        return PruningError(
            f"cutting {', '.join(names[:3])} ({len(names)} units) failed with {exception}; leave some of them alone"
        )

    # Torch-Pruning, and a model that it left half cut, raise arbitrary exceptions.
    with third_party_errors(to_pruning_error):
        for cut in cuts:
            name, width = cut.unit.name, cut.unit.width
            if not 0 < cut.keep < width:
                raise PruningError(f"{name!r} can't keep {cut.keep!r} of {width}; keep at least 1 and fewer than all")
            if keep is None:
                kept[name] = keep_indices(score(model, cut.unit, importance, seed=seed), cut.keep)
                continue
            kept[name] = list(keep.get(name, ()))
            if len(kept[name]) != cut.keep or kept[name] != sorted(set(kept[name]) & set(range(width))):
                raise PruningError(
                    f"{name!r} has to keep {cut.keep} different indices of 0 to {width - 1}, ascending; "
                    f"{str(kept[name])[:60]!r} was given"
                )
        pruned = cut_units(model, cuts, kept)
        batch = random_batch(spec, NUM_GATE_IMAGES, seed=seed) if images is None else images
        error = mask_error(model, pruned, cuts, kept, batch.to(device_of(model)))
    if not math.isfinite(error):
        raise PruningError("the pruned model or the masked baseline gives logits that aren't finite; check the weights")
    if error > MAX_MASK_ERROR:
        raise PruningError(
            f"the pruned model doesn't compute what the masked baseline does: its logits differ by {error!r} of "
            f"their norm, at most {MAX_MASK_ERROR:g} is allowed; leave these units alone"
        )
    check_saving(model, pruned, spec)
    return Pruned(model=pruned, mask_error=error, keep=kept)


# Arguments of one module's call.
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]
PLAIN = (bool, int, float, str, tuple, type(None))


def refused_heads(model: nn.Module, skeleton: nn.Module, spec: InputSpec, scopes: Mapping[Unit, str]) -> dict[str, str]:
    """Return, by unit name, why attention computes something else with a head cut than with that head masked.

    `scopes` has, for each unit of heads, the module that holds all of its attention. A pass of `skeleton`, the
    meta-device copy of `model`, shows its arguments; one head is cut in a copy with random weights. Equal modules are
    tried once.
    """
    calls: dict[str, Arguments] = {}
    with ExitStack() as hooks, torch.no_grad():
        for scope in set(scopes.values()):

            def record(
                _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], scope: str = scope
            ) -> None:
                calls.setdefault(scope, (args, kwargs))

            hooks.callback(skeleton.get_submodule(scope).register_forward_pre_hook(record, with_kwargs=True).remove)
        try:
            if scopes:
                checked_logits(skeleton.eval(), blank_image(skeleton, spec), PruningError)
        except PruningError as error:
            return {unit.name: f"untraceable: {error}" for unit in scopes}
    results: dict[str, str | None] = {}
    refusals: dict[str, str] = {}
    for unit, scope in scopes.items():
        if scope not in calls:
            refusals[unit.name] = "unused: the forward pass doesn't reach it"
            continue
        module = model.get_submodule(scope)
        # Modules' plain attributes: numbers of heads, scales, sizes of windows.
        settings = [
            {k: v for k, v in vars(m).items() if isinstance(v, PLAIN) and k != "training"} for m in module.modules()
        ]
        alike = f"{module} {settings} {tree_map(_shape_and_dtype, calls[scope])}"
        if alike not in results:
            results[alike] = _try_cut(module, unit, scope, calls[scope])
        if (reason := results[alike]) is not None:
            refusals[unit.name] = reason
    return refusals


def _shape_and_dtype(value: Any) -> Any:
    return (value.shape, value.dtype) if isinstance(value, Tensor) else value


def _try_cut(module: nn.Module, unit: Unit, scope: str, arguments: Arguments) -> str | None:
    """Return why a head of `unit` can't be cut in `module`, named `scope`, when called with such arguments, or None."""
    start = len(scope) + 1 if scope else 0
    names = {"name": unit.name[start:], "consumer": unit.consumer[start:]}
    members = {key: tuple(name[start:] for name in getattr(unit, key)) for key in ("producers", "inner")}
    unit = unit.model_copy(update={**names, **members})
    noise = partial(_noise, generator=torch.Generator().manual_seed(0))
    # Random weights, and the buffers as they are, such as a table's indices, unless on the meta device.
    memo: dict[int, Any] = {id(p): nn.Parameter(noise(p) / max(p.shape[-1], 1) ** 0.5) for p in module.parameters()}
    memo |= {id(b): noise(b) if b.is_meta else b.detach().cpu().clone() for b in module.buffers()}
    trial, kept = copy.deepcopy(module, memo).eval(), list(range(1, unit.width))

    def output_of(other: nn.Module, parameters: dict[str, Tensor]) -> Tensor:
        args, kwargs = tree_map(partial(_noise, generator=torch.Generator().manual_seed(1)), arguments)
        return tensors(functional_call(other, parameters, args, dict(kwargs)))[0]

    try:
        with third_party_errors(PruningError), torch.no_grad():
            expected = output_of(trial, masked_parameters(trial, unit, kept))
            cut = Cut(unit=unit, keep=len(kept), requested_ratio=1 / unit.width)
            output = output_of(cut_units(trial, [cut], {unit.name: kept}), {})
    except PruningError as error:
        return f"unknown_heads: with a head cut its attention fails with {error}"
    if output.shape == expected.shape and bool((output - expected).norm() <= MAX_MASK_ERROR * expected.norm()):
        return None
    return "unknown_heads: with a head cut its attention computes something else than with that head masked"


def _noise(value: Any, *, generator: torch.Generator) -> Any:
    """Return noise of a tensor's shape, zeros for an integer tensor, any other value unchanged."""
    if not isinstance(value, Tensor):
        return value
    if value.is_floating_point():
        return torch.randn(value.shape, generator=generator)
    return torch.zeros(value.shape, dtype=value.dtype)
