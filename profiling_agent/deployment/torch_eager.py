"""torch as it is: the runtime that is always there. torch itself is imported when a model is prepared or opened."""

from pathlib import Path
from typing import TYPE_CHECKING

from profiling_agent.artifacts.recipe import Recipe
from profiling_agent.deployment.protocol import MODULE, Batch, OperatorTime
from profiling_agent.records import Scheme

if TYPE_CHECKING:
    from profiling_agent.deployment.torch_session import TorchSession


CONVERSION = "profiling_agent.deployment.torch_conversion:write_deployment"


def missing() -> str | None:
    """Return None: torch is required."""
    return None


def schemes(device: str) -> tuple[Scheme, ...]:
    """Return the schemes of a device; int8 kernels are the CPU's."""
    if device == "cuda":
        return ("float32", "bfloat16", "float16")
    return ("float32", "bfloat16", "float16", "dynamic")


def open(folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> "TorchSession":  # noqa: ARG001 (every runtime's name and signature)
    """Open a saved folder; without `num_threads` the process keeps its own."""
    return _session(folder, device, num_threads)


def _session(folder: Path, device: str, num_threads: int | None) -> "TorchSession":
    from profiling_agent.artifacts.load import load_module
    from profiling_agent.deployment.torch_session import TorchSession
    from profiling_agent.modules.inference import on_device, pin_threads

    if num_threads:
        pin_threads(num_threads)
    return TorchSession(on_device(load_module(folder, verify=False), device), device=device)


def operator_times(
    folder: Path,
    recipe: Recipe,  # noqa: ARG001 (every runtime's name and signature)
    pixel_values: Batch,
    *,
    num_threads: int,
    passes: int,
) -> list[OperatorTime]:
    """Return the modules of a saved model, each without its children: the median over `passes`."""
    from profiling_agent.modules.layers import layer_latency

    session = _session(folder, "cpu", num_threads)
    took = layer_latency(session.module, session.to_device(pixel_values), passes=passes)
    return [OperatorTime(names=(MODULE + name,), ms=ms) for name, ms in took.items()]
