"""OpenVINO sessions on the CPU: float32, bfloat16, and static int8 by our own layers or by NNCF. Imports no torch."""

import threading
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.logs import import_openvino, third_party_errors
from profiling_agent.lib.machine import quota_threads
from profiling_agent.runtimes.artifact import IR, IR_WEIGHTS, PreparedFiles, Recipe
from profiling_agent.runtimes.base import (
    MODULE,
    Batch,
    OperatorTime,
    Runtime,
    Source,
    check_fixed_batch,
    timed,
)
from profiling_agent.schemas import Deployment, Scheme

# Precision of the parts that aren't int8. Without a hint OpenVINO takes bfloat16 wherever the CPU has it.
PRECISIONS: dict[Scheme, str] = {"bfloat16": "bf16"}
# Key of a graph for any batch size. Others are compiled for each size, which is a few per cent faster (a quarter for a
# small convnet at batch 1). Not the graphs of our int8 layers: with all shapes known OpenVINO splits up their
# quantization, and a ViT is 1.6 to 1.9 times slower for it (2026.4.1).
ANY_SIZE_KEY = 0
# Compiled sizes to keep, at least and at most; in between as many as fit, each with its own copy of the weights.
MIN_SIZES, MAX_SIZES, MAX_KEPT_BYTES = 2, 8, 2**31
ANY_SIZE_SCHEMES: frozenset[Scheme] = frozenset({"static"})
# Layers in its graphs, operators between a layer and its weights, and the key under which a fused operator lists its originals.
LAYER_TYPES = ("MatMul", "Convolution", "GroupConvolution")
WEIGHT_OPS = ("Convert", "FakeQuantize", "Multiply", "Reshape", "Subtract", "Transpose")
ORIGINALS_KEY = "originalLayersNames"


def num_kept(weight_bytes: int) -> int:
    """Return how many batch sizes of a graph with this many bytes of weights stay compiled."""
    return min(MAX_SIZES, max(MIN_SIZES, MAX_KEPT_BYTES // max(weight_bytes, 1)))


class OpenVinoSession:
    """An OpenVINO graph, compiled for each batch size or once for all; threads that share it take turns."""

    def __init__(
        self, core: Any, path: Path, *, scheme: Scheme, num_threads: int | None, profiled: bool = False
    ) -> None:
        """Read the graph; ArtifactError if it can't be read. A `profiled` one measures the times of its operators."""
        self._is_for_any_size = scheme in ANY_SIZE_SCHEMES
        self._core, self._path = core, path
        self._properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": PRECISIONS.get(scheme, "f32"),
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "PERF_COUNT": profiled,
        }
        if threads := num_threads or quota_threads():
            self._properties["INFERENCE_NUM_THREADS"] = threads
        # The most recently used comes last. A request has one buffer for images and one for logits: its user holds the
        # lock until the logits are copied.
        self._requests: dict[int, Any] = {}
        self._lock = threading.Lock()
        size = self._read().input(0).get_partial_shape()[0]
        self.fixed_size: int | None = size.get_length() if size.is_static else None
        self._num_kept = num_kept(path.with_name(IR_WEIGHTS).stat().st_size)

    def _read_error(self, message: str) -> ArtifactError:
        return ArtifactError(f"OpenVINO can't read {str(self._path)!r} ({message}): save it again")

    def _read(self) -> Any:
        with third_party_errors(self._read_error):
            return self._core.read_model(self._path)

    def _request(self, pixel_values: Batch) -> Any:
        """Return an infer request for batches of this shape; the caller holds the lock."""
        check_fixed_batch(self.fixed_size, pixel_values)
        size = ANY_SIZE_KEY if self._is_for_any_size else len(pixel_values)
        request = self._requests.pop(size, None)
        if request is None:
            model = self._read()
            while len(self._requests) >= self._num_kept:
                del self._requests[next(iter(self._requests))]
            with third_party_errors(self._read_error):
                if size != ANY_SIZE_KEY:
                    model.reshape(list(pixel_values.shape))
                compiled = self._core.compile_model(model, "CPU", self._properties)
                request = compiled.create_infer_request()
        self._requests[size] = request
        return request

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        with self._lock:
            request = self._request(pixel_values)
            with third_party_errors(lambda message: ArtifactError(f"OpenVINO can't run the model: {message}")):
                (logits,) = request.infer([pixel_values]).values()
            return logits.copy()

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        """Return a function that runs these images once and returns the milliseconds it took."""
        with self._lock:
            request, feed = self._request(pixel_values), [pixel_values]
        return timed(lambda: request.infer(feed, share_inputs=True, share_outputs=True))

    def operator_times(self, pixel_values: Batch, passes: int) -> list[OperatorTime]:
        """Return the median time of each operator of a profiled graph over `passes`, in graph order."""
        with self._lock:
            request = self._request(pixel_values)
        durations: dict[tuple[int, str], list[float]] = {}
        # The first pass has cold caches, and isn't counted.
        for number in range(passes + 1):
            self.run(pixel_values)
            for index, row in enumerate(request.get_profiling_info() if number else ()):
                durations.setdefault((index, row.node_name), []).append(row.real_time.total_seconds() * 1e3)
        compiled, layers = request.get_compiled_model().get_runtime_model(), layers_by_weight(self._read())
        originals = {
            op.get_friendly_name(): info[ORIGINALS_KEY].astype(str).split(",")
            for op in compiled.get_ops()
            if ORIGINALS_KEY in (info := op.get_rt_info())
        }
        names = {name: [exported_name(part) for part in (name, *originals.get(name, ()))] for _, name in durations}
        return [
            OperatorTime(names=(*(layers[part] for part in names[name] if part in layers), *names[name]), ms=median(ms))
            for (_, name), ms in durations.items()
        ]


def layers_by_weight(model: Any) -> dict[str, str]:
    """Return by operator name the layer whose weights it reads, if the weights kept their exported name."""
    layers: dict[str, str] = {}
    for op in model.get_ops():
        if op.get_type_name() not in LAYER_TYPES:
            continue
        # Weights are the second input, behind the operators that quantize them.
        sources = [op.input(1).get_source_output().get_node()]
        while sources:
            source = sources.pop()
            if source.get_type_name() in WEIGHT_OPS:
                sources += [port.get_source_output().get_node() for port in source.inputs()]
            elif source.get_type_name() == "Constant" and (name := source.get_friendly_name()).startswith(MODULE):
                layers[exported_name(op.get_friendly_name())] = name.rpartition(".")[0]
    return layers


def exported_name(name: str) -> str:
    """Return the exported node's name; the operators of a split node, as a convolution and its bias, begin with it."""
    return name.split("/", maxsplit=1)[0]


class OpenVino(Runtime):
    """OpenVINO on the CPU."""

    name = "openvino"
    extra = "openvino"
    requires = ("openvino",)
    files = (IR, IR_WEIGHTS)
    packages = ("openvino", "nncf")
    graph_format = "openvino"
    on_cpu = ("float32", "bfloat16", "static", "static_nncf")
    # `static` is exported with int8 layers instead.
    from_onnx = ("float32", "bfloat16", "static_nncf")
    # oneDNN has kernels for AVX2's VNNI too, which is the only one of Intel's hybrid processors (source: docs/facts.md).
    int8_instructions = ("avx512_vnni", "avx_vnni")

    @classmethod
    def convert(cls, source: Source, deployment: Deployment, folder: Path) -> PreparedFiles:
        """Write the graph of a deployment, `model.xml` and `model.bin`."""
        from profiling_agent.runtimes.open_vino_conversion import write_deployment

        return write_deployment(source, deployment, folder)

    @classmethod
    def open(cls, folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> OpenVinoSession:  # noqa: ARG003
        """Open a saved folder; by default with a thread for each core that a container's quota has time for."""
        core = import_openvino().Core()
        return OpenVinoSession(core, folder / IR, scheme=recipe.deployment.scheme, num_threads=num_threads)

    @classmethod
    def operator_times(
        cls, folder: Path, recipe: Recipe, pixel_values: Batch, *, num_threads: int, passes: int
    ) -> list[OperatorTime]:
        """Return the median time of each operator of OpenVINO's compiled graph over `passes`, in graph order."""
        scheme, core = recipe.deployment.scheme, import_openvino().Core()
        session = OpenVinoSession(core, folder / IR, scheme=scheme, num_threads=num_threads, profiled=True)
        return session.operator_times(pixel_values, passes)
