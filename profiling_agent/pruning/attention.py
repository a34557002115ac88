"""Multi-head attention found by its structure: which rows, columns and tables belong to one head."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from torch import nn

# One layer may make all three, the rows of q above those of k and of v.
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("qkv",))
# The output layer is a child, or lies in a module beside the one that holds the projections.
OUTPUTS, OUTPUT_BESIDE = ("o_proj", "out_proj", "proj"), "output.dense"
HEAD_COUNTS, HEAD_DIMS = ("num_attention_heads", "num_heads"), ("head_dim", "attention_head_size")
# What forward passes read beside the layers: the width of all heads, and what those of k and v are counted by where they may be fewer.
WIDTHS, KEY_COUNT, KEY_WIDTH = ("all_head_size", "attn_dim"), "num_kv_heads", "kv_dim"
# Parameters with one entry for each head, and the dimension that it lies in.
HEAD_TABLES = {"relative_position_bias_table": -1, "logit_scale": 0}
# Norms of one head's q or k, the same for all.
HEAD_NORMS = ("q_norm", "k_norm")
# A network that makes such a table: one row of its last layer for each head.
TABLE_NETWORK = "continuous_position_bias_mlp"
# What these make is read by k and v, whatever the number of heads.
BEFORE_KEYS = ("sequence_reduction", "layer_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """An attention module whose heads are independent: (heads * head_dim) rows of q, k, v, as many columns of o.

    One layer that makes q, k and v has them in three `stacks`. Layers and tables go by their names in the model; a table's
    dimension is that of the heads.
    """

    producers: tuple[str, ...]
    consumer: str
    num_heads: int
    head_dim: int
    tables: dict[str, int]
    stacks: int = 1

    @property
    def projections(self) -> tuple[str, ...]:
        """Return the names of q, k, v and the output layer."""
        return (*self.producers, self.consumer)


@dataclass(frozen=True, slots=True, kw_only=True)
class Refused:
    """Attention whose heads can't be cut: its layers, and the reason, a sentence that starts with a code."""

    projections: tuple[str, ...]
    reason: str


def find_attention(model: nn.Module) -> dict[str, Attention | Refused]:
    """Return every attention module by the name of the module that holds its q, k and v."""
    holders = {
        name: children for name, module in model.named_modules() if (children := _projections(module)) is not None
    }
    return {name: _read(model, name, children, holders) for name, children in holders.items()}


def _projections(module: nn.Module) -> tuple[str, ...] | None:
    """Return the names of the module's own q, k and v, None where it isn't attention."""
    for names in PROJECTIONS:
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in names):
            return names
    return None


def _read(model: nn.Module, name: str, children: tuple[str, ...], holders: Collection[str]) -> Attention | Refused:
    holder = model.get_submodule(name)
    producers = tuple(f"{name}.{child}".lstrip(".") for child in children)
    consumer = _output(model, name)
    known = producers if consumer is None else (*producers, consumer)
    if consumer is None:
        return Refused(projections=known, reason="unknown_heads: no layer is found that reads what attention makes")
    *made, o = (cast("nn.Linear", model.get_submodule(layer)) for layer in known)
    # Three layers, or one for all three.
    stacks = 3 // len(made)
    rows = made[0].out_features // stacks
    heads = _heads(holder, rows)
    if isinstance(heads, str):
        return Refused(projections=known, reason=heads)
    if {layer.out_features for layer in made} != {rows * stacks} or o.in_features != rows:
        return Refused(projections=known, reason="unequal_heads: q, k, v and o don't have the same heads")
    tables = _tables(model, name, known, heads, holders)
    if isinstance(tables, str):
        return Refused(projections=known, reason=tables)
    num_heads, head_dim = heads
    return Attention(
        producers=producers, consumer=consumer, num_heads=num_heads, head_dim=head_dim, tables=tables, stacks=stacks
    )


def _output(model: nn.Module, holder: str) -> str | None:
    """Return the name of the layer that reads the heads: in the module that holds q, k and v, or beside it."""
    parent = holder.rpartition(".")[0]
    for name in (*(f"{holder}.{child}" for child in OUTPUTS), f"{parent}.{OUTPUT_BESIDE}"):
        path = name.lstrip(".")
        try:
            if isinstance(model.get_submodule(path), nn.Linear):
                return path
        except AttributeError:
            continue
    return None


def _heads(holder: nn.Module, rows: int) -> tuple[int, int] | str:
    """Return the number of heads and the rows of one, or why what the module says of them doesn't fit `rows`."""
    count, size = _stated(holder, HEAD_COUNTS), _stated(holder, HEAD_DIMS)
    if size is None and count is not None and rows % count == 0:
        size = rows // count
    if size is None or rows % size or count not in (None, rows // size):
        return f"unknown_heads: {count} heads of {size} are stated, which don't make the {rows} outputs of q"
    return rows // size, size


def _stated(holder: nn.Module, names: Collection[str]) -> int | None:
    values = (getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def head_sizes(model: nn.Module) -> dict[str, int]:
    """Return the rows of one head by the names of the modules that hold q, k and v, where what they say of them fits."""
    held = {name: module for name, module in model.named_modules() if _projections(module) is not None}
    heads = {name: _heads(module, _rows_of_q(module)) for name, module in held.items()}
    return {name: found[1] for name, found in heads.items() if not isinstance(found, str)}


def say_heads_(model: nn.Module, sizes: Mapping[str, int]) -> None:
    """Make modules state as many heads as their layers have, given the rows of one.

    Some forward passes read the number there; for the others it is for people, exports and other code.
    """
    for name, size in sizes.items():
        holder = model.get_submodule(name)
        rows = _rows_of_q(holder)
        told = dict.fromkeys((*HEAD_COUNTS, KEY_COUNT), rows // size) | dict.fromkeys((*WIDTHS, KEY_WIDTH), rows)
        for attribute, value in told.items():
            if hasattr(holder, attribute):
                setattr(holder, attribute, value)


def _rows_of_q(holder: nn.Module) -> int:
    """Return how many rows q has; what stands in a layer's place states its width as well."""
    layers = ((getattr(holder, names[0], None), 3 // len(names)) for names in PROJECTIONS)
    return next(layer.out_features // stacks for layer, stacks in layers if layer is not None)


def _tables(
    model: nn.Module, name: str, projections: Collection[str], heads: tuple[int, int], holders: Collection[str]
) -> dict[str, int] | str:
    """Return the parameters that have an entry for each head, or why it isn't known which part belongs to one."""
    tables: dict[str, int] = {}
    for path, is_shared in _candidates(model, name, holders):
        if path.rpartition(".")[0] in projections:
            continue
        dim = _head_dim(model, path, name)
        parameter = model.get_parameter(path)
        is_norm = path.removeprefix(f"{name}.").partition(".")[0] in HEAD_NORMS
        if dim is None or (is_norm and parameter.shape == heads[1:]):
            continue
        if dim == _UNKNOWN or parameter.shape[dim] != heads[0]:
            return f"unknown_parameter: it is not known which part of {path!r} belongs to a head"
        if is_shared:
            return f"shared: the table {path!r} has the heads of more than one attention module"
        tables[path] = dim
    return tables


_UNKNOWN = -99


def _candidates(model: nn.Module, name: str, holders: Collection[str]) -> Iterator[tuple[str, bool]]:
    """Yield the parameters in attention, and the tables that lie outside but above or beside no nearer attention."""
    for path, _ in model.named_parameters():
        if path.startswith(f"{name}.") or not name:
            yield path, False
        elif path.rpartition(".")[2] in HEAD_TABLES:
            scope = path.rpartition(".")[0]
            # Without a scope all are served; a dot keeps `layer.1` out of `layer.10`.
            while not (served := [one for one in holders if not scope or f"{one}.".startswith(f"{scope}.")]):
                scope = scope.rpartition(".")[0]
            if name in served:
                yield path, len(served) > 1


def _head_dim(model: nn.Module, path: str, holder: str) -> int | None:
    """Return the dimension of a parameter that has an entry for each head, None where heads don't matter to it."""
    if (leaf := path.rpartition(".")[2]) in HEAD_TABLES:
        return HEAD_TABLES[leaf]
    child, _, rest = path.removeprefix(f"{holder}.").partition(".")
    if child in BEFORE_KEYS:
        return None
    if child == TABLE_NETWORK:
        last = list(model.get_submodule(f"{holder}.{child}".lstrip(".")).named_children())[-1][0]
        return 0 if rest == f"{last}.weight" else None
    return _UNKNOWN
