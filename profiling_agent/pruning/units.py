"""Structured pruning units from traced channel axes, found by structure and never by the model's class."""

from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from profiling_agent.modules.inference import without_weights
from profiling_agent.pruning.attention import Attention, Refused, find_attention
from profiling_agent.pruning.tracing import LAYERS, Space, Trace, UntraceableError, follow_channels
from profiling_agent.pruning.verify import Trials
from profiling_agent.pruning.widths import aligned_widths, step_for
from profiling_agent.schemas import InputSpec, Record, Unit, UnitKind

HEADS, MLPS, CONVOLUTIONS = "heads", "MLPs", "convolutions"
KINDS: Mapping[UnitKind, str] = {
    UnitKind.HEADS: HEADS,
    UnitKind.MLP: MLPS,
    UnitKind.CONV_INNER: CONVOLUTIONS,
    UnitKind.INVERTED_RESIDUAL: CONVOLUTIONS,
}
# A model begins and ends somewhere: what has no other layers of a kind misses none.
ENDS = ("stem", "classifier")


def absences(
    model: nn.Module, projections: Collection[str], units: Collection[Unit], refusals: Mapping[str, str]
) -> dict[str, str]:
    """Return, for each kind that a model has layers and no unit of, the commonest reason and a layer that stays for it.

    `projections` are the layers of attention, whose refusal is the heads'. A reason starts with its code: "shared: ...".
    """
    by_kind: dict[str, dict[str, str]] = {HEADS: {}, MLPS: {}, CONVOLUTIONS: {}}
    for name, reason in refusals.items():
        is_linear = isinstance(model.get_submodule(name), nn.Linear)
        by_kind[HEADS if name in projections else MLPS if is_linear else CONVOLUTIONS][name] = reason
    there = {KINDS[unit.kind] for unit in units}
    return {
        kind: _commonest(reasons)
        for kind, reasons in by_kind.items()
        if kind not in there and not all(reason.startswith(ENDS) for reason in reasons.values())
    }


def _commonest(reasons: Mapping[str, str]) -> str:
    code, count = Counter(reason.partition(":")[0] for reason in reasons.values()).most_common(1)[0]
    name, reason = next((name, reason) for name, reason in reasons.items() if reason.startswith(f"{code}:"))
    return f"{reason} (so {count} of {len(reasons)} layers, as {name!r})"


@dataclass(frozen=True, slots=True, kw_only=True)
class Chain:
    """Producers whose channels, `width` that can be cut one by one, reach `consumer` through nothing but `inner`.

    A channel has rows in each of the producers' equal `stacks`.
    `side_readers` read them too, but only to make weights that multiply them; what makes those is in `inner`.
    """

    producers: tuple[nn.Linear | nn.Conv2d, ...]
    consumer: nn.Linear | nn.Conv2d
    inner: tuple[nn.Module, ...]
    side_readers: tuple[nn.Linear | nn.Conv2d, ...]
    width: int
    mask_exact: bool
    stacks: int


def tied_modules(model: nn.Module) -> set[nn.Module]:
    """Return the modules that have two names, and those that own a parameter which another owns too."""
    modules = Counter(module for _, module in model.named_modules(remove_duplicate=False))
    owners = Counter(id(p) for module in model.modules() for p in module.parameters(recurse=False))
    shared = {id_ for id_, count in owners.items() if count > 1}
    return {m for m, count in modules.items() if count > 1 or any(id(p) in shared for p in m.parameters(recurse=False))}


def chain_of(
    layer: nn.Linear | nn.Conv2d, trace: Trace, names: Mapping[nn.Module, str], tied: Collection[nn.Module]
) -> Chain | str:
    """Return the chain that `layer` is a producer of, or why it is of none: a sentence that starts with a code."""
    if layer in tied:
        return "tied: the layer or its weights are used in more than one place"
    if layer not in trace.writes:
        if layer in trace.borrowed:
            return f"unsupported: {trace.borrowed[layer]} uses its weights in its place"
        return "unused: the forward pass doesn't reach it"
    space = trace.writes[layer].current()
    if reason := _refusal(layer, space, trace, names):
        return reason
    # What computes from the channels what multiplies them, as a squeeze-and-excitation's last layer.
    gates = [writer for writer in space.writers if _makers(writer, space, trace)]
    side = {maker for gate in gates for maker in _makers(gate, space, trace)}
    consumers: list[Any] = [reader for reader in space.readers if reader not in side]
    if len(consumers) != 1:
        return f"shared: {len(consumers)} layers read its outputs"
    producers: list[Any] = [writer for writer in space.writers if writer not in gates]
    readers: list[Any] = [reader for reader in space.readers if reader in side]
    chain = Chain(
        producers=tuple(producers),
        consumer=consumers[0],
        inner=(*space.inner, *gates),
        side_readers=tuple(readers),
        width=space.width,
        mask_exact=space.mask_exact,
        stacks=space.stacks,
    )
    return _outside(chain, names, tied) or chain


def _refusal(layer: nn.Linear | nn.Conv2d, space: Space, trace: Trace, names: Mapping[nn.Module, str]) -> str | None:
    if space.is_logits:
        return "classifier: its outputs are the logits"
    stems = [writer for writer in space.writers if (read := trace.reads.get(writer)) and read.current().is_image]
    if layer in stems:
        return "stem: it reads the image, and its outputs are where all others begin"
    if isinstance(layer, nn.Conv2d) and layer.groups > 1:
        return f"grouped: its channels are tied together in {layer.groups} groups"
    return _coupling(layer, space, stems, names)


def _coupling(layer: nn.Module, space: Space, stems: Sequence[nn.Module], names: Mapping[nn.Module, str]) -> str | None:
    """Return what the layer's channels are coupled with that can't be cut."""
    if space.is_added:
        others = [names[writer] for writer in space.writers if writer is not layer]
        more = f"those of {len(others)} more layers, as {min(others)!r}" if others else "other activations"
        return f"residual_writer: its outputs are added to {more}"
    if stems:
        return f"stem: its outputs go with those of {names[stems[0]]!r}, which reads the image"
    if space.obstacle:
        return f"unsupported: its outputs pass through {space.obstacle}"
    return None if space.readers else "unsupported: no layer reads its outputs"


def _makers(gate: nn.Module, space: Space, trace: Trace) -> list[nn.Module]:
    """Return the readers of `space` that make what `gate` reads; a residual is also made by layers that run later."""
    read = trace.reads.get(gate)
    order = {layer: position for position, layer in enumerate(trace.calls)}
    makers = read.current().writers if read is not None else []
    return [maker for maker in makers if maker in space.readers and order[maker] < order[gate]]


def _outside(chain: Chain, names: Mapping[nn.Module, str], tied: Collection[nn.Module]) -> str | None:
    """Return why a chain reaches too far: into the stem, into another block, or into a layer that is used twice."""
    for member in (*chain.producers, *chain.inner, chain.consumer, *chain.side_readers):
        if member in tied:
            return f"tied: its channels reach {names[member]!r}, which is used in more than one place"
    if not chain.producers or any(isinstance(p, nn.Conv2d) and p.groups > 1 for p in chain.producers):
        return "grouped: a grouped convolution begins it"
    if not block_of(names[chain.producers[0]], names[chain.consumer]):
        return f"unsupported: its reader, {names[chain.consumer]!r}, is in another block"
    return None


def block_of(first: str, second: str) -> str:
    """Return the name of the innermost module that holds both, empty where that is the model itself."""
    shared: list[str] = []
    for one, other in zip(first.split(".")[:-1], second.split(".")[:-1], strict=False):
        if one != other:
            break
        shared.append(one)
    return ".".join(shared)


class FoundUnits(Record):
    """The units in network order, and for every other linear or convolution layer why it is in none.

    A reason is a sentence that starts with a code: "residual_writer: ...". `absent` has one for each kind without a unit.
    """

    units: tuple[Unit, ...]
    refusals: dict[str, str]
    absent: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Ledger:
    """Shares of what the profile counted: a layer's MACs are proportional to its weights and biases."""

    names: Mapping[nn.Module, str]
    macs: Mapping[str, int]

    def share(self, module: nn.Module, params: int) -> int:
        """Return the MACs of `params` of a layer's own parameters; attention's aren't those of the tables it owns."""
        counted = self.macs.get(self.names[module], 0) if isinstance(module, LAYERS) else 0
        return counted * params // sum(tensor.numel() for tensor in module.parameters()) if counted else 0

    def cost(self, cut: Sequence[tuple[nn.Module, int]]) -> tuple[int, int]:
        """Return the params and MACs of a unit's channel, given its parameters in each module."""
        return sum(params for _, params in cut), sum(self.share(*part) for part in cut)


def find_units(model: nn.Module, spec: InputSpec, macs: Mapping[str, int]) -> FoundUnits:
    """Return the MLPs, attention heads and block-inner convolutions of `model` that can be cut without changing others.

    `macs` are those of one image by module name, each bias addition counted as one, attention's two products under the
    attention module's name; a module that is missing has none. The model is neither run nor changed: what is traced
    is a copy without weights, on the meta device, and what is tried copies of its attention.
    """
    skeleton = without_weights(model)
    names = {module: name for name, module in skeleton.named_modules()}
    try:
        trace = follow_channels(skeleton, spec)
    except UntraceableError as error:
        trace = f"untraceable: {error}"
    ledger, tied = _Ledger(names, macs), tied_modules(skeleton)
    if isinstance(trace, Trace):
        tied |= trace.repeated
    found: dict[str, Unit | str] = {}
    trials = Trials(model, skeleton, spec)
    attentions = find_attention(skeleton)
    for holder, attention in attentions.items():
        heads = _heads(skeleton, holder, attention, ledger, tied)
        if isinstance(heads, Unit) and isinstance(attention, Attention):
            heads = (
                trials.refusal(
                    heads,
                    (
                        holder,
                        attention.consumer.rpartition(".")[0],
                        *(name.rpartition(".")[0] for name in attention.tables),
                    ),
                )
                or heads
            )
        found |= dict.fromkeys(attention.projections, heads)
    for layer in names:
        if isinstance(layer, LAYERS) and names[layer] not in found:
            chain = trace if isinstance(trace, str) else chain_of(layer, trace, names, tied)
            found[names[layer]] = chain if isinstance(chain, str) else _chain_unit(chain, ledger)
    units, refusals = _sorted(_apart(found), names.values())
    projections = {name for attention in attentions.values() for name in attention.projections}
    return FoundUnits(units=units, refusals=refusals, absent=absences(skeleton, projections, units, refusals))


def _apart(found: Mapping[str, Unit | str]) -> dict[str, Unit | str]:
    """Refuse what lies inside another unit: a squeeze-and-excitation's own width, a network that makes a head's table."""
    units = {unit.producers[0]: unit for unit in found.values() if isinstance(unit, Unit)}.values()
    inside = {name: unit.name for unit in units for name in (*unit.inner, *unit.side_readers)}
    apart = dict(found)
    for name, unit in found.items():
        if not isinstance(unit, Unit):
            continue
        if unit.consumer in inside:
            apart[name] = f"shared: its reader, {unit.consumer!r}, is cut with the unit {inside[unit.consumer]!r}"
        elif unit.producers[0] in inside:
            apart[name] = f"shared: it makes weights for the channels of the unit {inside[unit.producers[0]]!r}"
    return apart


def _sorted(found: Mapping[str, Unit | str], names: Iterable[str]) -> tuple[tuple[Unit, ...], dict[str, str]]:
    """Bring units into network order; the reason of a layer that is in a unit after all is dropped."""
    ordered = [(name, found[name]) for name in names if name in found]
    units = {unit.producers[0]: unit for _, unit in ordered if isinstance(unit, Unit)}
    members = {name for unit in units.values() for name in unit.members}
    times_named = Counter(unit.name for unit in units.values())
    return (
        # A unit of two layers that shares its holder with another is named by its producer, so that names are unique.
        tuple(
            unit if times_named[unit.name] == 1 else unit.model_copy(update={"name": unit.producers[0]})
            for unit in units.values()
        ),
        {name: reason for name, reason in ordered if isinstance(reason, str) and name not in members},
    )


def _heads(
    model: nn.Module, holder: str, attention: Attention | Refused, ledger: _Ledger, tied: Collection[nn.Module]
) -> Unit | str:
    """Return the heads of one attention module, or the reason they stay."""
    if any(model.get_submodule(member) in tied for member in attention.projections):
        return "tied: a projection of this attention, or its weights, are used in more than one place"
    if isinstance(attention, Refused):
        return attention.reason
    kind, width = UnitKind.HEADS, attention.num_heads
    step = step_for(kind, width)
    if reason := _too_narrow(width, step):
        return reason
    cut: list[tuple[nn.Module, int]] = []
    for name in attention.producers:
        layer = model.get_submodule(name)
        cut.append(
            (layer, sum(tensor[0].numel() for tensor in layer.parameters()) * attention.head_dim * attention.stacks)
        )
    consumer = model.get_submodule(attention.consumer)
    cut.append((consumer, _columns(consumer) * attention.head_dim))
    owners = {name: name.rpartition(".")[0] for name in attention.tables}
    cut += [(model.get_submodule(owners[name]), model.get_parameter(name).numel() // width) for name in owners]
    params, macs = ledger.cost(cut)
    return Unit(
        name=holder,
        kind=kind,
        producers=attention.producers,
        consumer=attention.consumer,
        width=width,
        step=step,
        params_per_channel=params,
        macs_per_channel=macs + ledger.macs.get(holder, 0) // width,
        inner=tuple(name for name in owners.values() if isinstance(model.get_submodule(name), LAYERS)),
        stacks=attention.stacks,
    )


def _chain_unit(chain: Chain, ledger: _Ledger) -> Unit | str:
    """Return the unit of one chain of layers, or the reason it stays."""
    kind, size = _kind(chain), len(chain.producers[0].weight) // chain.stacks
    # Groups are cut as wholes, like heads.
    step = step_for(UnitKind.HEADS if chain.width < size else kind, chain.width)
    if reason := _too_narrow(chain.width, step):
        return reason
    rows = size // chain.width
    cut: list[tuple[nn.Module, int]] = [
        (module, sum(parameter.numel() for parameter in module.parameters()) // chain.width)
        for module in (*chain.producers, *chain.inner)
    ]
    cut += [(reader, _columns(reader) * rows) for reader in (chain.consumer, *chain.side_readers)]
    params, macs = ledger.cost(cut)
    names = ledger.names
    first, consumer = names[chain.producers[0]], names[chain.consumer]
    return Unit(
        name=block_of(first, consumer) if kind is UnitKind.MLP else first,
        kind=kind,
        producers=tuple(names[producer] for producer in chain.producers),
        consumer=consumer,
        width=chain.width,
        step=step,
        params_per_channel=params,
        macs_per_channel=macs,
        inner=tuple(names[module] for module in chain.inner),
        side_readers=tuple(names[reader] for reader in chain.side_readers),
        mask_exact=chain.mask_exact,
        stacks=chain.stacks,
    )


def _kind(chain: Chain) -> UnitKind:
    if isinstance(chain.producers[0], nn.Linear):
        return UnitKind.MLP
    size = len(chain.producers[0].weight)
    is_depthwise = any(isinstance(module, nn.Conv2d) and module.groups == size for module in chain.inner)
    return UnitKind.INVERTED_RESIDUAL if is_depthwise else UnitKind.CONV_INNER


def _columns(reader: nn.Module) -> int:
    return reader.get_parameter("weight")[:, 0].numel()


def _too_narrow(width: int, step: int) -> str | None:
    if aligned_widths(width, step):
        return None
    return f"too_narrow: of its width, {width}, no smaller multiple of {step} keeps a quarter"
