"""Structured pruning units from traced channel axes, found by structure and never by model class."""

import copy
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import takewhile
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._pytree import tree_map

from profiling_agent.errors import PruningError
from profiling_agent.lib.logs import third_party_errors
from profiling_agent.lib.modules import tensors, without_weights
from profiling_agent.pruning.prune import MAX_MASK_ERROR, Attention, cut_units, find_attention, masked_parameters
from profiling_agent.pruning.tracing import LAYERS, Arguments, Space, Trace, follow_channels
from profiling_agent.pruning.widths import aligned_widths, step_for
from profiling_agent.schemas import Cut, InputSpec, Record, Unit, UnitKind


class FoundUnits(Record):
    """The units in network order, and for every other linear or convolution layer the reason for its refusal.

    A reason is a sentence that starts with a code: "residual_writer: ...".
    """

    units: tuple[Unit, ...]
    refusals: dict[str, str]


def find_units(model: nn.Module, spec: InputSpec, macs: Mapping[str, int]) -> FoundUnits:
    """Return the MLPs, attention heads and block-inner convolutions of `model` that can be cut independently.

    `macs` are those of one image by module name, attention's two products under the attention module's; a missing
    module has none. The model is neither run nor changed: the trace runs a copy without weights, and trial cuts copies
    of its attention.

    Example:
        >>> from transformers import ViTConfig, ViTForImageClassification
        >>> config = ViTConfig(image_size=32, patch_size=8, hidden_size=48, num_hidden_layers=1)
        >>> model = ViTForImageClassification(config)
        >>> found = find_units(model, InputSpec(channels=3, height=32, width=32, source="example"), {})
        >>> [(unit.name, unit.width) for unit in found.units]
        [('vit.layers.0.attention', 12), ('vit.layers.0.mlp', 3072)]
        >>> found.refusals["classifier"]
        'classifier: its outputs are the logits'
    """
    skeleton = without_weights(model)
    names = {module: name for name, module in skeleton.named_modules()}
    tied = _tied_modules(skeleton)
    attentions = find_attention(skeleton)
    # For each attention the module that holds all of it.
    scopes = {
        name: _common_module((name, *_parents((attention.consumer, *attention.tables))))
        for name, attention in attentions.items()
        if attention.refusal is None
    }
    try:
        trace = follow_channels(skeleton, spec, set(scopes.values()))
    except PruningError as error:
        layers = (name for layer, name in names.items() if isinstance(layer, LAYERS))
        return FoundUnits(units=(), refusals=dict.fromkeys(layers, f"untraceable: {error}"))
    tied |= {module for module, count in trace.calls.items() if count > 1}
    heads = {name: _heads_unit(skeleton, name, attention, macs, tied) for name, attention in attentions.items()}
    cuttable = {unit: scopes[name] for name, unit in heads.items() if isinstance(unit, Unit)}
    heads |= _refused_heads(model, trace, cuttable)
    results = {layer: heads[name] for name, attention in attentions.items() for layer in attention.projections}
    for layer, name in names.items():
        if isinstance(layer, LAYERS) and name not in results:
            results[name] = _chain_unit(skeleton, layer, trace, macs, tied)
    results = _refuse_nested(results)
    ordered = {name: results[name] for name in names.values() if name in results}
    units = tuple({unit.producers[0]: unit for unit in ordered.values() if isinstance(unit, Unit)}.values())
    members = {name for unit in units for name in unit.members}
    refusals = {name: reason for name, reason in ordered.items() if isinstance(reason, str) and name not in members}
    # Units of one block would share its name: they are named by their producers, so that names are unique.
    times_named = Counter(unit.name for unit in units)
    units = tuple(
        unit if times_named[unit.name] == 1 else unit.model_copy(update={"name": unit.producers[0]}) for unit in units
    )
    return FoundUnits(units=units, refusals=refusals)


def _tied_modules(model: nn.Module) -> set[nn.Module]:
    """Return modules with two names, and owners of a parameter that another module owns too."""
    modules = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    return {
        module
        for module, count in modules.items()
        if count > 1 or any(owners[id(parameter)] > 1 for parameter in module.parameters(recurse=False))
    }


def _common_module(names: Iterable[str]) -> str:
    """Return the name of the innermost module that is or holds all of `names`, empty for the model itself."""
    levels = zip(*(name.split(".") for name in names), strict=False)
    return ".".join(level[0] for level in takewhile(lambda level: len(set(level)) == 1, levels))


def _parents(names: Iterable[str]) -> list[str]:
    return [name.rpartition(".")[0] for name in names]


def _refuse_nested(results: Mapping[str, Unit | str]) -> dict[str, Unit | str]:
    """Refuse units inside another unit, such as a squeeze-and-excitation's own width."""
    units = {unit.producers[0]: unit for unit in results.values() if isinstance(unit, Unit)}.values()
    nested_in = {name: unit.name for unit in units for name in (*unit.inner, *unit.side_readers)}
    checked = dict(results)
    for name, unit in results.items():
        if not isinstance(unit, Unit):
            continue
        if unit.consumer in nested_in:
            checked[name] = f"shared: its reader, {unit.consumer!r}, is cut with the unit {nested_in[unit.consumer]!r}"
        elif unit.producers[0] in nested_in:
            checked[name] = f"shared: it makes weights for the channels of the unit {nested_in[unit.producers[0]]!r}"
    return checked


def _heads_unit(
    model: nn.Module, holder: str, attention: Attention, macs: Mapping[str, int], tied: Collection[nn.Module]
) -> Unit | str:
    """Return the unit of one attention module's heads, or the reason for its refusal."""
    if any(model.get_submodule(member) in tied for member in attention.projections):
        return "tied: a projection of this attention, or its weights, are used in more than one place"
    if attention.refusal is not None:
        return attention.refusal
    width, size = attention.num_heads, attention.head_dim
    if reason := _too_narrow(width, step=1):
        return reason
    removed = [
        (name, sum(tensor[0].numel() for tensor in model.get_submodule(name).parameters()) * size * attention.stacks)
        for name in attention.producers
    ]
    removed.append((attention.consumer, model.get_parameter(f"{attention.consumer}.weight")[:, 0].numel() * size))
    owners = _parents(attention.tables)
    tables = zip(owners, attention.tables, strict=True)
    removed += [(owner, model.get_parameter(table).numel() // width) for owner, table in tables]
    return Unit(
        name=holder,
        kind=UnitKind.HEADS,
        producers=attention.producers,
        consumer=attention.consumer,
        width=width,
        step=1,
        params_per_channel=sum(params for _, params in removed),
        macs_per_channel=_removed_macs(model, removed, macs) + macs.get(holder, 0) // width,
        inner=tuple(name for name in owners if isinstance(model.get_submodule(name), LAYERS)),
        stacks=attention.stacks,
    )


def _refused_heads(model: nn.Module, trace: Trace, scopes: Mapping[Unit, str]) -> dict[str, str]:
    """Return, by unit name, why attention computes something else with a head cut than with that head masked.

    `scopes` has, for each unit of heads, the module that holds all of its attention. One head is cut in a copy with
    random weights, called as in the trace. Equal modules are tried once.
    """
    results: dict[str, str | None] = {}
    refusals: dict[str, str] = {}
    for unit, scope in scopes.items():
        if scope not in trace.arguments:
            refusals[unit.name] = "unused: the forward pass doesn't reach it"
            continue
        module = model.get_submodule(scope)
        alike = f"{module} {unit.width} {tree_map(_shape_and_dtype, trace.arguments[scope])}"
        if alike not in results:
            results[alike] = _try_cut(module, unit, scope, trace.arguments[scope])
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


def _chain_unit(
    model: nn.Module, layer: nn.Module, trace: Trace, macs: Mapping[str, int], tied: Collection[nn.Module]
) -> Unit | str:
    """Return the unit that `layer` is a producer of, or the reason for its refusal.

    The producers' channels reach one consumer through nothing but inner modules. Side readers read them too, but only
    to compute weights that multiply them; the layers that compute those weights are inner ones.
    """
    names = {module: name for name, module in model.named_modules()}
    if layer in tied:
        return "tied: the layer or its weights are used in more than one place"
    if layer not in trace.writes:
        if layer in trace.borrowed:
            return f"unsupported: {trace.borrowed[layer]} uses its weights in its place"
        return "unused: the forward pass doesn't reach it"
    space = trace.writes[layer].current()
    if reason := _refusal(layer, space, trace, names):
        return reason
    # Layers whose outputs, computed from the channels, multiply them, as a squeeze-and-excitation's last one.
    gates = {writer: makers for writer in space.writers if (makers := _gate_makers(writer, space, trace))}
    side_makers = {maker for makers in gates.values() for maker in makers}
    consumers = [reader for reader in space.readers if reader not in side_makers]
    if len(consumers) != 1:
        return f"shared: {len(consumers)} layers read its outputs"
    producers: list[Any] = [writer for writer in space.writers if writer not in gates]
    inner: list[Any] = [*space.inner, *gates]
    readers = [*consumers, *(reader for reader in space.readers if reader in side_makers)]
    for module in (*producers, *inner, *readers):
        if module in tied:
            return f"tied: its channels reach {names[module]!r}, which is used in more than one place"
    if not producers or any(isinstance(producer, nn.Conv2d) and producer.groups > 1 for producer in producers):
        return "grouped: a grouped convolution begins it"
    first, consumer, *side_readers = (names[module] for module in (producers[0], *readers))
    if not (block := _common_module(_parents((first, consumer)))):
        return f"unsupported: its reader, {consumer!r}, is in another block"
    size = len(producers[0].weight)
    is_depthwise = any(isinstance(module, nn.Conv2d) and module.groups == size for module in inner)
    kind = UnitKind.INVERTED_RESIDUAL if is_depthwise else UnitKind.CONV_INNER
    if isinstance(producers[0], nn.Linear):
        kind = UnitKind.MLP
    rows = size // space.stacks // space.width
    # Groups are cut whole, like heads.
    step = step_for(UnitKind.HEADS if rows > 1 else kind, space.width)
    if reason := _too_narrow(space.width, step):
        return reason
    removed = [
        (names[module], sum(parameter.numel() for parameter in module.parameters()) // space.width)
        for module in (*producers, *inner)
    ]
    removed += [(names[reader], reader.get_parameter("weight")[:, 0].numel() * rows) for reader in readers]
    return Unit(
        name=block if kind is UnitKind.MLP else first,
        kind=kind,
        producers=tuple(names[producer] for producer in producers),
        consumer=consumer,
        width=space.width,
        step=step,
        params_per_channel=sum(params for _, params in removed),
        macs_per_channel=_removed_macs(model, removed, macs),
        inner=tuple(names[module] for module in inner),
        side_readers=tuple(side_readers),
        mask_exact=space.mask_exact,
        stacks=space.stacks,
    )


def _removed_macs(model: nn.Module, removed: Sequence[tuple[str, int]], macs: Mapping[str, int]) -> int:
    """Return the MACs of so many params of each module: a layer's MACs are proportional to its params."""
    total = 0
    for name, params in removed:
        module = model.get_submodule(name)
        if isinstance(module, LAYERS) and (layer_macs := macs.get(name, 0)):
            total += layer_macs * params // sum(tensor.numel() for tensor in module.parameters())
    return total


def _too_narrow(width: int, step: int) -> str | None:
    if aligned_widths(width, step):
        return None
    return f"too_narrow: of its width, {width}, no smaller multiple of {step} keeps a sixteenth"


def _refusal(layer: nn.Module, space: Space, trace: Trace, names: Mapping[nn.Module, str]) -> str | None:
    if space.is_logits:
        return "classifier: its outputs are the logits"
    stems = [writer for writer in space.writers if (read := trace.reads.get(writer)) and read.current().is_image]
    if layer in stems:
        return "stem: it reads the image, and its outputs are where all others begin"
    if isinstance(layer, nn.Conv2d) and layer.groups > 1:
        return f"grouped: its channels are tied together in {layer.groups} groups"
    if space.is_added:
        others = [names[writer] for writer in space.writers if writer is not layer]
        more = f"those of {len(others)} more layers, as {min(others)!r}" if others else "other activations"
        return f"residual_writer: its outputs are added to {more}"
    if stems:
        return f"stem: its outputs go with those of {names[stems[0]]!r}, which reads the image"
    if space.obstacle:
        return f"unsupported: its outputs pass through {space.obstacle}"
    return None if space.readers else "unsupported: no layer reads its outputs"


def _gate_makers(gate: nn.Module, space: Space, trace: Trace) -> list[nn.Module]:
    """Return the readers of `space` that compute what `gate` reads, and run before it."""
    read = trace.reads.get(gate)
    order = {layer: position for position, layer in enumerate(trace.calls)}
    makers = read.current().writers if read is not None else []
    return [maker for maker in makers if maker in space.readers and order[maker] < order[gate]]
