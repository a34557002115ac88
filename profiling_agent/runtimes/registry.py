"""Runtime protocol: say what is missing, write a model's files, open them, run. No torch here."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from profiling_agent.artifacts.recipe import Recipe
from profiling_agent.records import Scheme

Batch = NDArray[np.float32]
# What goes in and what comes out, by the names that exported graphs have for them.
INPUT, OUTPUT = "pixel_values", "logits"
# What the names of the model's parts begin with in exported graphs: the exported function holds the model under this name.
MODULE = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A float32 model that is to be brought into a deployment.

    `module` is the model in eval mode on the CPU, `recipe` that of its saved folder, `calibration` float32 images of
    shape (n, channels, height, width), `onnx` the same model as ONNX where it could be exported.
    """

    module: Any
    recipe: Recipe
    processor: Any
    calibration: Batch
    batch_size: int
    onnx: Path | None = None
    device: str = "cpu"


class ModelSession(Protocol):
    """An opened model; `fixed_size` is the only number of images that it takes at a time, None where it takes any."""

    fixed_size: int | None

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        ...

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        """Return a function that runs these images once and, when it is done, returns the milliseconds it took."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """What one operator of a runtime's own graph takes of a pass; `names` are those it has in graphs that the runtime was given.

    A name that begins with `MODULE` is the layer itself; all others are of an exported graph.
    """

    names: tuple[str, ...]
    ms: float


@runtime_checkable
class OnDevice(Protocol):
    """What knows the memory that it takes of a device: a session of torch, or a pass of one."""

    def peak_bytes(self) -> int | None:
        """Return the most bytes that this process has had allocated on the device; None on the CPU, where the system tells."""
        ...


@runtime_checkable
class Enqueues(Protocol):
    """A session that can run passes on a GPU without waiting for each."""

    def enqueued(self, pixel_values: Batch, passes: int) -> float | None:
        """Return the milliseconds of a pass, by events around `passes` enqueued without waiting; None on the CPU."""
        ...


class Runtime(Protocol):
    """A module of this package, one for each runtime.

    `CONVERSION` is the "module:function" that brings a float32 model into a deployment, so that opening one doesn't import
    it. One that tells what the parts of a pass take has `operator_times` too.
    """

    CONVERSION: str

    def missing(self, device: str) -> str | None:
        """Return what has to be installed for "cpu" or "cuda", as one line, or None where the runtime can be used."""
        ...

    def schemes(self, device: str) -> tuple[Scheme, ...]:
        """Return the schemes that it has on "cpu" or "cuda"."""
        ...

    def open(self, folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> ModelSession:
        """Open a saved folder; without `num_threads`, the threads are those of the process or the library.

        Raises:
            ArtifactError: the files can't be read.
        """
        ...


def missing_packages(packages: Sequence[str], *, extra: str) -> str | None:
    """Return the line that says how to install the first of `packages` that isn't there, or None; imports none."""
    for name in packages:
        if find_spec(name) is None:
            return f"{name} isn't installed: pip install profiling-agent[{extra}]"
    return None
