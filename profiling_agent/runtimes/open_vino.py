"""OpenVINO on the CPU: float32, bfloat16, and static int8 by our own layers or by NNCF. Opening imports no torch."""

import threading
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.machine import quota_threads
from profiling_agent.lib.third_party import foreign_code, import_openvino
from profiling_agent.runtimes.artifact import IR, IR_WEIGHTS, Recipe
from profiling_agent.runtimes.registry import MODULE, Batch, OperatorTime, check_fixed_batch, missing_packages
from profiling_agent.schemas import Scheme

# In what the parts compute that aren't int8. Without a hint OpenVINO takes bfloat16 wherever the CPU has it.
PRECISIONS: dict[Scheme, str] = {"bfloat16": "bf16"}
# A graph is compiled for each batch size, which is a few per cent faster than for any (a quarter for a small convnet at
# batch 1). Not the graphs of our int8 layers: with all shapes known OpenVINO takes their quantizing apart, and a ViT is 1.6
# to 1.9 times slower for it (2026.4.1).
ANY = 0
# Sizes that are kept at least and at most; in between as many as have room for their weights, which each lays out anew.
MIN_SIZES, MAX_SIZES, MAX_KEPT_BYTES = 2, 8, 2**31
ANY_SIZE: frozenset[Scheme] = frozenset({"static"})
# What becomes of layers in its graphs, what lies between them and their weights, and where an operator that was fused notes what it was made of.
LAYER_TYPES = ("MatMul", "Convolution", "GroupConvolution")
WEIGHED = ("Convert", "FakeQuantize", "Multiply", "Reshape", "Subtract", "Transpose")
ORIGINALS = "originalLayersNames"


CONVERSION = "profiling_agent.runtimes.open_vino_conversion:write_deployment"


def missing(device: str) -> str | None:  # noqa: ARG001 (every runtime's name and signature)
    """Return what has to be installed, or None."""
    return missing_packages(("openvino",), extra="openvino")


def schemes(device: str) -> tuple[Scheme, ...]:
    """Return the schemes of a device."""
    return ("float32", "bfloat16", "static", "static_nncf") if device == "cpu" else ()


def num_kept(weight_bytes: int) -> int:
    """Return for how many batch sizes a graph with so many bytes of weights stays compiled at a time."""
    return min(MAX_SIZES, max(MIN_SIZES, MAX_KEPT_BYTES // max(weight_bytes, 1)))


class OpenVinoSession:
    """An OpenVINO graph, compiled for each batch size that it is given, or once for all; threads that share it take turns."""

    def __init__(
        self, core: Any, path: Path, *, scheme: Scheme, num_threads: int | None, profiled: bool = False
    ) -> None:
        """Read the graph; ArtifactError where it can't be read. One that is `profiled` counts what its operators take."""
        self._is_for_any_size = scheme in ANY_SIZE
        self._core, self._path = core, path
        self._properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": PRECISIONS.get(scheme, "f32"),
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "PERF_COUNT": profiled,
        }
        if threads := num_threads or quota_threads():
            self._properties["INFERENCE_NUM_THREADS"] = threads
        # What was used last stands last. A request has one place for its images and one for its answer: whoever finds one
        # here has the lock until the answer is taken.
        self._requests: dict[int, Any] = {}
        self._lock = threading.Lock()
        size = self._read().input(0).get_partial_shape()[0]
        self.fixed_size: int | None = size.get_length() if size.is_static else None
        self._num_kept = num_kept(path.with_name(IR_WEIGHTS).stat().st_size)

    def _refuse(self, said: str) -> ArtifactError:
        return ArtifactError(f"OpenVINO can't read {str(self._path)!r} ({said}): save it again")

    def _read(self) -> Any:
        with foreign_code(self._refuse):
            return self._core.read_model(self._path)

    def _request(self, pixel_values: Batch) -> Any:
        """Return an infer request for batches of this shape, to whoever has the lock."""
        check_fixed_batch(self.fixed_size, pixel_values)
        size = ANY if self._is_for_any_size else len(pixel_values)
        request = self._requests.pop(size, None)
        if request is None:
            model = self._read()
            while len(self._requests) >= self._num_kept:
                del self._requests[next(iter(self._requests))]
            with foreign_code(self._refuse):
                if size != ANY:
                    model.reshape(list(pixel_values.shape))
                compiled = self._core.compile_model(model, "CPU", self._properties)
                request = compiled.create_infer_request()
        self._requests[size] = request
        return request

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        with self._lock:
            request = self._request(pixel_values)
            with foreign_code(lambda said: ArtifactError(f"OpenVINO can't run the model: {said}")):
                (logits,) = request.infer([pixel_values]).values()
            return logits.copy()

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        """Return a function that runs these images once and returns the milliseconds it took."""
        with self._lock:
            request, feed = self._request(pixel_values), [pixel_values]

        def run_once() -> float:
            started = time.perf_counter()
            request.infer(feed, share_inputs=True, share_outputs=True)
            return (time.perf_counter() - started) * 1e3

        return run_once

    def operator_times(self, pixel_values: Batch, passes: int) -> list[OperatorTime]:
        """Return the operators of a profiled graph in their order: the median over `passes`."""
        with self._lock:
            request = self._request(pixel_values)
        took: dict[tuple[int, str], list[float]] = {}
        # The first pass finds nothing where it will be, and isn't counted.
        for number in range(passes + 1):
            self.run(pixel_values)
            for place, row in enumerate(request.get_profiling_info() if number else ()):
                took.setdefault((place, row.node_name), []).append(row.real_time.total_seconds() * 1e3)
        compiled, layers = request.get_compiled_model().get_runtime_model(), layers_by_weight(self._read())
        made_of = {
            op.get_friendly_name(): noted[ORIGINALS].astype(str).split(",")
            for op in compiled.get_ops()
            if ORIGINALS in (noted := op.get_rt_info())
        }
        names = {name: [original(part) for part in (name, *made_of.get(name, ()))] for _, name in took}
        return [
            OperatorTime(names=(*(layers[part] for part in names[name] if part in layers), *names[name]), ms=median(ms))
            for (_, name), ms in took.items()
        ]


def layers_by_weight(model: Any) -> dict[str, str]:
    """Return by the names of operators the layers whose weights they read, as far as weights still have the names that they were exported with."""
    found: dict[str, str] = {}
    for op in model.get_ops():
        if op.get_type_name() not in LAYER_TYPES:
            continue
        # Weights come second, after what they are quantized by.
        sources = [op.input(1).get_source_output().get_node()]
        while sources:
            source = sources.pop()
            if source.get_type_name() in WEIGHED:
                sources += [taken.get_source_output().get_node() for taken in source.inputs()]
            elif source.get_type_name() == "Constant" and (name := source.get_friendly_name()).startswith(MODULE):
                found[original(op.get_friendly_name())] = name.rpartition(".")[0]
    return found


def original(name: str) -> str:
    """Return the exported node's name; of one that became several, as a convolution and its bias, all begin with it."""
    return name.split("/", maxsplit=1)[0]


def open(folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> OpenVinoSession:  # noqa: ARG001 (every runtime's name and signature)
    """Open a saved folder; without `num_threads` there is a thread for each core that a container's quota has time for."""
    core = import_openvino().Core()
    return OpenVinoSession(core, folder / IR, scheme=recipe.deployment.scheme, num_threads=num_threads)


def operator_times(
    folder: Path, recipe: Recipe, pixel_values: Batch, *, num_threads: int, passes: int
) -> list[OperatorTime]:
    """Return the operators of the graph that OpenVINO makes of a saved one, in their order: the median over `passes`."""
    scheme, core = recipe.deployment.scheme, import_openvino().Core()
    session = OpenVinoSession(core, folder / IR, scheme=scheme, num_threads=num_threads, profiled=True)
    return session.operator_times(pixel_values, passes)
