"""What of a model can be cut: units found by structure and traced dependencies, never by the model's class."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from torch import Tensor, nn

from profiling_agent.pruning.attention import PROJECTIONS, Attention, find_attention
from profiling_agent.pruning.chains import LAYERS, Chain, block_of, follow
from profiling_agent.pruning.tracing import dependency_graph, without_weights
from profiling_agent.pruning.widths import aligned_widths, step_for
from profiling_agent.records import InputSpec, Record, Unit, UnitKind
from profiling_agent.shapes.verify import REFUSALS


class FoundUnits(Record):
    """The units in network order, and for every other linear or convolution layer why it is in none.

    A reason is a sentence that starts with a code: "residual_writer: ...".
    """

    units: tuple[Unit, ...]
    refusals: dict[str, str]


@dataclass(frozen=True, slots=True)
class _Ledger:
    """Shares of what the profile counted: a module's MACs are proportional to its weights and biases."""

    names: Mapping[nn.Module, str]
    macs: Mapping[str, int]

    def share(self, module: nn.Module, params: int) -> int:
        """Return the MACs of `params` of the module's own parameters."""
        counted = self.macs.get(self.names[module], 0)
        return counted * params // sum(tensor.numel() for tensor in module.parameters()) if counted else 0


def find_units(model: nn.Module, spec: InputSpec, macs: Mapping[str, int]) -> FoundUnits:
    """Return the MLPs, attention heads and block-inner convolutions of `model` that can be cut without changing others.

    `macs` are those of one image by module name, each bias addition counted as one, attention's two products under the
    attention module's name; a module that is missing has none. The model is neither run nor changed: what is traced
    is a copy without weights, on the meta device.
    """
    skeleton = without_weights(model)
    names = {module: name for name, module in skeleton.named_modules()}
    ledger = _Ledger(names, macs)
    found: dict[str, Unit | str] = {}
    for holder, attention in find_attention(skeleton).items():
        found |= _heads(holder, attention, ledger)
    chained = [layer for layer in names if isinstance(layer, LAYERS) and names[layer] not in found]
    try:
        with dependency_graph(skeleton, spec) as graph:
            for layer in chained:
                found[names[layer]] = _chain(layer, follow(graph, layer, names), ledger, spec)
    except REFUSALS as error:
        reason = f"untraceable: {' '.join(str(error).split())[:120]}"
        found |= dict.fromkeys((names[layer] for layer in chained), reason)
    return _sorted(found, names.values())


def _sorted(found: Mapping[str, Unit | str], names: Iterable[str]) -> FoundUnits:
    """Bring units into network order; the reason of a layer that is in a unit after all is dropped."""
    ordered = [(name, found[name]) for name in names if name in found]
    units = {unit.producers[0]: unit for _, unit in ordered if isinstance(unit, Unit)}
    members = {name for unit in units.values() for name in (*unit.producers, unit.consumer)}
    return FoundUnits(
        units=tuple(_named(unit, tuple(units.values())) for unit in units.values()),
        refusals={name: reason for name, reason in ordered if isinstance(reason, str) and name not in members},
    )


def _named(unit: Unit, units: tuple[Unit, ...]) -> Unit:
    """Name a unit of two layers that shares its holder with another unit by its producer, so that names are unique."""
    is_unique = sum(other.name == unit.name for other in units) == 1
    return unit if is_unique else unit.model_copy(update={"name": unit.producers[0]})


def _heads(holder: str, attention: Attention | str, ledger: _Ledger) -> dict[str, Unit | str]:
    """Return the heads of one attention module under the name of each projection, or the reason they stay."""
    members = tuple(f"{holder}.{name}".lstrip(".") for name in PROJECTIONS)
    if isinstance(attention, str):
        return dict.fromkeys(members, attention)
    kind, width = UnitKind.HEADS, attention.num_heads
    if reason := _too_narrow(kind, width):
        return dict.fromkeys(members, reason)
    *producers, consumer = attention.projections
    rows = [(layer, _rows(layer.weight, layer.bias) * attention.head_dim) for layer in producers]
    cut = [*rows, (consumer, consumer.weight[:, 0].numel() * attention.head_dim)]
    tables = sum(table[..., 0].numel() for table in attention.tables.values())
    unit = Unit(
        name=holder,
        kind=kind,
        producers=members[:-1],
        consumer=members[-1],
        width=width,
        step=step_for(kind, width),
        params_per_channel=sum(params for _, params in cut) + tables,
        macs_per_channel=sum(ledger.share(*part) for part in cut) + ledger.macs.get(holder, 0) // width,
    )
    return dict.fromkeys(members, unit)


def _chain(layer: nn.Linear | nn.Conv2d, chain: Chain | str, ledger: _Ledger, spec: InputSpec) -> Unit | str:
    """Return the unit that `layer` begins, or why it begins none."""
    if isinstance(chain, str):
        is_stem = isinstance(layer, nn.Conv2d) and layer.in_channels == spec.channels
        return chain.replace("residual_writer", "stem", 1) if is_stem else chain
    kind = UnitKind.MLP if isinstance(layer, nn.Linear) else UnitKind.CONV_INNER
    width = len(layer.weight)
    if reason := _too_narrow(kind, width):
        return reason
    cut = [(layer, _rows(layer.weight, layer.bias)), (chain.consumer, chain.consumer.weight[:, 0].numel())]
    cut += [(norm, _rows(*norm.parameters(recurse=False))) for norm in chain.norms]
    producer, consumer = ledger.names[layer], ledger.names[chain.consumer]
    return Unit(
        name=block_of(producer, consumer) if kind is UnitKind.MLP else producer,
        kind=kind,
        producers=(producer,),
        consumer=consumer,
        width=width,
        step=step_for(kind, width),
        params_per_channel=sum(params for _, params in cut),
        macs_per_channel=sum(ledger.share(*part) for part in cut),
    )


def _rows(*tensors: Tensor | None) -> int:
    """Return the parameters of one channel: a row of each tensor that there is."""
    return sum(tensor[0].numel() for tensor in tensors if tensor is not None)


def _too_narrow(kind: UnitKind, width: int) -> str | None:
    step = step_for(kind, width)
    if aligned_widths(width, step):
        return None
    return f"too_narrow: of its width, {width}, no smaller multiple of {step} keeps a quarter"
