"""Channel axes traced through a forward pass: spaces of channels that are written, transformed and read together."""

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

LAYERS = (nn.Linear, nn.Conv2d)


@dataclass(slots=True)
class Space:
    """The channels of one layer's outputs, and of whatever is added to them or multiplied with them.

    `width` of its `size` channels can be cut independently: a grouped convolution ties some together. With several
    `stacks` a channel has a row in each of so many parts of its writers.
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

    def block(self, obstacle: str) -> None:
        """Record why the channels can't be cut; the first obstacle stays."""
        self.obstacle = self.obstacle or obstacle

    def merge(self, other: "Space") -> bool:
        """Merge another space of equal size into this one, and return whether it was another."""
        if self is other:
            return False
        # If both tie consecutive channels into groups, only what is whole in both can be cut.
        self.width = math.gcd(self.width, other.width)
        self.writers += other.writers
        self.inner += other.inner
        self.readers += other.readers
        self.is_added |= other.is_added
        self.is_image |= other.is_image
        self.is_logits |= other.is_logits
        self.mask_exact &= other.mask_exact
        self.obstacle = self.obstacle or other.obstacle
        if self.stacks != other.stacks:
            self.block("an operation of a part of a layer with another layer")
        other.merged_into = self
        return True


@dataclass(frozen=True, slots=True)
class Axis:
    """The dimension of a tensor, counted from the last (-1), that holds the channels of a space."""

    held: Space
    dim: int

    @property
    def space(self) -> Space:
        """Return the space after merges."""
        return self.held.current()


@dataclass(frozen=True, slots=True)
class Call:
    """One operation with its results; `axis` is that of `source`, the first tensor among the arguments that has one."""

    name: str
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    results: Sequence[Tensor]
    operands: Sequence[tuple[Tensor, Axis | None]]
    source: Tensor
    axis: Axis

    def integers(self, name: str, position: int, default: Any = None) -> Sequence[int]:
        """Return an argument that is an integer or several; ValueError if it is something else."""
        value = self.kwargs.get(name, self.args[position] if len(self.args) > position else default)
        values = [value] if isinstance(value, int) else value
        if not isinstance(values, (list, tuple)) or not all(isinstance(item, int) for item in values):
            raise ValueError(f"{self.name} with {name} = {value!r}")
        return values

    def dims(self, name: str, position: int, default: Any = None) -> list[int]:
        """Return dimensions among the arguments, counted from the last one of `source`."""
        return [dim if dim < 0 else dim - self.source.dim() for dim in self.integers(name, position, default)]


# Returns the axis of an operation's results. The channels are lost if it is None, or for a ValueError: the rule can't
# read the arguments.
Rule = Callable[[Call], Axis | None]

ADDITIONS = frozenset({"add", "iadd", "radd", "sub", "isub", "rsub", "cat", "concat"})
ELEMENTWISE = ADDITIONS - {"cat", "concat"} | {
    *("mul", "imul", "rmul", "multiply", "div", "truediv", "itruediv", "rtruediv", "neg", "pow", "abs", "exp", "sqrt"),
    *("relu", "relu6", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu"),
    *("mish", "softplus", "clamp", "dropout", "contiguous", "to", "float", "type", "type_as", "clone", "detach"),
    *("expand", "expand_as", "broadcast_to"),
}


def elementwise(call: Call) -> Axis | None:
    """Couple the channels of all operands, aligned from their last dimensions."""
    first, *others = (axis for _, axis in call.operands if axis is not None)
    space, dim, (result, *_) = first.space, first.dim, call.results
    if any(axis.dim != dim or axis.space.size != space.size for axis in others):
        return None
    if result.dim() < -dim or result.shape[dim] != space.size:
        return None
    for axis in others:
        if space.merge(axis.space) and call.name in ADDITIONS:
            space.is_added = True
    for operand, axis in call.operands:
        # Its channels are untraced, but there is one for each of the others.
        if axis is None and operand.dim() >= -dim and operand.shape[dim] != 1:
            if isinstance(operand, nn.Parameter):
                space.block("an operation with a parameter that no layer owns")
                continue
            space.is_added |= call.name in ADDITIONS
            space.block("an addition" if call.name in ADDITIONS else f"{call.name} with other activations")
    return first


def concatenation(call: Call) -> Axis | None:
    """Couple the channels of tensors that are joined along another dimension."""
    return None if call.axis.dim in call.dims("dim", 1, 0) else elementwise(call)


def view(call: Call) -> Axis | None:
    """Find the channels after a reshape: a dimension of their size with as many elements before it."""
    axis, shape = call.axis, call.results[0].shape
    before = math.prod(call.source.shape[: axis.dim])
    for position, size in enumerate(shape):
        if size == axis.space.size and math.prod(shape[:position]) == before:
            return Axis(axis.space, position - len(shape))
    return None


def transposition(call: Call) -> Axis | None:
    """Follow the channels through an exchange of two dimensions."""
    (dim0,), (dim1,) = call.dims("dim0", 1), call.dims("dim1", 2)
    return Axis(call.axis.space, {dim0: dim1, dim1: dim0}.get(call.axis.dim, call.axis.dim))


def permutation(call: Call) -> Axis | None:
    """Follow the channels through a permutation, given as a list or as separate arguments."""
    rank = call.source.dim()
    order = call.args[1:] if len(call.args) > 2 else call.integers("dims", 1)
    return Axis(call.axis.space, [dim % rank for dim in order].index(call.axis.dim % rank) - rank)


def reduction(call: Call) -> Axis | None:
    """Keep the channels if a sum or mean is over other dimensions; without dimensions it is over all."""
    axis, reduced = call.axis, set(call.dims("dim", 1))
    if axis.dim in reduced:
        return None
    keeps_dims = call.results[0].dim() == call.source.dim()
    return Axis(axis.space, axis.dim if keeps_dims else axis.dim + sum(dim > axis.dim for dim in reduced))


def pooling(call: Call) -> Axis | None:
    """Keep the channels if they lie before the dimensions that are padded, pooled or resized."""
    num_dims = len(call.integers("pad", 1)) // 2 if call.name == "pad" else 1 if call.name.endswith("1d") else 2
    return call.axis if call.axis.dim < -num_dims else None


def rolling(call: Call) -> Axis | None:
    """Keep the channels if other dimensions are rolled; without dimensions all are, as one."""
    rolled = call.dims("dims", 2, ())
    return call.axis if rolled and call.axis.dim not in rolled else None


def norm(call: Call) -> Axis | None:
    """Keep the channels, which can't be cut, in place: a later addition still marks them as a residual."""
    call.axis.space.block(call.name)
    return call.axis


def parts(call: Call) -> Axis | None:
    """Follow channels that are split into equal parts, which meet channel by channel as in a gated unit."""
    axis, space = call.axis, call.axis.space
    if axis.dim not in call.dims("dim", 2, 0):
        return axis
    sizes = [tensor.shape[axis.dim] for tensor in call.results]
    is_used = space.stacks > 1 or space.inner or space.readers or space.is_added or space.is_image
    if is_used or len(set(sizes)) != 1 or sum(sizes) != space.size:
        return None
    space.merged_into = Space(sizes[0], sizes[0], writers=space.writers, stacks=len(sizes), obstacle=space.obstacle)
    return Axis(space.merged_into, axis.dim)


RULES: Mapping[str, Rule] = {
    **dict.fromkeys(ELEMENTWISE, elementwise),
    **dict.fromkeys(("layer_norm", "group_norm", "normalize", "instance_norm"), norm),
    **dict.fromkeys(("view", "reshape", "flatten", "squeeze", "unsqueeze", "view_as", "reshape_as"), view),
    **dict.fromkeys(("transpose", "swapaxes", "swapdims"), transposition),
    **dict.fromkeys(("cat", "concat"), concatenation),
    **dict.fromkeys(("mean", "sum"), reduction),
    **dict.fromkeys(("adaptive_avg_pool1d", "avg_pool1d", "max_pool1d", "pad", "interpolate", "upsample"), pooling),
    **dict.fromkeys(("adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d", "max_pool2d"), pooling),
    "permute": permutation,
    "roll": rolling,
}
# Of operations with several results, which share the axis. `split` has no rule: parts of a given size would differ
# after a cut.
SPLITS: Mapping[str, Rule] = {"chunk": parts}


class UntraceableError(PruningError):
    """A model doesn't run without weights; the message has its exception."""


class Trace(TorchFunctionMode):
    """The channel space that each layer writes and reads, its calls, and other operations on its weights."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.writes: dict[nn.Module, Space] = {}
        self.reads: dict[nn.Module, Space] = {}
        self.calls: Counter[nn.Module] = Counter()
        self.borrowed: dict[nn.Module, str] = {}
        self._owners = {id(p): m for m in model.modules() if isinstance(m, LAYERS) for p in m.parameters(recurse=False)}
        # Tensors are stored so that no other reuses their id.
        self._axes: dict[int, tuple[Tensor, Axis | None]] = {}
        self._running = 0

    def axis_of(self, tensor: Tensor) -> Axis | None:
        """Return the channel axis of a tensor; None if it has none."""
        return self._axes.get(id(tensor), (tensor, None))[1]

    def put(self, tensor: Tensor, axis: Axis | None) -> None:
        """Note the channel axis of a tensor."""
        self._axes[id(tensor)] = (tensor, axis)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "an operation").strip("_")
        if not self._running and ((results := tensors(result)) or name == "setitem"):
            operands = [(operand, self.axis_of(operand)) for operand in tensors((*args, *kwargs.values()))]
            for operand, _ in operands:
                if (owner := self._owners.get(id(operand))) is not None:
                    self.borrowed.setdefault(owner, name)
            traced = [(operand, axis) for operand, axis in operands if axis is not None]
            rule, new_axis = (RULES if len(results) == 1 else SPLITS).get(name), None
            if traced and rule is not None:
                with suppress(ValueError):
                    new_axis = rule(Call(name, args, kwargs, results, operands, *traced[0]))
            if new_axis is None:
                for _, lost_axis in traced:
                    lost_axis.space.block(name)
            for tensor in results:
                self.put(tensor, new_axis)
        return result

    def enter(self, _name: str, _input: Any) -> None:
        """Begin a layer, which is known as a whole: what runs inside isn't traced."""
        self._running += 1

    def leave(self, name: str, inputs: Tensor, output: Tensor) -> None:
        """End a layer: carry the channel axis of its input to its output."""
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
            return
        if axis is not None:
            # Counted from the last; timm's response norms have an attribute for it.
            dim = 1 - inputs.dim() if isinstance(module, _BatchNorm) else getattr(module, "channel_dim", -1)
            if axis.dim not in (dim, dim - inputs.dim()):
                axis.space.block("a norm across other dimensions")
            axis.space.inner.append(module)
            axis.space.mask_exact &= isinstance(module, _BatchNorm)
        self.put(output, axis)

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


def is_response_norm(module: nn.Module) -> bool:
    """Return whether `module` is a global response norm: x times its share of the mean norm over channels."""
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
    """Return zeros as one image of `spec`, (1, c, h, w), on the device and of the type of the weights."""
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
