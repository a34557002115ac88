"""Channel axes traced through a forward pass: spaces of channels that are written, transformed and read together."""

import math
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from profiling_agent.errors import PruningError
from profiling_agent.lib.logs import checked_logits
from profiling_agent.lib.modules import device_of, floating_dtype, tensors, watching
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

    def merge(self, other: "Space") -> None:
        """Merge another space of equal size into this one."""
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


@dataclass(frozen=True, slots=True)
class Axis:
    """The dimension of a tensor, counted from the last (-1), that holds the channels of a space."""

    held: Space
    dim: int

    @property
    def space(self) -> Space:
        """Return the space after merges."""
        return self.held.current()


ADDITIONS = frozenset({"add", "iadd", "radd", "sub", "isub", "rsub"})
ELEMENTWISE = ADDITIONS | {
    *("mul", "imul", "rmul", "multiply", "div", "truediv", "itruediv", "rtruediv", "neg", "pow", "abs", "exp", "sqrt"),
    *("relu", "relu6", "gelu", "silu", "sigmoid", "tanh", "hardswish", "hardsigmoid", "hardtanh", "leaky_relu", "elu"),
    *("mish", "softplus", "clamp", "dropout", "contiguous", "to", "float", "type", "type_as", "clone", "detach"),
    *("expand", "expand_as", "broadcast_to"),
}
# `split` is none of these: parts of a given size would differ after a cut.
MOVES = frozenset(
    {
        *("view", "reshape", "flatten", "squeeze", "unsqueeze", "view_as", "reshape_as", "transpose", "swapaxes"),
        *("swapdims", "permute", "roll", "mean", "adaptive_avg_pool2d", "adaptive_max_pool2d", "avg_pool2d"),
        *("max_pool2d", "pad", "interpolate", "chunk"),
    }
)


def combine(name: str, operands: Sequence[tuple[Tensor, Axis | None]], result: Tensor) -> Axis | None:
    """Couple the channels of all operands of an elementwise operation, aligned from their last dimensions."""
    first, *others = (axis for _, axis in operands if axis is not None)
    space, dim, is_addition = first.space, first.dim, name in ADDITIONS
    if any(axis.dim != dim or axis.space.size != space.size for axis in others):
        return None
    if result.dim() < -dim or result.shape[dim] != space.size:
        return None
    for axis in others:
        if axis.space is not space:
            space.merge(axis.space)
            space.is_added |= is_addition
    for operand, axis in operands:
        # Its channels are untraced, but there is one for each of the others.
        if axis is None and operand.dim() >= -dim and operand.shape[dim] != 1:
            if isinstance(operand, nn.Parameter):
                space.block("an operation with a parameter that no layer owns")
                continue
            space.is_added |= is_addition
            space.block("an addition" if is_addition else f"{name} with other activations")
    return first


def follow(operation: Callable[[Tensor], Any], source: Tensor, axis: Axis) -> Axis | None:
    """Find the channels after an operation that moves, pools or averages, or splits them into equal parts.

    The operation runs once more, on each channel's number in place of `source`: where 0, 1, 2, ... lie along one
    dimension of the results, and nothing else but padding, the channels do. Parts meet channel by channel, as in a gated
    unit.
    """
    space, dim = axis.space, axis.dim
    if source.shape[dim] != space.size:
        return None
    numbers = torch.arange(space.size, dtype=torch.float64)
    results = tensors(operation(_along(dim, numbers).expand(source.shape).contiguous()))
    for new_dim in range(-results[0].dim(), 0):
        if all(_has_along(result, new_dim, numbers) for result in results):
            return Axis(space, new_dim)
    is_used = space.stacks > 1 or space.inner or space.readers or space.is_added or space.is_image
    parts = numbers.chunk(len(results))
    if (
        is_used
        or not all(_has_along(result, dim, part) for result, part in zip(results, parts, strict=False))
        or len(set(map(len, parts))) > 1
    ):
        return None
    part = Space(len(parts[0]), len(parts[0]), writers=space.writers, stacks=len(parts), obstacle=space.obstacle)
    space.merged_into = part
    return Axis(part, dim)


def _run_with(func: Callable[..., Any], args: Any, kwargs: Any, source: Tensor, other: Tensor) -> Any:
    """Run an operation with another tensor in the place of `source`."""

    def replaced(value: Any) -> Any:
        return other if value is source else value

    new_args, new_kwargs = tree_map(replaced, (args, kwargs))
    return func(*new_args, **new_kwargs)


def _has_along(result: Tensor, dim: int, numbers: Tensor) -> bool:
    if result.dim() < -dim or result.shape[dim] != len(numbers):
        return False
    return bool((((result - _along(dim, numbers)).abs() < 1e-6) | (result == 0)).all())


def _along(dim: int, numbers: Tensor) -> Tensor:
    return numbers.view(-1, *(1 for _ in range(-dim - 1)))


# Positional and keyword arguments of one module's call.
Arguments = tuple[tuple[Any, ...], Mapping[str, Any]]


class Trace(TorchFunctionMode):
    """The channel space that each layer writes and reads, its calls, other operations on its weights, and arguments."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.writes: dict[nn.Module, Space] = {}
        self.reads: dict[nn.Module, Space] = {}
        self.calls: Counter[nn.Module] = Counter()
        self.borrowed: dict[nn.Module, str] = {}
        self.arguments: dict[str, Arguments] = {}
        self._owners: dict[Tensor, nn.Module] = {
            p: m for m in model.modules() if isinstance(m, LAYERS) for p in m.parameters(recurse=False)
        }
        # Of each tensor, which is its own key, the axis that holds its channels; None if it has none.
        self.axes: dict[Tensor, Axis | None] = {}
        self._running = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        name = getattr(func, "__name__", "an operation").strip("_")
        if not self._running and ((results := tensors(result)) or name == "setitem"):
            operands = [(operand, self.axes.get(operand)) for operand in tensors((*args, *kwargs.values()))]
            for operand, _ in operands:
                if (owner := self._owners.get(operand)) is not None:
                    self.borrowed.setdefault(owner, name)
            traced = [(operand, axis) for operand, axis in operands if axis is not None]
            new_axis = None
            if traced and name in ELEMENTWISE:
                new_axis = combine(name, operands, results[0])
            elif traced and name in MOVES:
                source, axis = traced[0]
                new_axis = follow(partial(_run_with, func, args, kwargs, source), source, axis)
            if new_axis is None:
                for _, lost_axis in traced:
                    lost_axis.space.block(name)
            for tensor in results:
                self.axes[tensor] = new_axis
        return result

    def record(self, scope: str, _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        """Note the arguments of the first call of a module."""
        self.arguments.setdefault(scope, (args, kwargs))

    def enter(self, _name: str, _input: Any) -> None:
        """Begin a layer, which is known as a whole: what runs inside isn't traced."""
        self._running += 1

    def leave(self, name: str, inputs: Tensor, output: Tensor) -> None:
        """End a layer: carry the channel axis of its input to its output."""
        self._running -= 1
        module = self._model.get_submodule(name)
        self.calls[module] += 1
        axis = self.axes.get(inputs)
        if axis is not None and inputs.shape[axis.dim] != axis.space.size:
            # The input was split before.
            axis.space.block("a layer that reads its parts as a whole")
            axis = None
        if isinstance(module, LAYERS):
            self.axes[output] = self._through_layer(module, axis)
            return
        if axis is not None:
            # Counted from the last; timm's response norms have an attribute for it.
            dim = 1 - inputs.dim() if isinstance(module, _BatchNorm) else getattr(module, "channel_dim", -1)
            if axis.dim not in (dim, dim - inputs.dim()):
                axis.space.block("a norm across other dimensions")
            axis.space.inner.append(module)
            axis.space.mask_exact &= isinstance(module, _BatchNorm)
        self.axes[output] = axis

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


def follow_channels(skeleton: nn.Module, spec: InputSpec, scopes: Collection[str] = ()) -> Trace:
    """Run one blank image of `spec` through `skeleton`, a meta-device copy made for it, and return the trace.

    It has the arguments of the modules `scopes` as well.

    Raises:
        PruningError: the model can't run without weights; names what it raised.
    """
    image = torch.zeros(spec.batch(1), device=device_of(skeleton), dtype=floating_dtype(skeleton))
    trace = Trace(skeleton)
    trace.axes[image] = Axis(Space(spec.channels, spec.channels, is_image=True, obstacle="the image"), -3)
    for scope in scopes:
        record = partial(trace.record, scope)
        skeleton.get_submodule(scope).register_forward_pre_hook(record, with_kwargs=True)
    layers = [name for name, module in skeleton.named_modules() if _is_plain_layer(module)]
    with torch.no_grad(), watching(skeleton, layers, before=trace.enter, after=trace.leave), trace:
        logits = checked_logits(skeleton.eval(), image, PruningError)
    if (axis := trace.axes.get(logits)) is not None:
        axis.space.is_logits = True
    return trace
