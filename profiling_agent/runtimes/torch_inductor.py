"""torch.compile runtime with frozen weights, compiled when opened, so only weights are stored. Imports no torch."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from profiling_agent.runtimes import torch_eager
from profiling_agent.runtimes.artifact import Recipe
from profiling_agent.runtimes.registry import missing_packages
from profiling_agent.schemas import Scheme

if TYPE_CHECKING:
    from profiling_agent.runtimes.torch_session import InductorSession


# Compilers in the order that torch tries them; CXX names another one.
COMPILERS = ("g++", "clang++")


CONVERSION = "profiling_agent.runtimes.save:write_deployment"


def missing(device: str) -> str | None:
    """Return what has to be installed, or None: Triton on CUDA; on the CPU torchao's int8 patterns, and a compiler."""
    if device == "cuda":
        return (
            None
            if find_spec("triton")
            else "triton isn't installed, with which torch.compile compiles for CUDA: pip install triton"
        )
    if line := missing_packages(("torchao",), extra="inductor"):
        return line
    names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
    if not any(map(shutil.which, names)):
        return f"there is no {names[0]}, with which torch.compile compiles: install a C++ compiler (apt install g++)"
    return None


def schemes(device: str) -> tuple[Scheme, ...]:
    """Return the schemes available on a device."""
    on_cuda: tuple[Scheme, ...] = ("float32", "bfloat16", "float16", "dynamic", "float8")
    return on_cuda if device == "cuda" else ("float32", "bfloat16", "static")


def open(folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> "InductorSession":  # noqa: ARG001 (every runtime's name and signature)
    """Open a saved folder; without `num_threads` the process keeps its threads."""
    from profiling_agent.runtimes.torch_session import InductorSession

    return InductorSession(torch_eager.load(folder, device, num_threads), device=device)
