"""Multi-head attention found by its structure: which rows, columns and tables belong to one head."""

from dataclasses import dataclass

from torch import Tensor, nn

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")
# Parameters with one column for each head.
HEAD_TABLES = ("relative_position_bias_table",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """An attention module whose heads are independent: (heads * head_dim) rows of q, k, v, as many columns of o."""

    projections: tuple[nn.Linear, nn.Linear, nn.Linear, nn.Linear]
    num_heads: int
    head_dim: int
    tables: dict[str, Tensor]


def find_attention(model: nn.Module) -> dict[str, Attention | str]:
    """Return every attention module by name, or the reason why its heads can't be cut."""
    found = {name: read_attention(module) for name, module in model.named_modules()}
    return {name: attention for name, attention in found.items() if attention is not None}


def read_attention(module: nn.Module) -> Attention | str | None:
    """Return `module` as attention, the reason why its heads can't be cut, or None where it isn't attention."""
    members = (getattr(module, name, None) for name in PROJECTIONS)
    layers = [layer for layer in members if isinstance(layer, nn.Linear)]
    if len(layers) < len(PROJECTIONS):
        return None
    q, k, v, o = layers
    head_dim = getattr(module, "head_dim", None)
    width = q.out_features
    if not isinstance(head_dim, int) or width % head_dim:
        return f"unknown_heads: head_dim is {head_dim!r}, which doesn't divide the {width} outputs of q_proj"
    if {k.out_features, v.out_features, o.in_features} != {width}:
        return "unequal_heads: q, k, v and o don't have the same heads"
    num_heads, tables = width // head_dim, {}
    for name, parameter in module.named_parameters():
        if name.split(".")[0] in PROJECTIONS:
            continue
        if name.split(".")[-1] not in HEAD_TABLES or parameter.shape[-1] != num_heads:
            return f"unknown_parameter: it is not known which part of {name!r} belongs to a head"
        tables[name] = parameter
    return Attention(projections=(q, k, v, o), num_heads=num_heads, head_dim=head_dim, tables=tables)
