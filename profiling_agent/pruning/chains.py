"""Chains from one layer to its reader: the layers that lose a channel together, and the reasons why others can't."""

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from profiling_agent.pruning.following import Trace
from profiling_agent.pruning.spaces import Space


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
    gates = _gates(space, trace)
    side = {maker for gate in gates for maker in _makers(gate, space, trace)}
    consumers = [reader for reader in space.readers if reader not in side]
    if len(consumers) != 1:
        return f"shared: {len(consumers)} layers read its outputs"
    chain = _chain(space, gates, consumers[0], side)
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


def _gates(space: Space, trace: Trace) -> list[nn.Module]:
    """Return the writers that compute from the channels what multiplies them, as a squeeze-and-excitation's last layer."""
    return [writer for writer in space.writers if _makers(writer, space, trace)]


def _makers(gate: nn.Module, space: Space, trace: Trace) -> list[nn.Module]:
    """Return the readers of `space` that make what `gate` reads; a residual is also made by layers that run later."""
    read = trace.reads.get(gate)
    order = {layer: position for position, layer in enumerate(trace.calls)}
    makers = read.current().writers if read is not None else []
    return [maker for maker in makers if maker in space.readers and order[maker] < order[gate]]


def _chain(space: Space, gates: Collection[nn.Module], consumer: Any, side: Collection[Any]) -> Chain:
    producers: list[Any] = [writer for writer in space.writers if writer not in gates]
    readers: list[Any] = [reader for reader in space.readers if reader in side]
    return Chain(
        producers=tuple(producers),
        consumer=consumer,
        inner=(*space.inner, *gates),
        side_readers=tuple(readers),
        width=space.width,
        mask_exact=space.mask_exact,
        stacks=space.stacks,
    )


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
