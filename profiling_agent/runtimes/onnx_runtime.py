"""ONNX Runtime sessions on the CPU: float32, dynamic int8, and static int8 as pairs of quantize and dequantize."""

import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.io import read_json
from profiling_agent.lib.logs import import_onnxruntime, third_party_errors
from profiling_agent.lib.machine import quota_threads, waits_passively
from profiling_agent.runtimes.artifact import ONNX, PreparedFiles, Recipe
from profiling_agent.runtimes.base import (
    INPUT,
    OUTPUT,
    Batch,
    OperatorTime,
    Runtime,
    Source,
    check_fixed_batch,
    timed,
)
from profiling_agent.schemas import Deployment

if TYPE_CHECKING:
    from onnxruntime import InferenceSession


# Suffix of a node's kernel in a profile, after the node's name.
KERNEL_SUFFIX = "_kernel_time"
# Suffix of a convolution in a blocked layout, after the name of its original output.
BLOCKED_SUFFIX = "_nchwc"


class OnnxSession:
    """An opened ONNX file."""

    def __init__(self, session: "InferenceSession") -> None:
        self._session = session
        # A dynamic size is a string.
        size = session.get_inputs()[0].shape[0]
        self.fixed_size: int | None = size if isinstance(size, int) else None

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        check_fixed_batch(self.fixed_size, pixel_values)
        with third_party_errors(lambda message: ArtifactError(f"ONNX Runtime can't run the model: {message}")):
            logits: Any = self._session.run([OUTPUT], {INPUT: pixel_values})[0]
        return logits

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        """Return a function that runs these images once and returns the milliseconds it took."""
        check_fixed_batch(self.fixed_size, pixel_values)
        feed = {INPUT: pixel_values}

        def run() -> object:
            return self._session.run([OUTPUT], feed)

        return timed(run)


def _session_options(num_threads: int | None) -> Any:
    options: Any = import_onnxruntime().SessionOptions()
    # Errors only: the warnings are advice about the graph's optimisation.
    options.log_severity_level = 3
    # 0 means that the library chooses.
    options.intra_op_num_threads = num_threads or quota_threads() or 0
    options.inter_op_num_threads = 1
    # Its threads wait for the next pass by spinning, which takes cores from the next process.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if waits_passively():
        options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return options


def one_thread(graph: str | bytes) -> "InferenceSession":
    """Return a single-threaded session of a graph or file: a pool would pin threads to cores that containers may lack."""
    return import_onnxruntime().InferenceSession(graph, _session_options(1), providers=["CPUExecutionProvider"])


def _open_session(folder: Path, options: Any) -> "InferenceSession":
    onnxruntime = import_onnxruntime()
    path = str(folder / ONNX)

    def refuse(message: str) -> ArtifactError:
        return ArtifactError(f"ONNX Runtime can't open {path!r} ({message}): save it again")

    with third_party_errors(refuse):
        return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])


class OnnxRuntime(Runtime):
    """ONNX Runtime on the CPU."""

    name = "onnxruntime"
    extra = "onnx"
    requires = ("onnxruntime", "onnx", "onnxscript")
    files = (ONNX,)
    packages = ("onnx", "onnxruntime")
    graph_format = "onnx"
    on_cpu = from_onnx = ("float32", "dynamic", "static")
    # MLAS has kernels for AVX2's VNNI too, which is the only one of Intel's hybrid processors (source: docs/facts.md).
    int8_instructions = ("avx512_vnni", "avx_vnni")

    @classmethod
    def convert(cls, source: Source, deployment: Deployment, folder: Path) -> PreparedFiles:
        """Write `model.onnx`, with attention fused and the chosen layers quantized."""
        from profiling_agent.runtimes.onnx_runtime_conversion import write_deployment

        return write_deployment(source, deployment, folder)

    @classmethod
    def open(cls, folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> OnnxSession:  # noqa: ARG003
        """Open a saved folder; by default with a thread for each core that a container's quota has time for."""
        return OnnxSession(_open_session(folder, _session_options(num_threads)))

    @classmethod
    def operator_times(
        cls,
        folder: Path,
        recipe: Recipe,  # noqa: ARG003
        pixel_values: Batch,
        *,
        num_threads: int,
        passes: int,
    ) -> list[OperatorTime]:
        """Return the median time of each node in ONNX Runtime's optimized graph over `passes`, in graph order."""
        import onnx

        with tempfile.TemporaryDirectory() as scratch:
            options, graph = _session_options(num_threads), Path(scratch) / "optimized.onnx"
            options.enable_profiling = True
            options.profile_file_prefix = str(Path(scratch) / "profile")
            # Fused nodes are identified by their outputs, which keep their names.
            options.optimized_model_filepath = str(graph)
            session = _open_session(folder, options)
            onnx_session = OnnxSession(session)
            # The first pass has cold caches, and isn't counted.
            for _ in range(passes + 1):
                onnx_session.run(pixel_values)
            events = read_json(Path(session.end_profiling()))
            outputs = {node.name: tuple(node.output) for node in onnx.load(graph, load_external_data=False).graph.node}
        durations: dict[tuple[str, str], list[float]] = {}
        for event in events:
            if event.get("cat") == "Node" and event["name"].endswith(KERNEL_SUFFIX):
                # Names of nodes aren't unique.
                node = event["name"].removesuffix(KERNEL_SUFFIX), str(event.get("args", {}).get("node_index"))
                durations.setdefault(node, []).append(event["dur"] / 1e3)
        return [
            OperatorTime(
                names=(name, name.removesuffix(BLOCKED_SUFFIX), *outputs.get(name, ())), ms=median(ms[1:] or ms)
            )
            for (name, _), ms in durations.items()
        ]
