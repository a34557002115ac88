"""Interface of a runtime, and the runtimes by name. Imports no torch."""

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from profiling_agent.lib.machine import environment
from profiling_agent.schemas import EVERYTHING, Deployment, InputSpec, QuantizationRecommendation, RuntimeName, Scheme

if TYPE_CHECKING:
    from profiling_agent.runtimes.artifact import QuantizedLayer, Recipe

Batch = NDArray[np.float32]
# Names of input and output in exported graphs.
INPUT, OUTPUT = "pixel_values", "logits"
# Prefix of the model's modules in exported graphs: the exported wrapper holds the model under this name.
MODULE = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A float32 model to be converted for a deployment.

    `module` is in eval mode on the CPU, `recipe` that of its saved folder, `calibration` float32 images of shape
    (n, channels, height, width), `onnx` the path of the exported model for runtimes that read it.
    """

    module: Any
    recipe: "Recipe"
    processor: Any
    calibration: Batch
    batch_size: int
    onnx: Any = None
    device: str = "cpu"


class ModelSession(Protocol):
    """An opened model."""

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        ...

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        """Return a function that runs these images once, waits for the result, and returns the milliseconds."""
        ...

    def peak_bytes(self) -> int | None:
        """Return the peak of this process's allocations on the device; None on the CPU, where the system reports it."""
        return None

    def enqueued(self, pixel_values: Batch, passes: int) -> float | None:  # noqa: ARG002
        """Return the milliseconds of a pass, by events around `passes` enqueued without waiting; None on the CPU."""
        return None


class Runtime(ABC):
    """The facts of one runtime; a subclass that sets `name` registers itself.

    One of the CPU flags `int8_instructions` lets its kernels add int8 products in 32 bits. Without them, 16-bit sums of
    two products saturate unless one factor has only 7 bits. Only layers of `saturating_kinds` can.
    """

    name: ClassVar[RuntimeName]
    # Packages that it can't run without, and their extra.
    requires: ClassVar[tuple[str, ...]] = ()
    extra: ClassVar[str] = ""
    # Files that it reads its weights from, in formats that can't carry code; the only export format that takes its
    # graphs.
    files: ClassVar[tuple[str, ...]]
    graph_format: ClassVar[str | None] = None
    # Its schemes, and those whose files are made from float32 ONNX.
    on_cpu: ClassVar[tuple[Scheme, ...]] = ()
    on_cuda: ClassVar[tuple[Scheme, ...]] = ()
    from_onnx: ClassVar[tuple[Scheme, ...]] = ()
    # Whether its processes import torch, and whether it compiles for a minute or two.
    is_torch: ClassVar[bool] = False
    is_slow_to_convert: ClassVar[bool] = False
    int8_instructions: ClassVar[tuple[str, ...]] = ()
    saturating_kinds: ClassVar[tuple[str, ...]] = ("dynamic", "static")
    # The scheme by which it executes a mixture of layer types, and the schemes that may be mixed.
    mixture: ClassVar[tuple[Scheme, frozenset[Scheme]] | None] = None

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "name" in vars(cls):
            _REGISTERED[cls.name] = cls

    @classmethod
    def missing(cls, device: str) -> str | None:  # noqa: ARG003
        """Return what has to be installed for "cpu" or "cuda", as one line, or None if nothing."""
        absent = [name for name in cls.requires if find_spec(name) is None]
        return f"{absent[0]} isn't installed: pip install profiling-agent[{cls.extra}]" if absent else None

    @classmethod
    def schemes(cls, device: str) -> tuple[Scheme, ...]:
        """Return the schemes that it has on "cpu" or "cuda"."""
        return cls.on_cuda if device == "cuda" else cls.on_cpu

    @classmethod
    @abstractmethod
    def convert(cls, source: Source, deployment: Deployment, folder: Path) -> dict[str, Any]:
        """Write the files of a deployment; return fields of its recipe: `quantized` and torch's `folded`.

        Raises PlanError if a pattern hits no layer, or QuantizationError.
        """

    @classmethod
    @abstractmethod
    def open(cls, folder: Path, recipe: "Recipe", *, device: str, num_threads: int | None) -> ModelSession:
        """Open a saved folder; without `num_threads` the library chooses."""

    @classmethod
    def has_vnni(cls, cpu_flags: Collection[str]) -> bool:
        """Return whether its int8 kernels add products in 32 bits on a CPU with these Linux flags."""
        return not set(cls.int8_instructions).isdisjoint(cpu_flags)

    @classmethod
    def saturates(cls) -> bool:
        """Return whether 8 bits for both factors are too many for its kernels on this CPU."""
        return not cls.has_vnni(environment().cpu_flags)

    @classmethod
    def needed_instructions(cls, layers: Iterable["QuantizedLayer"]) -> tuple[str, ...]:
        """Return the CPU flags of which one prevents saturated int8 sums in `layers`; none if they can't saturate."""
        can_saturate = any(
            layer.dtype == "qint8" and not layer.reduce_range and layer.kind in cls.saturating_kinds for layer in layers
        )
        return cls.int8_instructions if can_saturate else ()


_REGISTERED: dict[RuntimeName, type[Runtime]] = {}


def runtime(name: RuntimeName) -> type[Runtime]:
    """Return a runtime, installed or not."""
    return _REGISTERED[name]


def missing(name: RuntimeName, device: str = "cpu") -> str | None:
    """Return what has to be installed for a runtime on a device, as one line, or None."""
    return runtime(name).missing(device)


def reads_onnx(deployment: Deployment) -> bool:
    """Return whether a deployment is made from float32 ONNX."""
    return deployment.scheme in runtime(deployment.runtime).from_onnx


# The recommendation for all layers that gives a scheme; float32 and tf32 need none.
RECOMMENDED: Mapping[Scheme, Mapping[str, str]] = {
    "bfloat16": {"quantization_type": "cast", "dtype": "bfloat16"},
    "float16": {"quantization_type": "dynamic", "dtype": "float16"},
    "dynamic": {"quantization_type": "dynamic", "dtype": "qint8"},
    "float8": {"quantization_type": "dynamic", "dtype": "float8"},
    "static": {"quantization_type": "static", "dtype": "qint8"},
    "static_nncf": {"quantization_type": "static", "dtype": "qint8"},
}


def recommend(scheme: Scheme, layers: str = EVERYTHING) -> tuple[QuantizationRecommendation, ...]:
    """Return the recommendation that brings the layers matching `layers` to `scheme`."""
    if scheme not in RECOMMENDED:
        return ()
    return (QuantizationRecommendation.model_validate({**RECOMMENDED[scheme], "layer": layers}),)


def recommended(deployment: Deployment) -> tuple[QuantizationRecommendation, ...]:
    """Return the deployment's recommendations or, if it has none, its scheme for every layer."""
    return deployment.recommendations or recommend(deployment.scheme)


def noise_batch(spec: InputSpec, batch_size: int, *, seed: int = 0) -> Batch:
    """Return standard normal noise in the model's input shape: (batch, channels, height, width), float32."""
    return np.random.default_rng(seed).standard_normal(spec.batch(batch_size), dtype=np.float32)


def timed(run: Callable[[], object]) -> Callable[[], float]:
    """Return a function that calls `run` once and returns the milliseconds it took."""

    def run_once() -> float:
        started = time.perf_counter()
        run()
        return (time.perf_counter() - started) * 1e3

    return run_once
