"""Registry of runtimes: their protocol, shared batches and layer choices, and layer times. Imports no torch."""

import importlib
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol, cast, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from profiling_agent.errors import ArtifactError
from profiling_agent.runtimes.artifact import Recipe, open_folder
from profiling_agent.schemas import EVERYTHING, Deployment, InputSpec, QuantizationRecommendation, RuntimeName, Scheme

Batch = NDArray[np.float32]
# Names of input and output in exported graphs.
INPUT, OUTPUT = "pixel_values", "logits"
# Prefix of the model's modules in exported graphs: the exported wrapper holds the model under this name.
MODULE = "model."


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A float32 model to be converted for a deployment.

    `module` is in eval mode on the CPU, `recipe` that of its saved folder, `calibration` float32 images of shape
    (n, channels, height, width), `onnx` the exported model, or None if it couldn't be exported.
    """

    module: Any
    recipe: Recipe
    processor: Any
    calibration: Batch
    batch_size: int
    onnx: Path | None = None
    device: str = "cpu"


class ModelSession(Protocol):
    """An opened model; `fixed_size` is the only batch size that it takes, or None for any size."""

    fixed_size: int | None

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        ...

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        """Return a function that runs these images once, waits for the result, and returns the milliseconds."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OperatorTime:
    """Time of one operator in a pass; `names` are its names in the graphs that were given to the runtime.

    A name that begins with `MODULE` is the layer itself; all others are nodes of an exported graph.
    """

    names: tuple[str, ...]
    ms: float


@runtime_checkable
class OnDevice(Protocol):
    """A session of torch or one pass of it, which reports its memory on the device."""

    def peak_bytes(self) -> int | None:
        """Return the peak of this process's allocations on the device; None on the CPU, where the system reports it."""
        ...


@runtime_checkable
class Enqueues(Protocol):
    """A session that can run passes on a GPU without waiting for each."""

    def enqueued(self, pixel_values: Batch, passes: int) -> float | None:
        """Return the milliseconds of a pass, by events around `passes` enqueued without waiting; None on the CPU."""
        ...


class Runtime(Protocol):
    """A runtime's module in this package.

    `CONVERSION` is the "module:function" that converts a float32 model, so that opening one doesn't import it. A runtime
    that times the parts of a pass also has `operator_times`.
    """

    CONVERSION: str

    def missing(self, device: str) -> str | None:
        """Return what has to be installed for "cpu" or "cuda", as one line, or None if nothing."""
        ...

    def schemes(self, device: str) -> tuple[Scheme, ...]:
        """Return the schemes that it has on "cpu" or "cuda"."""
        ...

    def open(self, folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> ModelSession:
        """Open a saved folder; without `num_threads` the process or the library chooses.

        Raises:
            ArtifactError: the files can't be read.
        """
        ...


def missing_packages(packages: Sequence[str], *, extra: str) -> str | None:
    """Return the line on how to install the first missing one of `packages`, or None; imports none."""
    for name in packages:
        if find_spec(name) is None:
            return f"{name} isn't installed: pip install profiling-agent[{extra}]"
    return None


def noise_batch(spec: InputSpec, batch_size: int, *, seed: int = 0) -> Batch:
    """Return standard normal noise in the model's input shape: (batch, channels, height, width), float32."""
    return np.random.default_rng(seed).standard_normal(spec.batch(batch_size), dtype=np.float32)


def check_images(spec: InputSpec, pixel_values: Batch) -> None:
    """Raise ArtifactError unless these are images (n, channels, height, width) of the model's size."""
    expected = (spec.channels, spec.height, spec.width)
    if pixel_values.ndim != 4 or pixel_values.shape[1:] != expected or not len(pixel_values):
        channels, height, width = expected
        raise ArtifactError(
            f"the model takes pixel_values of shape (n, {channels}, {height}, {width}), not "
            f"{tuple(pixel_values.shape)!r}: prepare images with its processor"
        )


def check_fixed_batch(fixed_size: int | None, pixel_values: Batch) -> None:
    """Raise ArtifactError if the file was exported for another number of images."""
    if fixed_size is not None and len(pixel_values) != fixed_size:
        raise ArtifactError(
            f"the model was exported for batches of exactly {fixed_size} images, not {len(pixel_values)}: "
            "fill the batch up, or export it with a dynamic batch"
        )


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


MODULES: dict[RuntimeName, str] = {
    "eager": "profiling_agent.runtimes.torch_eager",
    "graphed": "profiling_agent.runtimes.torch_graphed",
    "inductor": "profiling_agent.runtimes.torch_inductor",
    "onnxruntime": "profiling_agent.runtimes.onnx_runtime",
    "openvino": "profiling_agent.runtimes.open_vino",
}


def runtime(name: RuntimeName) -> Runtime:
    """Return a runtime, installed or not."""
    return cast("Runtime", importlib.import_module(MODULES[name]))


def missing(name: RuntimeName, device: str = "cpu") -> str | None:
    """Return what has to be installed for a runtime on a device, as one line, or None."""
    return runtime(name).missing(device)


def reads_onnx(deployment: Deployment) -> bool:
    """Return whether a deployment is made from float32 ONNX; OpenVINO's `static` is exported with int8 layers instead."""
    return deployment.runtime == "onnxruntime" or (deployment.runtime == "openvino" and deployment.scheme != "static")


def open_session(folder: Path, *, device: str = "cpu", num_threads: int | None = None) -> ModelSession:
    """Open a saved model in its runtime, without a check of hashes and golden logits.

    Raises:
        ArtifactError: a file is missing or unreadable, or the runtime isn't installed.
    """
    recipe = open_folder(folder, verify=False)
    name = recipe.deployment.runtime
    if line := missing(name, device):
        raise ArtifactError(f"{str(folder)!r} was saved for {name}: {line}")
    if device != "cpu" and recipe.deployment.scheme not in runtime(name).schemes(device):
        raise ArtifactError(
            f"{str(folder)!r} is for {recipe.deployment.name}, which has no kernels on {device}: use device cpu"
        )
    return runtime(name).open(folder, recipe, device=device, num_threads=num_threads)


# Enough for a median that one disturbance doesn't move; a warm-up pass comes first.
NUM_PASSES = 5


def layer_times(folder: Path, exported: Path | None, *, batch_size: int, num_threads: int) -> dict[str, float]:
    """Return the milliseconds of each layer of a saved model in a pass on the CPU, by its name in the model.

    `exported` is the ONNX file given to the runtime, whose nodes identify the layers; without it the runtime must.

    Raises:
        ArtifactError: the runtime can't time operators, or can't read or run the model.
    """
    recipe = open_folder(folder, verify=False)
    layer_by_node: dict[str, str] = {}
    operator_times: Any = getattr(runtime(recipe.deployment.runtime), "operator_times", None)
    if operator_times is None:
        raise ArtifactError(f"{recipe.deployment.runtime} doesn't tell what the parts of a pass take")
    if exported is not None:
        import onnx

        from profiling_agent.runtimes.onnx_graph import layers_by_name

        layer_by_node = layers_by_name(onnx.load(exported, load_external_data=False))
    operators = operator_times(
        folder, recipe, noise_batch(recipe.input, batch_size), num_threads=num_threads, passes=NUM_PASSES
    )
    return by_layer(operators, layer_by_node)


def by_layer(operators: Sequence[OperatorTime], known: Mapping[str, str]) -> dict[str, float]:
    """Return the milliseconds of each layer; unknown operators, mostly fused with the layer before them, count with it."""
    times: defaultdict[str, float] = defaultdict(float)
    layer = ""
    for operator in operators:
        layers = (name.removeprefix(MODULE) if name.startswith(MODULE) else known.get(name) for name in operator.names)
        layer = next((name for name in layers if name is not None), layer)
        times[layer] += operator.ms
    return dict(times)
