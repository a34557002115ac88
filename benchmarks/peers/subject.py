"""A subject on disk, as every tool reads it: the float32 model in three forms, and pixels of its images.

python benchmarks/peers/subject.py FOLDER MODEL DATA BATCH_SIZE [NUM_SEARCH]
"""

import json
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from profiling_agent.data.images import PreparedImages, SplitImages, write_prepared
from profiling_agent.jobs.runner import scratch_jobs
from profiling_agent.jobs.tasks import AcquireTask, ResolveShapeTask
from profiling_agent.lib.logs import muted
from profiling_agent.runtimes.torch_artifact import load_module, load_processor
from profiling_agent.schemas import SplitInfo
from profiling_agent.workspace import Workspace


class Logits(nn.Module):
    """A classifier that returns its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the logits, (n, classes), of images (n, channels, height, width)."""
        return self.model(pixel_values=pixel_values).logits


def prepare(folder: Path, model: str, data: str, batch_size: int, num_search: int | None = None) -> None:
    """Draw the images that a run draws, and write their pixels and the float32 model into `folder`."""
    with scratch_jobs() as jobs:
        acquired = jobs.run(AcquireTask(model=model, dataset=data, num_samples=num_search, device="cpu"))
        baseline = jobs.run(ResolveShapeTask(model=model, device="cpu")).baseline
        shutil.move(jobs.workspace.path(baseline), folder / "float32")
        _write_pixels(folder, "calibration", [acquired.calibration], jobs.workspace)
        _write_pixels(folder, "test", [acquired.search, acquired.heldout], jobs.workspace)
    example = torch.from_numpy(np.load(folder / "calibration.npy", mmap_mode="r")[:batch_size].copy())
    (folder / "subject.json").write_text(json.dumps(export(folder, example)))


def _write_pixels(folder: Path, name: str, splits: list[SplitInfo], workspace: Workspace) -> None:
    processor, parts, labels = load_processor(folder / "float32"), list[NDArray[Any]](), list[NDArray[Any]]()
    for split in splits:
        images, scratch = SplitImages(workspace.path(split.file)), workspace.root / split.name
        scratch.mkdir()
        write_prepared(scratch, images, range(len(images)), processor)
        parts.append(PreparedImages([scratch]).pixel_values(range(len(images))))
        labels.append(images.labels)
    np.save(folder / f"{name}.npy", np.concatenate(parts))
    np.save(folder / f"{name}_labels.npy", np.concatenate(labels))


def export(folder: Path, example: Tensor) -> dict[str, float]:
    """Write what peers start from, `float32.onnx` and `float32.pt2`, as torch exports them; return the seconds of each."""
    model, seconds, clock = Logits(load_module(folder / "float32")).eval(), dict[str, float](), time.monotonic
    # With fused attention Swin can't be exported to ONNX.
    with muted("", "torch.onnx"), sdpa_kernel(SDPBackend.MATH), torch.no_grad():
        started = clock()
        program: Any = torch.onnx.export(
            model, (example,), dynamo=True, verbose=False, input_names=["pixel_values"], output_names=["logits"]
        )
        graph = program.model_proto
        # With the exporter's shapes the quantizer of ONNX Runtime refuses the file.
        del graph.graph.value_info[:]
        onnx.save(graph, folder / "float32.onnx")
        seconds["onnx"] = clock() - started
    started = clock()
    torch.export.save(torch.export.export(model, (example,)), folder / "float32.pt2")
    seconds["openvino"] = seconds["onnx"]
    seconds["program"] = clock() - started
    return seconds


if __name__ == "__main__":
    _, place, source, images, size, *number = sys.argv
    prepare(Path(place), source, images, int(size), int(number[0]) if number else None)
