"""Eager torch runtime, always available. torch itself is imported when a model is prepared or opened."""

from pathlib import Path
from typing import TYPE_CHECKING

from profiling_agent.runtimes.artifact import Recipe
from profiling_agent.runtimes.registry import MODULE, Batch, OperatorTime
from profiling_agent.schemas import Scheme

if TYPE_CHECKING:
    from torch import nn

    from profiling_agent.runtimes.torch_session import TorchSession


CONVERSION = "profiling_agent.runtimes.save:write_deployment"


def missing(device: str) -> str | None:  # noqa: ARG001 (every runtime's name and signature)
    """Return None: torch is required."""
    return None


def schemes(device: str) -> tuple[Scheme, ...]:
    """Return the schemes available on a device; int8 without a CUDA graph exists only on the CPU."""
    if device == "cuda":
        return ("float32", "tf32", "bfloat16", "float16")
    return ("float32", "bfloat16", "float16", "dynamic")


def open(folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> "TorchSession":
    """Open a saved folder; without `num_threads` the process keeps its threads."""
    from profiling_agent.runtimes.torch_session import TorchSession, memory_format, to_kernel_layout

    module, tf32 = load(folder, device, num_threads), recipe.deployment.scheme == "tf32"
    if device != "cuda":
        return TorchSession(module, device=device)
    return TorchSession(to_kernel_layout(module), device=device, memory_format=memory_format(module), tf32=tf32)


def load(folder: Path, device: str, num_threads: int | None) -> "nn.Module":
    """Return the module of a saved folder on its device, run by `num_threads` threads."""
    from profiling_agent.modules.inference import on_device, pin_threads
    from profiling_agent.runtimes.torch_artifact import load_module

    if num_threads:
        pin_threads(num_threads)
    return on_device(load_module(folder, verify=False), device)


def operator_times(
    folder: Path,
    recipe: Recipe,
    pixel_values: Batch,
    *,
    num_threads: int,
    passes: int,
) -> list[OperatorTime]:
    """Return the median time of each module of a saved model over `passes`, without its children."""
    from profiling_agent.modules.hooks import layer_latency

    session = open(folder, recipe, device="cpu", num_threads=num_threads)
    times = layer_latency(session.module, session.to_device(pixel_values), passes=passes)
    return [OperatorTime(names=(MODULE + name,), ms=ms) for name, ms in times.items()]
