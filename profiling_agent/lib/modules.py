"""Torch modules: hooks around their calls, state, devices, batch norms, and distances between logits."""

import copy
from collections import Counter
from collections.abc import Callable, Collection, Generator, Iterable, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm  # pyright: ignore[reportPrivateUsage]
from torch.utils._pytree import tree_leaves

from profiling_agent.errors import RunError
from profiling_agent.lib.machine import available_threads
from profiling_agent.schemas import MULTI_LABEL, InputSpec


@contextmanager
def watching(
    model: nn.Module,
    names: Iterable[str] | None = None,
    *,
    before: Callable[[str, Any], Any] | None = None,
    after: Callable[[str, Any, Any], Any] | None = None,
) -> Generator[None]:
    """Call `before(name, input)` and `after(name, input, output)` around every call of the named modules, or of all.

    The input is the first argument, positional or keyword; the root's name is ''. Return values are ignored.
    """

    def call(callback: Any, name: str, _module: nn.Module, args: Any, kwargs: Mapping[str, Any], *output: Any) -> None:
        callback(name, next(iter((*args, *kwargs.values())), None), *output)

    with ExitStack() as hooks:
        for name in dict(model.named_modules()) if names is None else names:
            module = model.get_submodule(name)
            if before is not None:
                hooks.callback(module.register_forward_pre_hook(partial(call, before, name), with_kwargs=True).remove)
            if after is not None:
                hooks.callback(module.register_forward_hook(partial(call, after, name), with_kwargs=True).remove)
        yield


def tensors(output: Any) -> list[Tensor]:
    """Return the tensors in a module's output, through mappings (ModelOutput is one), tuples and lists."""
    return [leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]


@contextmanager
def preserving_state(model: nn.Module) -> Generator[nn.Module]:
    """Restore the plain attributes of every module at the end: train or eval mode, and what forward passes change.

    Swin shrinks its window permanently when given a small image. Tensors changed in place are not restored.
    """
    saved = [(module, dict(vars(module))) for module in model.modules()]
    try:
        yield model
    finally:
        for module, attributes in saved:
            vars(module).clear()
            vars(module).update(attributes)


def without_weights(model: nn.Module) -> nn.Module:
    """Copy `model` to the meta device: its structure and shapes, without memory or arithmetic."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    for parameter in model.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
    return copy.deepcopy(model, memo)


def module_counts(model: nn.Module) -> dict[str, int]:
    """Return the number of places in which each named module occurs."""
    modules = dict(model.named_modules(remove_duplicate=False))
    counts = Counter(modules.values())
    return {name: counts[module] for name, module in modules.items()}


def pin_threads(num_threads: int | None = None) -> None:
    """Set the number of compute threads of this process, by default one per available core."""
    torch.set_num_threads(num_threads or available_threads())


def device_of(model: nn.Module) -> torch.device:
    """Return the device of the model's first parameter or buffer, or the CPU if it has none."""
    return next((tensor.device for tensor in (*model.parameters(), *model.buffers())), torch.device("cpu"))


def floating_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of the images that a model takes: that of its parameters if they share one, else float32."""
    # Buffers count only without parameters: quantized layers, whose weights are buffers, cast their own inputs.
    dtypes = {tensor.dtype for tensor in [*model.parameters()] or [*model.buffers()] if tensor.is_floating_point()}
    return dtypes.pop() if len(dtypes) == 1 else torch.float32


def on_device(model: nn.Module, device: str) -> nn.Module:
    """Move `model` to a device, and make float32 exact for the whole process: by default CUDA rounds to ten bits.

    Raises:
        RunError: the device was there when the run began, and is no longer.
    """
    if device == "cuda":
        if not torch.cuda.is_available():
            raise RunError("torch finds no CUDA device: use device cpu, or resume where there is one")
        # After setting `fp32_precision` instead, exporting a model fails in torch 2.11 to 2.13, as it reads the older
        # switch.
        torch.backends.cudnn.allow_tf32 = False
        torch.backends.cuda.matmul.allow_tf32 = False
    return model.to(device)


def random_batch(spec: InputSpec, batch_size: int, *, seed: int = 0) -> Tensor:
    """Return standard normal noise in the model's input shape: (batch, channels, height, width), float32."""
    return torch.randn(spec.batch(batch_size), generator=torch.Generator().manual_seed(seed))


def logits_of(model: nn.Module, pixel_values: Tensor) -> Tensor:
    """Return the logits in eval mode, in float32 on the CPU; the model's mode is restored."""
    images = pixel_values.to(device_of(model), floating_dtype(model))
    with preserving_state(model), torch.inference_mode():
        return model.eval()(pixel_values=images).logits.float().cpu()


def choices(logits: Tensor, model: nn.Module | None) -> Tensor:
    """Return the logits of independent choices, (images, choices, options), for those of `model`, (images, classes).

    One choice among all classes; of a multi-label model yes or no for each class, whose softmax is the class's sigmoid.
    """
    is_multi_label = getattr(getattr(model, "config", None), "problem_type", None) == MULTI_LABEL
    return torch.stack([logits, torch.zeros_like(logits)], dim=-1) if is_multi_label else logits[:, None]


def divergences(expected: Tensor, logits: Tensor, model: nn.Module | None = None) -> Tensor:
    """Return the KL divergence of each image's `choices` in nats; both are (images, classes), of models such as `model`."""
    log_p, log_q = (torch.log_softmax(choices(values, model), dim=-1) for values in (expected, logits))
    return (log_p.exp() * (log_p - log_q)).flatten(1).sum(1)


def mean_kl(expected: Tensor, logits: Tensor, model: nn.Module | None = None) -> float:
    """Return the mean of `divergences` over images."""
    return float(divergences(expected.double(), logits.double(), model).mean())


def relative_distance(found: Tensor, expected: Tensor) -> float:
    """Return ||found - expected|| / ||expected|| of logits."""
    return float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny))


def following_norms(model: nn.Module, consumers: Collection[str], image: Tensor) -> dict[str, str]:
    """Return, by consumer, the batch norm with running statistics whose input is that consumer's output, if there is one."""
    modules = model.named_modules()
    norms = [name for name, module in modules if isinstance(module, _BatchNorm) and module.track_running_stats]
    outputs: list[tuple[str, Any]] = []
    norm_of: dict[str, str] = {}

    def match_norm(norm: str, inputs: Any) -> None:
        norm_of.update({consumer: norm for consumer, output in outputs if output is inputs})

    recorded = watching(model, consumers, after=lambda name, _inputs, output: outputs.append((name, output)))
    with watching(model, norms, before=match_norm), recorded:
        model(pixel_values=image)
    return norm_of


def has_bias(layer: nn.Module) -> bool:
    """Return whether `layer` adds a bias."""
    return "bias" in dict(layer.named_parameters(recurse=False))


def border_of(layer: nn.Conv2d) -> Sequence[int]:
    """Return the pixels that `layer` pads at the left, right, top and bottom, as `functional.pad` takes them."""
    return layer._reversed_padding_repeated_twice  # pyright: ignore[reportPrivateUsage]
