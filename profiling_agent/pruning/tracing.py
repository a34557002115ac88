"""Channel tracing: spaces of channels that are written, transformed and read together, followed through a forward pass."""

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.overrides import TorchFunctionMode

from profiling_agent.errors import PruningError
from profiling_agent.lib.logs import checked_logits
from profiling_agent.lib.modules import device_of, tensors, watching
from profiling_agent.schemas import InputSpec


@dataclass(slots=True)
class Space:
    """The channels of one layer's outputs, and of whatever is added to them or multiplied with them.

    `width` counts the channels that can be cut independently: fewer than `size` if a grouped convolution ties them together. If writers have
    several `stacks`, a channel has a row in each.
    """

    size: int
    width: int
    writers: list[nn.Module] = field(default_factory=list[nn.Module])
    inner: list[nn.Module] = field(default_factory=list[nn.Module])
    readers: list[nn.Module] = field(default_factory=list[nn.Module])
    is_added: bool = False
    is_image: bool = False
    is_logits: bool = False
    mask_exact: bool = True
    stacks: int = 1
    obstacle: str | None = None
    merged_into: "Space | None" = None

    def current(self) -> "Space":
        """Return the space that this one was merged into, itself if none."""
        space = self
        while space.merged_into is not None:
            space = space.merged_into
        return space

    def split(self, stacks: int) -> "Space | None":
        """Return the space whose channels each stand for one channel per equal part; None if layers other than writers use this one."""
        if self.size % stacks or self.stacks > 1 or self.inner or self.readers or self.is_added or self.is_image:
            return None
        size = self.size // stacks
        self.merged_into = Space(size, size, writers=self.writers, stacks=stacks, obstacle=self.obstacle)
        return self.merged_into

    def block(self, obstacle: str) -> None:
        """Record why the channels can't be cut; the first obstacle stays."""
        self.obstacle = self.obstacle or obstacle


@dataclass(frozen=True, slots=True)
class Axis:
    """The dimension of a tensor, counted from the last (-1), that holds the channels of a space."""

    held: Space
    dim: int

    @property
    def space(self) -> Space:
        """Return the space after merges."""
        return self.held.current()


def merge(first: Space, second: Space) -> bool:
    """Merge two spaces of equal size, and return whether they were different.

    If both tie consecutive channels into groups, only what is whole in both can be cut.
    """
    if first is second:
        return False
    first.width = math.gcd(first.width, second.width)
    first.writers += second.writers
    first.inner += second.inner
    first.readers += second.readers
    first.is_added |= second.is_added
    first.is_image |= second.is_image
    first.is_logits |= second.is_logits
    first.mask_exact &= second.mask_exact
    first.obstacle = first.obstacle or second.obstacle
    if first.stacks != second.stacks:
        first.block("an operation of a part of a layer with another layer")
    second.merged_into = first
    return True


ADDITIONS = frozenset({"add", "iadd", "radd", "sub", "isub", "rsub", "cat", "concat"})
ELEMENTWISE = ADDITIONS - {"cat", "concat"} | {
    *("mul", "imul", "rmul", "multiply", "div", "truediv", "itruediv", "rtruediv", "neg", "pow", "abs", "exp", "sqrt"),
    *("relu", "relu6", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu"),
    *("mish", "softplus", "clamp", "dropout", "contiguous", "to", "float", "type", "type_as", "clone", "detach"),
    *("expand", "expand_as", "broadcast_to"),
}
# These mix channels, but keep their position: a later addition still marks them as a residual.
NORMS = ("layer_norm", "group_norm", "normalize", "instance_norm")
VIEWS = ("view", "reshape", "flatten", "squeeze", "unsqueeze", "view_as", "reshape_as")


@dataclass(frozen=True, slots=True)
class Call:
    """One operation: its name, its arguments, and the tensors that it returned."""

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
        """Return the tensors among the arguments, including those in lists."""
        return list(tensors((*self.args, *self.kwargs.values())))

    def given(self, name: str, position: int, default: Any = None) -> Any:
        """Return an argument by name or position."""
        if name in self.kwargs:
            return self.kwargs[name]
        return self.args[position] if len(self.args) > position else default

    def integer(self, name: str, position: int, default: Any = None) -> int:
        """Return an integer argument."""
        value = self.given(name, position, default)
        if not isinstance(value, int):
            raise UnknownSpellingError(f"{self.name} with {name} = {value!r}")
        return value

    def integers(self, name: str, position: int, default: Any = None) -> Sequence[int]:
        """Return an argument that is an integer or several."""
        value = self.given(name, position, default)
        values = [value] if isinstance(value, int) else value
        if not isinstance(values, (list, tuple)) or not all(isinstance(item, int) for item in values):
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
    """An operation was called with arguments that its rule can't read: its axis is lost, and the trace goes on."""


def elementwise(call: Call) -> Axis | None:
    """Couple the channels of all operands, aligned from their last dimensions."""
    axes = [axis for operand in call.operands if (axis := call.axes(operand)) is not None]
    first = axes[0]
    if any(axis.dim != first.dim or axis.space.size != first.space.size for axis in axes):
        return None
    if call.result.dim() < -first.dim or call.result.shape[first.dim] != first.space.size:
        return None
    for axis in axes[1:]:
        if merge(first.space, axis.space) and call.name in ADDITIONS:
            first.space.is_added = True
    for operand in call.operands:
        # Its channels are untraced, but there is one for each of the others.
        if call.axes(operand) is None and operand.dim() >= -first.dim and operand.shape[first.dim] != 1:
            if isinstance(operand, nn.Parameter):
                first.space.block("an operation with a parameter that no layer owns")
                continue
            first.space.is_added |= call.name in ADDITIONS
            first.space.block("an addition" if call.name in ADDITIONS else f"{call.name} with other activations")
    return first


def concatenation(call: Call) -> Axis | None:
    """Couple the channels of tensors that are joined along another dimension."""
    dim = call.integer("dim", 1, 0)
    return None if _dim_from_last(dim, call.result) == call.axis.dim else elementwise(call)


def view(call: Call) -> Axis | None:
    """Find the channels after a reshape: a dimension of their size with as many elements before it."""
    source, axis = call.source, call.axis
    before = math.prod(source.shape[: axis.dim])
    for position, size in enumerate(call.result.shape):
        if size == axis.space.size and math.prod(call.result.shape[:position]) == before:
            return Axis(axis.space, position - call.result.dim())
    return None


def transposition(call: Call) -> Axis | None:
    """Follow the channels through an exchange of two dimensions."""
    dim0 = _dim_from_last(call.integer("dim0", 1), call.result)
    dim1 = _dim_from_last(call.integer("dim1", 2), call.result)
    return Axis(call.axis.space, {dim0: dim1, dim1: dim0}.get(call.axis.dim, call.axis.dim))


def permutation(call: Call) -> Axis | None:
    """Follow the channels through a permutation, given as a list or as separate arguments."""
    order = call.args[1:] if len(call.args) > 2 else call.integers("dims", 1)
    dims = [_dim_from_last(dim, call.result) for dim in order]
    return Axis(call.axis.space, dims.index(call.axis.dim) - len(dims))


def reduction(call: Call) -> Axis | None:
    """Keep the channels if a sum or mean is over other dimensions."""
    source, axis = call.source, call.axis
    # Without dimensions it reduces all of them.
    reduced = {_dim_from_last(dim, source) for dim in call.integers("dim", 1)}
    if axis.dim in reduced:
        return None
    keeps_dims = call.result.dim() == source.dim()
    return Axis(axis.space, axis.dim if keeps_dims else axis.dim + sum(dim > axis.dim for dim in reduced))


def spatial(dims: int) -> Callable[[Call], Axis | None]:
    """Return the rule of an operation over the last `dims` dimensions: channels before them stay."""
    return lambda call: call.axis if call.axis.dim < -dims else None


def padding(call: Call) -> Axis | None:
    """Keep the channels if other dimensions are padded."""
    return call.axis if -call.axis.dim > len(call.integers("pad", 1)) // 2 else None


def rolling(call: Call) -> Axis | None:
    """Keep the channels if other dimensions are rolled."""
    rolled = [_dim_from_last(dim, call.result) for dim in call.integers("dims", 2, ())]
    return call.axis if rolled and call.axis.dim not in rolled else None


def norm(call: Call) -> Axis | None:
    """Keep the channels in place, and block them: they can't be cut."""
    call.axis.space.block(call.name)
    return call.axis


def _dim_from_last(dim: int, tensor: Tensor) -> int:
    return dim if dim < 0 else dim - tensor.dim()


def parts(call: Call) -> Axis | None:
    """Follow channels that are split into as many equal parts as there are results.

    Parts that only ever meet channel by channel, as in a gated unit, are cut together.
    """
    axis, source = call.axis, call.source
    if _dim_from_last(call.integer("dim", 2, 0), source) != axis.dim:
        return axis
    sizes = [tensor.shape[axis.dim] for tensor in call.results]
    if len(set(sizes)) != 1 or sum(sizes) != axis.space.size:
        return None
    space = axis.space.split(len(sizes))
    return None if space is None else Axis(space, axis.dim)


# Rules of operations with several results, which share the returned axis. A split into parts of a given size has none: after a cut it would split
# differently.
SPLITS: Mapping[str, Callable[[Call], Axis | None]] = {"chunk": parts}

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


LAYERS = (nn.Linear, nn.Conv2d)


class UntraceableError(PruningError):
    """A model doesn't run without weights; the message has its exception."""


class Trace(TorchFunctionMode):
    """The channel space that each layer writes and reads, its number of calls, and other operations that used its weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.writes: dict[nn.Module, Space] = {}
        self.reads: dict[nn.Module, Space] = {}
        self.calls: Counter[nn.Module] = Counter()
        self.borrowed: dict[nn.Module, str] = {}
        self._owners = {id(p): m for m in model.modules() if isinstance(m, LAYERS) for p in m.parameters(recurse=False)}
        # Tensors are stored so that no other reuses their id.
        self._axes: dict[int, tuple[Tensor, Axis]] = {}
        self._running = 0

    def axis_of(self, tensor: Tensor) -> Axis | None:
        """Return the channel axis of a tensor, None if unknown."""
        entry = self._axes.get(id(tensor))
        return entry[1] if entry else None

    def put(self, tensor: Tensor, axis: Axis | None) -> None:
        """Record the channel axis of a tensor."""
        if axis is not None:
            self._axes[id(tensor)] = (tensor, axis)
        else:
            self._axes.pop(id(tensor), None)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "an operation").strip("_")
        if not self._running and ((results := list(tensors(result))) or name == "setitem"):
            self._follow(name, args, kwargs, results)
        return result

    def _follow(self, name: str, args: Sequence[Any], kwargs: dict[str, Any], results: list[Tensor]) -> None:
        operands = list(tensors((*args, *kwargs.values())))
        for operand in operands:
            if (owner := self._owners.get(id(operand))) is not None:
                self.borrowed.setdefault(owner, name)
        axes = [axis for operand in operands if (axis := self.axis_of(operand)) is not None]
        axis = None
        if axes and (name in RULES if len(results) == 1 else name in SPLITS):
            with suppress(UnknownSpellingError):
                axis = (RULES if len(results) == 1 else SPLITS)[name](Call(name, args, kwargs, results, self.axis_of))
        if axis is None:
            for lost_axis in axes:
                lost_axis.space.block(name)
        for result in results:
            self.put(result, axis)

    def enter(self, _name: str, _input: Any) -> None:
        """Suspend tracing while a layer runs that is known as a whole."""
        self._running += 1

    def leave(self, name: str, inputs: Tensor, output: Tensor) -> None:
        """Record what a layer, which has one input, read and wrote."""
        self._running -= 1
        module = self._model.get_submodule(name)
        self.calls[module] += 1
        axis = self.axis_of(inputs)
        if axis is not None and inputs.shape[axis.dim] != axis.space.size:
            # The input was split before.
            axis.space.block("a layer that reads its parts as a whole")
            axis = None
        if isinstance(module, LAYERS):
            self.put(output, self._through_layer(module, axis))
        else:
            self.put(output, self._through_norm(module, inputs, axis))

    def _through_layer(self, layer: nn.Linear | nn.Conv2d, axis: Axis | None) -> Axis:
        dim, groups = (-3, layer.groups) if isinstance(layer, nn.Conv2d) else (-1, 1)
        if axis is not None and axis.dim != dim:
            axis.space.block("a layer across other dimensions")
            axis = None
        if axis is not None:
            self.reads[layer] = axis.space
            if groups > 1 and len(layer.weight) == axis.space.size:
                axis.space.width = math.gcd(axis.space.width, groups)
                axis.space.inner.append(layer)
                self.writes[layer] = axis.space
                return axis
            axis.space.readers.append(layer)
            if groups > 1:
                axis.space.block("a grouped convolution")
        width = len(layer.weight)
        self.writes[layer] = Space(width, width, writers=[layer], obstacle="grouped" if groups > 1 else None)
        return Axis(self.writes[layer], dim)

    def _through_norm(self, norm: nn.Module, inputs: Tensor, axis: Axis | None) -> Axis | None:
        if axis is None:
            return None
        # Counted from the last; timm's response norms have an attribute for it.
        dim = 1 if isinstance(norm, _BatchNorm) else getattr(norm, "channel_dim", -1)
        if axis.dim != _dim_from_last(dim, inputs):
            axis.space.block("a norm across other dimensions")
        axis.space.inner.append(norm)
        axis.space.mask_exact &= isinstance(norm, _BatchNorm)
        return axis


def is_response_norm(module: nn.Module) -> bool:
    """Return whether `module` is a global response norm: x times its share of the mean norm over channels, two parameters."""
    parameters = dict(module.named_parameters())
    return (
        type(module).__name__.endswith(("GRN", "GlobalResponseNorm"))
        and parameters.keys() == {"weight", "bias"}
        and all(parameter.numel() == parameter.shape[-1] for parameter in parameters.values())
    )


def _is_plain_layer(module: nn.Module) -> bool:
    """Return whether a module computes what its kind does; a subclass may use its weights in another way."""
    if isinstance(module, LAYERS):
        forwards = (nn.Linear.forward, nn.Conv2d.forward)
        return type(module).forward in forwards and "weight" in dict(module.named_parameters(recurse=False))
    return isinstance(module, _BatchNorm) or is_response_norm(module)


def blank_image(skeleton: nn.Module, spec: InputSpec) -> Tensor:
    """Return zeros as one image of `spec`, (1, channels, height, width), of the device and type of the model's weights."""
    dtype = next((parameter.dtype for parameter in skeleton.parameters() if parameter.is_floating_point()), None)
    return torch.zeros(spec.batch(1), device=device_of(skeleton), dtype=dtype)


def follow_channels(skeleton: nn.Module, spec: InputSpec) -> Trace:
    """Run one blank image of `spec` through `skeleton`, a meta-device copy made for it, and return the trace.

    Raises:
        UntraceableError: the model can't run without weights; names what it raised.
    """
    image = blank_image(skeleton, spec)
    trace = Trace(skeleton)
    trace.put(image, Axis(Space(spec.channels, spec.channels, is_image=True, obstacle="the image"), -3))
    layers = [name for name, module in skeleton.named_modules() if _is_plain_layer(module)]
    with torch.no_grad(), watching(skeleton, layers, before=trace.enter, after=trace.leave), trace:
        logits = checked_logits(skeleton.eval(), image, UntraceableError)
    if (axis := trace.axis_of(logits)) is not None:
        axis.space.is_logits = True
    return trace
