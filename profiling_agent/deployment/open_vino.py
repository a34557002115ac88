"""OpenVINO on the CPU: float32, bfloat16, and static int8 by our own layers or by NNCF. Opening imports no torch."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiling_agent.artifacts.recipe import IR, Recipe
from profiling_agent.deployment.batches import check_fixed_batch
from profiling_agent.deployment.protocol import Batch, missing_packages
from profiling_agent.errors import ArtifactError
from profiling_agent.quiet import import_openvino
from profiling_agent.records import Scheme

# In what the parts compute that aren't int8. Without a hint OpenVINO takes bfloat16 wherever the CPU has it.
PRECISIONS: dict[Scheme, str] = {"bfloat16": "bf16"}
# A graph is compiled for each batch size, which is a few per cent faster than for any (a quarter for a small convnet at
# batch 1); so many are kept. Not the graphs of our int8 layers: with all shapes known OpenVINO takes their quantizing apart,
# and a ViT is 1.6 to 1.9 times slower for it (2026.4.1).
MAX_SIZES = 2
ANY = 0
ANY_SIZE: frozenset[Scheme] = frozenset({"static"})


CONVERSION = "profiling_agent.deployment.open_vino_conversion:write_deployment"


def missing() -> str | None:
    """Return what has to be installed, or None."""
    return missing_packages(("openvino",), extra="openvino")


def schemes(device: str) -> tuple[Scheme, ...]:
    """Return the schemes of a device."""
    return ("float32", "bfloat16", "static", "static_nncf") if device == "cpu" else ()


class OpenVinoSession:
    """An OpenVINO graph, compiled for each batch size that it is given, or once for all."""

    def __init__(self, core: Any, path: Path, *, scheme: Scheme, num_threads: int | None) -> None:
        """Read the graph; ArtifactError where it can't be read."""
        self._is_for_any_size = scheme in ANY_SIZE
        self._core, self._path = core, path
        self._properties: dict[str, Any] = {
            "INFERENCE_PRECISION_HINT": PRECISIONS.get(scheme, "f32"),
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
        }
        if num_threads:
            self._properties["INFERENCE_NUM_THREADS"] = num_threads
        self._requests: dict[int, Any] = {}
        batch = self._read().inputs[0].get_partial_shape()[0]
        self.fixed_size: int | None = batch.get_length() if batch.is_static else None

    def _read(self) -> Any:
        try:
            return self._core.read_model(self._path)
        except RuntimeError as error:
            first_line = str(error).strip().splitlines()[0][:200]
            raise ArtifactError(f"OpenVINO can't read {str(self._path)!r} ({first_line}): save it again") from error

    def _request(self, pixel_values: Batch) -> Any:
        """Return an infer request for batches of this shape."""
        check_fixed_batch(self.fixed_size, pixel_values)
        size = ANY if self._is_for_any_size else len(pixel_values)
        if size not in self._requests:
            model = self._read()
            if size != ANY:
                model.reshape(list(pixel_values.shape))
            while len(self._requests) >= MAX_SIZES:
                del self._requests[next(iter(self._requests))]
            self._requests[size] = self._core.compile_model(model, "CPU", self._properties).create_infer_request()
        return self._requests[size]

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        (logits,) = self._request(pixel_values).infer([pixel_values]).values()
        return logits.copy()

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        """Return a function that runs these images once and returns the milliseconds it took."""
        request, feed = self._request(pixel_values), [pixel_values]

        def run_once() -> float:
            started = time.perf_counter()
            request.infer(feed, share_inputs=True, share_outputs=True)
            return (time.perf_counter() - started) * 1e3

        return run_once


def open(folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> OpenVinoSession:  # noqa: ARG001 (every runtime's name and signature)
    """Open a saved folder; without `num_threads` there is a thread for each core."""
    core = import_openvino().Core()
    return OpenVinoSession(core, folder / IR, scheme=recipe.deployment.scheme, num_threads=num_threads)
