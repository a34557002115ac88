"""Multi-head attention modules found by structure: the rows, columns and tables that belong to each head."""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import cast

from torch import nn

# One layer may compute all three; the rows of q then come before those of k and v.
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("qkv",))
# The output layer is a child, or lies in a module next to the one that holds the projections.
OUTPUTS, SIBLING_OUTPUT = ("o_proj", "out_proj", "proj"), "output.dense"
HEAD_COUNTS, HEAD_DIMS = ("num_attention_heads", "num_heads"), ("head_dim", "attention_head_size")
# Attributes that forward passes read as well: the width of all heads, and the count and width of the heads of k and v, which may be fewer.
WIDTHS, KEY_COUNT, KEY_WIDTH = ("all_head_size", "attn_dim"), "num_kv_heads", "kv_dim"
# Parameters with one entry per head, and the dimension that counts heads.
HEAD_TABLES = {"relative_position_bias_table": -1, "logit_scale": 0}
# Norms of one head's q or k, shared by all heads.
HEAD_NORMS = ("q_norm", "k_norm")
# A network that computes such a table: its last layer has one row per head.
TABLE_NETWORK = "continuous_position_bias_mlp"
# The outputs of these are read by k and v, whatever the number of heads.
BEFORE_KEYS = ("sequence_reduction", "layer_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """An attention module whose heads are independent: (heads * head_dim) rows of q, k, v, as many columns of o.

    One layer that computes q, k and v together has three `stacks`. Layers and tables are named as in the model; a table's value
    is the dimension that counts heads.
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


@dataclass(frozen=True, slots=True)
class UnsupportedAttention:
    """Attention whose heads can't be cut: its layers, and the reason, a sentence that starts with a code."""

    projections: tuple[str, ...]
    reason: str


def find_attention(model: nn.Module) -> dict[str, Attention | UnsupportedAttention]:
    """Return every attention module, keyed by the name of the module that holds its q, k and v."""
    holders = {
        name: children for name, module in model.named_modules() if (children := _projection_names(module)) is not None
    }
    return {name: _inspect(model, name, children, holders) for name, children in holders.items()}


def _projection_names(module: nn.Module) -> tuple[str, ...] | None:
    for names in PROJECTIONS:
        if all(isinstance(getattr(module, name, None), nn.Linear) for name in names):
            return names
    return None


def _inspect(
    model: nn.Module, name: str, children: tuple[str, ...], holders: Collection[str]
) -> Attention | UnsupportedAttention:
    holder = model.get_submodule(name)
    producers = tuple(f"{name}.{child}".lstrip(".") for child in children)
    consumer = _find_output_layer(model, name)
    layers = producers if consumer is None else (*producers, consumer)
    if consumer is None:
        return UnsupportedAttention(layers, "unknown_heads: no layer is found that reads what attention makes")
    *qkv, output_layer = (cast("nn.Linear", model.get_submodule(layer)) for layer in layers)
    stacks = 3 // len(qkv)
    rows = qkv[0].out_features // stacks
    head_shape = _head_shape(holder, rows)
    if isinstance(head_shape, str):
        return UnsupportedAttention(layers, head_shape)
    if {layer.out_features for layer in qkv} != {rows * stacks} or output_layer.in_features != rows:
        return UnsupportedAttention(layers, "unequal_heads: q, k, v and o don't have the same heads")
    tables = _find_tables(model, name, layers, head_shape, holders)
    if isinstance(tables, str):
        return UnsupportedAttention(layers, tables)
    num_heads, head_dim = head_shape
    return Attention(
        producers=producers, consumer=consumer, num_heads=num_heads, head_dim=head_dim, tables=tables, stacks=stacks
    )


def _find_output_layer(model: nn.Module, holder: str) -> str | None:
    parent = holder.rpartition(".")[0]
    for name in (*(f"{holder}.{child}" for child in OUTPUTS), f"{parent}.{SIBLING_OUTPUT}"):
        path = name.lstrip(".")
        try:
            if isinstance(model.get_submodule(path), nn.Linear):
                return path
        except AttributeError:
            continue
    return None


def _head_shape(holder: nn.Module, rows: int) -> tuple[int, int] | str:
    """Return (number of heads, rows per head), or why the module's attributes don't fit `rows`."""
    num_heads, head_dim = _first_positive_int(holder, HEAD_COUNTS), _first_positive_int(holder, HEAD_DIMS)
    if head_dim is None and num_heads is not None and rows % num_heads == 0:
        head_dim = rows // num_heads
    if head_dim is None or rows % head_dim or num_heads not in (None, rows // head_dim):
        return f"unknown_heads: {num_heads} heads of {head_dim} are stated, which don't make the {rows} outputs of q"
    return rows // head_dim, head_dim


def _first_positive_int(holder: nn.Module, names: Collection[str]) -> int | None:
    values = (getattr(holder, name, None) for name in names)
    return next((value for value in values if isinstance(value, int) and value > 0), None)


def head_sizes(model: nn.Module) -> dict[str, int]:
    """Return the rows per head, keyed by the module that holds q, k and v, for each whose attributes fit its layers."""
    holders = {name: module for name, module in model.named_modules() if _projection_names(module) is not None}
    shapes = {name: _head_shape(module, _num_q_rows(module)) for name, module in holders.items()}
    return {name: shape[1] for name, shape in shapes.items() if not isinstance(shape, str)}


def set_head_attributes_(model: nn.Module, sizes: Mapping[str, int]) -> None:
    """Set the attributes that state the number of heads to what the layers have, given the rows per head.

    Some forward passes read them; other readers are people, exports and third-party code.
    """
    for name, size in sizes.items():
        holder = model.get_submodule(name)
        rows = _num_q_rows(holder)
        attributes = dict.fromkeys((*HEAD_COUNTS, KEY_COUNT), rows // size) | dict.fromkeys((*WIDTHS, KEY_WIDTH), rows)
        for attribute, value in attributes.items():
            if hasattr(holder, attribute):
                setattr(holder, attribute, value)


def _num_q_rows(holder: nn.Module) -> int:
    layers = ((getattr(holder, names[0], None), 3 // len(names)) for names in PROJECTIONS)
    return next(layer.out_features // stacks for layer, stacks in layers if layer is not None)


def _find_tables(
    model: nn.Module, name: str, projections: Collection[str], head_shape: tuple[int, int], holders: Collection[str]
) -> dict[str, int] | str:
    """Return the parameters with an entry per head, or why it is unknown which part belongs to which head."""
    tables: dict[str, int] = {}
    for path, is_shared in _possible_tables(model, name, holders):
        owner, _, leaf = path.rpartition(".")
        if owner in projections:
            continue
        parameter, dim = model.get_parameter(path), HEAD_TABLES.get(leaf)
        child, _, rest = path.removeprefix(f"{name}.").partition(".")
        is_norm = child in HEAD_NORMS and parameter.shape == head_shape[1:]
        if dim is None and child == TABLE_NETWORK:
            *_, (last, _layer) = model.get_submodule(f"{name}.{child}".lstrip(".")).named_children()
            dim = 0 if rest == f"{last}.weight" else None
        if is_norm or (dim is None and child in (*BEFORE_KEYS, TABLE_NETWORK)):
            continue
        if dim is None or parameter.shape[dim] != head_shape[0]:
            return f"unknown_parameter: it is not known which part of {path!r} belongs to a head"
        if is_shared:
            return f"shared: the table {path!r} has the heads of more than one attention module"
        tables[path] = dim
    return tables


def _possible_tables(model: nn.Module, name: str, holders: Collection[str]) -> Iterator[tuple[str, bool]]:
    """Yield each parameter inside the attention, and each table outside whose nearest attention this is, with whether it is shared."""
    for path, _ in model.named_parameters():
        if path.startswith(f"{name}.") or not name:
            yield path, False
        elif path.rpartition(".")[2] in HEAD_TABLES:
            scope = path.rpartition(".")[0]
            # An empty scope serves all holders; the dot keeps `layer.1` out of `layer.10`.
            while not (served := [holder for holder in holders if not scope or f"{holder}.".startswith(f"{scope}.")]):
                scope = scope.rpartition(".")[0]
            if name in served:
                yield path, len(served) > 1
