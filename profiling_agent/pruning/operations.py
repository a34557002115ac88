"""Rules for torch's operations: each keeps a channel axis, moves it, couples it with another, or loses it."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from profiling_agent.modules.hooks import tensors
from profiling_agent.pruning.spaces import Axis, merge

ADDITIONS = frozenset({"add", "iadd", "radd", "sub", "isub", "rsub", "cat", "concat"})
ELEMENTWISE = ADDITIONS - {"cat", "concat"} | {
    *("mul", "imul", "rmul", "multiply", "div", "truediv", "itruediv", "rtruediv", "neg", "pow", "abs", "exp", "sqrt"),
    *("relu", "relu6", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu"),
    *("mish", "softplus", "clamp", "dropout", "contiguous", "to", "float", "type", "type_as", "clone", "detach"),
    *("expand", "expand_as", "broadcast_to"),
}
# These mix channels, but leave them where they are: what is added to them later still says that they are a residual.
NORMS = ("layer_norm", "group_norm", "normalize", "instance_norm")
VIEWS = ("view", "reshape", "flatten", "squeeze", "unsqueeze", "view_as", "reshape_as")


@dataclass(frozen=True, slots=True)
class Call:
    """One operation: its name, what it was given, and the tensors that it returned."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: Sequence[Tensor]
    axes: Callable[[Tensor], Axis | None]

    @property
    def result(self) -> Tensor:
        """Return the tensor that it returned, the first of several."""
        return self.results[0]

    @property
    def operands(self) -> list[Tensor]:
        """Return the tensors among the arguments, those in lists too."""
        return list(tensors((*self.args, *self.kwargs.values())))

    def given(self, name: str, position: int, default: Any = None) -> Any:
        """Return an argument by name or position."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if len(self.args) > position else default

    def integer(self, name: str, position: int, default: Any = None) -> int:
        """Return an argument that has to be a whole number."""
        value = self.given(name, position, default)
        if not isinstance(value, int):
            raise UnknownSpellingError(f"{self.name} with {name} = {value!r}")
        return value

    def integers(self, name: str, position: int, default: Any = None) -> Sequence[int]:
        """Return an argument that is a whole number or several."""
        value = self.given(name, position, default)
        values = [value] if isinstance(value, int) else value
        if not isinstance(values, (list, tuple)) or not all(isinstance(each, int) for each in values):
            raise UnknownSpellingError(f"{self.name} with {name} = {value!r}")
        return values

    @property
    def axis(self) -> Axis:
        """Return the axis of the first operand that has one; there is always one."""
        return next(axis for operand in self.operands if (axis := self.axes(operand)) is not None)

    @property
    def source(self) -> Tensor:
        """Return the operand that `axis` belongs to."""
        return next(operand for operand in self.operands if self.axes(operand) is not None)


class UnknownSpellingError(Exception):
    """An operation was called in a way that its rule can't read: its axis is lost, and the trace goes on."""


def elementwise(call: Call) -> Axis | None:
    """Couple the channels of all operands, which line up from their last dimensions."""
    found = [axis for operand in call.operands if (axis := call.axes(operand)) is not None]
    first = found[0]
    if any(axis.dim != first.dim or axis.space.size != first.space.size for axis in found):
        return None
    if call.result.dim() < -first.dim or call.result.shape[first.dim] != first.space.size:
        return None
    for axis in found[1:]:
        if merge(first.space, axis.space) and call.name in ADDITIONS:
            first.space.is_added = True
    for operand in call.operands:
        varies = operand.dim() >= -first.dim and operand.shape[first.dim] != 1
        if call.axes(operand) is None and varies:
            _couple_with_unknown(call, operand, first)
    return first


def _couple_with_unknown(call: Call, operand: Tensor, axis: Axis) -> None:
    """Note an operand whose channels nobody knows, but which has one for each of the axis."""
    if isinstance(operand, nn.Parameter):
        axis.space.block("an operation with a parameter that no layer owns")
    elif call.name in ADDITIONS:
        axis.space.is_added = True
        axis.space.block("an addition")
    else:
        axis.space.block(f"{call.name} with other activations")


def concatenation(call: Call) -> Axis | None:
    """Couple the channels of tensors that are joined along another dimension."""
    dim = call.integer("dim", 1, 0)
    return None if _negative(dim, call.result) == call.axis.dim else elementwise(call)


def view(call: Call) -> Axis | None:
    """Find the channels again: a dimension of their size with as many elements before it."""
    source, axis = call.source, call.axis
    before = math.prod(source.shape[: axis.dim])
    for position, size in enumerate(call.result.shape):
        if size == axis.space.size and math.prod(call.result.shape[:position]) == before:
            return Axis(axis.space, position - call.result.dim())
    return None


def transposition(call: Call) -> Axis | None:
    """Follow the channels through an exchange of two dimensions."""
    one = _negative(call.integer("dim0", 1), call.result)
    other = _negative(call.integer("dim1", 2), call.result)
    return Axis(call.axis.space, {one: other, other: one}.get(call.axis.dim, call.axis.dim))


def permutation(call: Call) -> Axis | None:
    """Follow the channels through an order of dimensions, given as a list or one by one."""
    order = call.args[1:] if len(call.args) > 2 else call.integers("dims", 1)
    dims = [_negative(dim, call.result) for dim in order]
    return Axis(call.axis.space, dims.index(call.axis.dim) - len(dims))


def reduction(call: Call) -> Axis | None:
    """Keep the channels where a sum or mean is over other dimensions."""
    source, axis = call.source, call.axis
    # Without dimensions it is over all of them.
    reduced = {_negative(dim, source) for dim in call.integers("dim", 1)}
    if axis.dim in reduced:
        return None
    kept = call.result.dim() == source.dim()
    return Axis(axis.space, axis.dim if kept else axis.dim + sum(dim > axis.dim for dim in reduced))


def spatial(dims: int) -> Callable[[Call], Axis | None]:
    """Return the rule of an operation over the last `dims` dimensions: channels before them stay."""
    return lambda call: call.axis if call.axis.dim < -dims else None


def padding(call: Call) -> Axis | None:
    """Keep the channels where other dimensions are padded."""
    return call.axis if -call.axis.dim > len(call.integers("pad", 1)) // 2 else None


def rolling(call: Call) -> Axis | None:
    """Keep the channels where other dimensions are rolled."""
    rolled = [_negative(dim, call.result) for dim in call.integers("dims", 2, ())]
    return call.axis if rolled and call.axis.dim not in rolled else None


def norm(call: Call) -> Axis | None:
    """Keep the channels where they are, and say that they can't be cut."""
    call.axis.space.block(call.name)
    return call.axis


def _negative(dim: int, tensor: Tensor) -> int:
    return dim if dim < 0 else dim - tensor.dim()


def parts(call: Call) -> Axis | None:
    """Follow channels that are taken apart into as many equal parts as there are results, which stand for one another.

    Parts that only ever meet channel by channel, as a gate's, are cut together.
    """
    axis, source = call.axis, call.source
    if _negative(call.integer("dim", 2, 0), source) != axis.dim:
        return axis
    sizes = [tensor.shape[axis.dim] for tensor in call.results]
    if len(set(sizes)) != 1 or sum(sizes) != axis.space.size:
        return None
    space = axis.space.split(len(sizes))
    return None if space is None else Axis(space, axis.dim)


# Those whose results are several, each with the axis that comes of it. A split into parts of a given size isn't one: cut, it is another.
PARTED: Mapping[str, Callable[[Call], Axis | None]] = {"chunk": parts}

RULES: Mapping[str, Callable[[Call], Axis | None]] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(NORMS, norm),
    **dict.fromkeys(VIEWS, view),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), transposition),
    **dict.fromkeys(("cat", "concat"), concatenation),
    **dict.fromkeys(("mean", "sum"), reduction),
    **dict.fromkeys(("adaptive_avg_pool1d", "avg_pool1d", "max_pool1d"), spatial(1)),
    **dict.fromkeys(("adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "max_pool2d"), spatial(2)),
    **dict.fromkeys(("interpolate", "upsample"), spatial(2)),
    "permute": permutation,
    "pad": padding,
    "roll": rolling,
}
