"""Torch's runtimes: eager, CUDA graphs and torch.compile. torch itself is imported when a model is prepared or opened."""

import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from profiling_agent.runtimes.artifact import WEIGHTS, PreparedFiles, Recipe
from profiling_agent.runtimes.base import MODULE, Batch, OperatorTime, Runtime, Source
from profiling_agent.schemas import Deployment

if TYPE_CHECKING:
    from torch import nn

    from profiling_agent.runtimes.torch_session import InductorSession, TorchSession

# FBGEMM has int8 kernels for AVX-512's VNNI only (source: docs/facts.md).
TORCH_VNNI = ("avx512_vnni",)
# Compilers in the order that torch tries them; CXX names another one.
COMPILERS = ("g++", "clang++")


class TorchRuntime(Runtime):
    """A runtime that executes torch modules, always available."""

    files = (WEIGHTS,)
    is_torch = True

    @classmethod
    def convert(cls, source: Source, deployment: Deployment, folder: Path) -> PreparedFiles:
        """Write `weights.safetensors`, with the chosen layers quantized."""
        from profiling_agent.runtimes.save import write_deployment

        return write_deployment(source, deployment, folder)


def _load(folder: Path, device: str, num_threads: int | None) -> "nn.Module":
    """Return the module of a saved folder on its device, run by `num_threads` threads."""
    from profiling_agent.lib.modules import on_device, pin_threads
    from profiling_agent.runtimes.torch_artifact import load_module

    if num_threads:
        pin_threads(num_threads)
    return on_device(load_module(folder, verify=False), device)


class Eager(TorchRuntime):
    """Eager torch."""

    name = "eager"
    on_cpu = ("float32", "bfloat16", "float16", "dynamic")
    # Int8 without a CUDA graph exists only on the CPU.
    on_cuda = ("float32", "tf32", "bfloat16", "float16")
    int8_instructions = TORCH_VNNI
    # Dynamic layers use 7 bits if 8 would saturate; static ones compute in float32.
    safe_kinds = ("dynamic", "static", "rowwise")
    mixture = ("dynamic", frozenset({"dynamic", "float16", "bfloat16"}))

    @classmethod
    def open(cls, folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> "TorchSession":
        """Open a saved folder; without `num_threads` the process keeps its threads."""
        from profiling_agent.runtimes.torch_session import TorchSession, memory_format, to_kernel_layout

        module, tf32 = _load(folder, device, num_threads), recipe.deployment.scheme == "tf32"
        if device != "cuda":
            return TorchSession(module, device=device)
        return TorchSession(to_kernel_layout(module), device=device, memory_format=memory_format(module), tf32=tf32)

    @classmethod
    def operator_times(
        cls, folder: Path, recipe: Recipe, pixel_values: Batch, *, num_threads: int, passes: int
    ) -> list[OperatorTime]:
        """Return the median time of each module of a saved model over `passes`, without its children."""
        from profiling_agent.lib.costs import layer_latency

        session = cls.open(folder, recipe, device="cpu", num_threads=num_threads)
        times = layer_latency(session.module, session.to_device(pixel_values), passes=passes)
        return [OperatorTime(names=(MODULE + name,), ms=ms) for name, ms in times.items()]


class Graphed(TorchRuntime):
    """Torch's own kernels in a CUDA graph, launched at once."""

    name = "graphed"
    on_cuda = ("tf32", "bfloat16", "float16", "dynamic", "float8")

    @classmethod
    def open(cls, folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> "TorchSession":
        """Open a saved folder; without `num_threads` the process keeps its threads. The CPU runs it eagerly."""
        from profiling_agent.runtimes.torch_session import GraphedSession

        if device != "cuda":
            return Eager.open(folder, recipe, device=device, num_threads=num_threads)
        return GraphedSession(_load(folder, device, num_threads), tf32=recipe.deployment.scheme == "tf32")


class Inductor(TorchRuntime):
    """torch.compile with frozen weights, compiled when opened, so only weights are stored."""

    name = "inductor"
    extra = "inductor"
    requires = packages = ("torchao",)
    on_cpu = ("float32", "bfloat16", "static")
    on_cuda = ("float32", "bfloat16", "float16", "dynamic", "float8")
    is_slow_to_convert = True
    int8_instructions = TORCH_VNNI
    safe_kinds = ("dynamic", "rowwise")
    mixture = ("static", frozenset({"static", "bfloat16"}))

    @classmethod
    def missing(cls, device: str) -> str | None:
        """Return what is missing: Triton on CUDA; on the CPU torchao's int8 patterns, or a compiler."""
        if device == "cuda":
            return (
                None
                if find_spec("triton")
                else "triton isn't installed, with which torch.compile compiles for CUDA: pip install triton"
            )
        if line := super().missing(device):
            return line
        names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
        if not any(map(shutil.which, names)):
            return (
                f"there is no {names[0]}, with which torch.compile compiles: install a C++ compiler (apt install g++)"
            )
        return None

    @classmethod
    def open(cls, folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> "InductorSession":  # noqa: ARG003
        """Open a saved folder; without `num_threads` the process keeps its threads."""
        from profiling_agent.runtimes.torch_session import InductorSession

        return InductorSession(_load(folder, device, num_threads), device=device)
