"""Toy runtime: ONNX's own reference evaluator, in numpy; slow, and without torch. `test_new_runtime.py` adds it."""

import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiling_agent.errors import ArtifactError
from profiling_agent.runtimes.artifact import ONNX, PreparedFiles, Recipe
from profiling_agent.runtimes.registry import INPUT, OUTPUT, Batch, Source, missing_packages
from profiling_agent.schemas import Deployment, Scheme

CONVERSION = "profiling_agent.runtimes.toy:write_deployment"


def missing(device: str) -> str | None:
    return missing_packages(("onnx",), extra="onnx")


def schemes(device: str) -> tuple[Scheme, ...]:
    return ("float32",) if device == "cpu" else ()


def write_deployment(source: Source, deployment: Deployment, folder: Path) -> PreparedFiles:
    if source.onnx is None:
        raise ArtifactError(f"{deployment.runtime} needs the model as ONNX, and was given none")
    shutil.copyfile(source.onnx, folder / ONNX)
    return PreparedFiles(quantized=(), tied={})


class ToySession:
    """An ONNX file in the reference evaluator."""

    def __init__(self, evaluator: Any) -> None:
        self.fixed_size: int | None = None
        self._evaluator = evaluator

    def run(self, pixel_values: Batch) -> Batch:
        return self._evaluator.run([OUTPUT], {INPUT: pixel_values})[0]

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        def run_once() -> float:
            started = time.perf_counter()
            self.run(pixel_values)
            return (time.perf_counter() - started) * 1e3

        return run_once


def open(folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> ToySession:
    from onnx.reference import ReferenceEvaluator

    return ToySession(ReferenceEvaluator(str(folder / ONNX)))
