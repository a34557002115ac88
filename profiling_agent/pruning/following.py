"""Follow every layer's output channels through one forward pass, without weights and without arithmetic.

Torch-Pruning's own graph maps each channel through every split and concatenation one by one: it takes 50 s and more on
MobileViTV2 and FocalNet and fails on LeViT. Here whole axes are followed; where one is lost, its layer is refused.
"""

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.overrides import TorchFunctionMode

from profiling_agent.errors import PruningError
from profiling_agent.foreign import logits_of
from profiling_agent.modules.hooks import tensors, watching
from profiling_agent.modules.inference import device_of
from profiling_agent.pruning.operations import PARTED, RULES, Call, UnknownSpellingError
from profiling_agent.pruning.spaces import Axis, Space
from profiling_agent.records import InputSpec

LAYERS = (nn.Linear, nn.Conv2d)


class UntraceableError(PruningError):
    """A model doesn't run without weights; says what it raised."""


class Trace(TorchFunctionMode):
    """The channel space that each layer writes and reads, how often it was called, and what used its weights otherwise."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._model = model
        self.writes: dict[nn.Module, Space] = {}
        self.reads: dict[nn.Module, Space] = {}
        self.calls: Counter[nn.Module] = Counter()
        self.borrowed: dict[nn.Module, str] = {}
        self._owners = {id(p): m for m in model.modules() if isinstance(m, LAYERS) for p in m.parameters(recurse=False)}
        # Tensors are held, so that no other takes their id.
        self._axes: dict[int, tuple[Tensor, Axis]] = {}
        self._running = 0

    @property
    def repeated(self) -> set[nn.Module]:
        """Return the modules that the forward pass came to more than once."""
        return {module for module, count in self.calls.items() if count > 1}

    def axis_of(self, tensor: Tensor) -> Axis | None:
        """Return where the channels of a tensor lie, None where nobody knows."""
        held = self._axes.get(id(tensor))
        return held[1] if held else None

    def put(self, tensor: Tensor, axis: Axis | None) -> None:
        """Say where the channels of a tensor lie."""
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
        found = [axis for operand in operands if (axis := self.axis_of(operand)) is not None]
        axis = None
        if found and (name in RULES if len(results) == 1 else name in PARTED):
            axis = self._ruled(Call(name, args, kwargs, results, self.axis_of))
        if axis is None:
            for lost in found:
                lost.space.block(name)
        for result in results:
            self.put(result, axis)

    def _ruled(self, call: Call) -> Axis | None:
        try:
            return (PARTED if len(call.results) > 1 else RULES)[call.name](call)
        except UnknownSpellingError:
            return None

    def enter(self, _name: str, _input: Any) -> None:
        """Look away while a layer that is known as a whole runs."""
        self._running += 1

    def leave(self, name: str, given: Tensor, output: Tensor) -> None:
        """Note what a layer, which has one input, read and wrote."""
        self._running -= 1
        module = self._model.get_submodule(name)
        self.calls[module] += 1
        axis = self.axis_of(given)
        if axis is not None and given.shape[axis.dim] != axis.space.size:
            # It was taken apart before.
            axis.space.block("a layer that reads its parts as a whole")
            axis = None
        if isinstance(module, LAYERS):
            self.put(output, self._through_layer(module, axis))
        else:
            self.put(output, self._through_norm(module, given, axis))

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

    def _through_norm(self, norm: nn.Module, given: Tensor, axis: Axis | None) -> Axis | None:
        if axis is None:
            return None
        if axis.dim != _channels_of(norm, given):
            axis.space.block("a norm across other dimensions")
        axis.space.inner.append(norm)
        axis.space.mask_exact &= isinstance(norm, _BatchNorm)
        return axis


def is_response_norm(module: nn.Module) -> bool:
    """Say whether `module` is a global response norm: x times its share of the mean norm over channels, two parameters."""
    parameters = dict(module.named_parameters())
    return (
        type(module).__name__.endswith(("GRN", "GlobalResponseNorm"))
        and parameters.keys() == {"weight", "bias"}
        and all(parameter.numel() == parameter.shape[-1] for parameter in parameters.values())
    )


def _channels_of(norm: nn.Module, given: Tensor) -> int:
    """Return which dimension of what it reads a norm takes for the channels, from the last; timm's response norms state it."""
    if isinstance(norm, _BatchNorm):
        return 1 - given.dim()
    stated = getattr(norm, "channel_dim", -1)
    return stated - given.dim() if stated >= 0 else stated


def _is_known(module: nn.Module) -> bool:
    """Say whether a module computes what its kind does; a subclass may use its weights in another way."""
    if isinstance(module, LAYERS):
        plain = (nn.Linear.forward, nn.Conv2d.forward)
        return type(module).forward in plain and "weight" in dict(module.named_parameters(recurse=False))
    return isinstance(module, _BatchNorm) or is_response_norm(module)


def follow_channels(skeleton: nn.Module, spec: InputSpec) -> Trace:
    """Run one blank image of `spec` through `skeleton`, a copy on the meta device made for it, and return the trace.

    Raises:
        UntraceableError: the model can't be run so; names what it raised.
    """
    dtype = next((parameter.dtype for parameter in skeleton.parameters() if parameter.is_floating_point()), None)
    image = torch.zeros(spec.batch(1), device=device_of(skeleton), dtype=dtype)
    trace = Trace(skeleton)
    trace.put(image, Axis(Space(spec.channels, spec.channels, is_image=True, obstacle="the image"), -3))
    known = [name for name, module in skeleton.named_modules() if _is_known(module)]
    with torch.no_grad(), watching(skeleton, known, before=trace.enter, after=trace.leave), trace:
        logits = logits_of(skeleton.eval(), image, UntraceableError)
    if (axis := trace.axis_of(logits)) is not None:
        axis.space.is_logits = True
    return trace
