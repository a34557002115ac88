"""Toy runtime: ONNX's own reference evaluator, in numpy; slow, and without torch. `test_new_runtime.py` adds it."""

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from profiling_agent.runtimes.artifact import ONNX, Recipe
from profiling_agent.runtimes.registry import INPUT, OUTPUT, Batch, ModelSession, Runtime, Source, timed
from profiling_agent.schemas import Deployment


class ToySession(ModelSession):
    """An ONNX file in the reference evaluator."""

    def __init__(self, evaluator: Any) -> None:
        self._evaluator = evaluator

    def run(self, pixel_values: Batch) -> Batch:
        return self._evaluator.run([OUTPUT], {INPUT: pixel_values})[0]

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        return timed(lambda: self.run(pixel_values))


class Toy(Runtime):
    name: Any = "toy"
    extra = graph_format = "onnx"
    requires = ("onnx",)
    files = (ONNX,)
    on_cpu = from_onnx = ("float32",)

    @classmethod
    def convert(cls, source: Source, deployment: Deployment, folder: Path) -> dict[str, Any]:
        shutil.copyfile(str(source.onnx), folder / ONNX)
        return {}

    @classmethod
    def open(cls, folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> ToySession:
        from onnx.reference import ReferenceEvaluator

        return ToySession(ReferenceEvaluator(str(folder / ONNX)))
