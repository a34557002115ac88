"""Multi-head attention modules found by structure: the rows, columns and tables that belong to each head."""

from collections.abc import Collection, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import cast

from torch import nn

# One layer may compute all three; the rows of q then come before those of k and v.
PROJECTIONS = (("q_proj", "k_proj", "v_proj"), ("query", "key", "value"), ("q", "k", "v"), ("qkv",))
# The output layer is a child, or lies in a module next to the one that holds the projections.
OUTPUTS, SIBLING_OUTPUT = ("o_proj", "out_proj", "proj"), "output.dense"
HEAD_COUNTS, HEAD_DIMS = ("num_attention_heads", "num_heads"), ("head_dim", "attention_head_size")
# Attributes that forward passes read as well: the width of all heads, and the count and width of the heads of k and v.
WIDTHS, KEY_COUNT, KEY_WIDTH = ("all_head_size", "attn_dim"), "num_kv_heads", "kv_dim"
# Parameters with one entry per head, and the dimension that counts heads; a network whose last layer computes one.
HEAD_TABLES, TABLE_NETWORK = {"relative_position_bias_table": -1, "logit_scale": 0}, "continuous_position_bias_mlp"
# Norms of one head's q or k, shared by all heads; and modules before k and v, whatever the number of heads.
HEAD_NORMS, BEFORE_KEYS = ("q_norm", "k_norm"), ("sequence_reduction", "layer_norm")


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """An attention module with independent heads: (heads * head_dim) rows of q, k, v, as many columns of o; or why not.

    One layer that computes q, k and v together has three `stacks`. A table's value is the dimension that counts heads.
    `refusal` is a sentence that starts with a code.
    """

    producers: tuple[str, ...]
    consumer: str
    num_heads: int = 0
    head_dim: int = 0
    tables: Mapping[str, int] = field(default_factory=dict[str, int])
    stacks: int = 1
    refusal: str | None = None

    @property
    def projections(self) -> tuple[str, ...]:
        """Return the names of q, k, v and the output layer, if there is one."""
        return (*self.producers, self.consumer) if self.consumer else self.producers


class _UncuttableError(Exception):
    """Attention has a structure whose heads can't be cut."""


def find_attention(model: nn.Module) -> dict[str, Attention]:
    """Return every attention module, keyed by the name of the module that holds its q, k and v."""
    holders = _projections(model)
    found: dict[str, Attention] = {}
    for name, children in holders.items():
        producers, consumer = tuple(f"{name}.{child}".lstrip(".") for child in children), _output_layer(model, name)
        try:
            found[name] = _inspect(model, name, producers, consumer, holders)
        except _UncuttableError as error:
            found[name] = Attention(producers=producers, consumer=consumer, refusal=str(error))
    return found


def _inspect(
    model: nn.Module, name: str, producers: tuple[str, ...], consumer: str, holders: Collection[str]
) -> Attention:
    if not consumer:
        raise _UncuttableError("unknown_heads: no layer is found that reads what attention makes")
    *qkv, output_layer = (cast("nn.Linear", model.get_submodule(layer)) for layer in (*producers, consumer))
    stacks = 3 // len(qkv)
    rows = qkv[0].out_features // stacks
    num_heads, head_dim = _head_shape(model.get_submodule(name), rows)
    if {layer.out_features for layer in qkv} != {rows * stacks} or output_layer.in_features != rows:
        raise _UncuttableError("unequal_heads: q, k, v and o don't have the same heads")
    tables = _per_head_parameters(model, name, (*producers, consumer), (num_heads, head_dim), holders)
    return Attention(
        producers=producers, consumer=consumer, num_heads=num_heads, head_dim=head_dim, tables=tables, stacks=stacks
    )


def _projections(model: nn.Module) -> dict[str, tuple[str, ...]]:
    """Return the names of q, k and v in each module that holds them."""
    holders: dict[str, tuple[str, ...]] = {}
    for name, module in model.named_modules():
        for names in PROJECTIONS:
            if name not in holders and all(isinstance(getattr(module, child, None), nn.Linear) for child in names):
                holders[name] = names
    return holders


def _output_layer(model: nn.Module, holder: str) -> str:
    parent = holder.rpartition(".")[0]
    paths = (*(f"{holder}.{child}" for child in OUTPUTS), f"{parent}.{SIBLING_OUTPUT}")
    modules = dict(model.named_modules(remove_duplicate=False))
    return next((path for path in (p.lstrip(".") for p in paths) if isinstance(modules.get(path), nn.Linear)), "")


def _head_shape(holder: nn.Module, rows: int) -> tuple[int, int]:
    """Return (number of heads, rows per head) for the `rows` of q, from the module's attributes."""

    def first_positive_int(names: Collection[str]) -> int | None:
        values = (getattr(holder, name, None) for name in names)
        return next((value for value in values if isinstance(value, int) and value > 0), None)

    num_heads, head_dim = first_positive_int(HEAD_COUNTS), first_positive_int(HEAD_DIMS)
    if head_dim is None and num_heads is not None and rows % num_heads == 0:
        head_dim = rows // num_heads
    if head_dim is None or rows % head_dim or num_heads not in (None, rows // head_dim):
        raise _UncuttableError(
            f"unknown_heads: {num_heads} heads of {head_dim} are stated, which don't make the {rows} outputs of q"
        )
    return rows // head_dim, head_dim


def head_sizes(model: nn.Module) -> dict[str, int]:
    """Return the rows per head, keyed by the module that holds q, k and v, for each whose attributes fit its layers."""
    sizes: dict[str, int] = {}
    for name in _projections(model):
        with suppress(_UncuttableError):
            holder = model.get_submodule(name)
            sizes[name] = _head_shape(holder, _num_q_rows(holder))[1]
    return sizes


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


def _per_head_parameters(
    model: nn.Module, name: str, projections: Collection[str], head_shape: tuple[int, int], holders: Collection[str]
) -> dict[str, int]:
    """Return the parameters with an entry per head, and the dimension of each that counts heads."""
    tables: dict[str, int] = {}
    for path, parameter in model.named_parameters():
        owner, _, leaf = path.rpartition(".")
        is_inside = path.startswith(f"{name}.") or not name
        # A table outside belongs to the nearest attention. An empty scope serves all; the dot keeps `layer.1` out of
        # `layer.10`.
        scope, served = owner, list[str]()
        while not is_inside and leaf in HEAD_TABLES and not served:
            served = [holder for holder in holders if not scope or f"{holder}.".startswith(f"{scope}.")]
            scope = scope.rpartition(".")[0]
        if owner in projections or not (is_inside or name in served):
            continue
        dim = HEAD_TABLES.get(leaf)
        child, _, rest = path.removeprefix(f"{name}.").partition(".")
        is_norm = child in HEAD_NORMS and parameter.shape == head_shape[1:]
        if dim is None and child == TABLE_NETWORK:
            *_, (last, _layer) = model.get_submodule(f"{name}.{child}".lstrip(".")).named_children()
            dim = 0 if rest == f"{last}.weight" else None
        if is_norm or (dim is None and child in (*BEFORE_KEYS, TABLE_NETWORK)):
            continue
        if dim is None or parameter.shape[dim] != head_shape[0]:
            raise _UncuttableError(f"unknown_parameter: it is not known which part of {path!r} belongs to a head")
        if len(served) > 1:
            raise _UncuttableError(f"shared: the table {path!r} has the heads of more than one attention module")
        tables[path] = dim
    return tables
