"""CUDA graph runtime: torch's own kernels, launched at once. torch itself is imported when a model is opened."""

from pathlib import Path
from typing import TYPE_CHECKING

from profiling_agent.runtimes import torch_eager
from profiling_agent.runtimes.artifact import Recipe
from profiling_agent.schemas import Scheme

if TYPE_CHECKING:
    from profiling_agent.runtimes.torch_session import TorchSession


CONVERSION = "profiling_agent.runtimes.save:write_deployment"


def missing(device: str) -> str | None:  # noqa: ARG001 (every runtime's name and signature)
    """Return None: torch is required."""
    return None


def schemes(device: str) -> tuple[Scheme, ...]:
    """Return the schemes available on a device; the CPU has no graphs."""
    return ("tf32", "bfloat16", "float16", "dynamic", "float8") if device == "cuda" else ()


def open(folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> "TorchSession":
    """Open a saved folder; without `num_threads` the process keeps its threads. The CPU runs it eagerly."""
    from profiling_agent.runtimes.torch_session import GraphedSession

    if device != "cuda":
        return torch_eager.open(folder, recipe, device=device, num_threads=num_threads)
    return GraphedSession(torch_eager.load(folder, device, num_threads), tf32=recipe.deployment.scheme == "tf32")
