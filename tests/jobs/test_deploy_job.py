"""What the jobs around a runtime make of a saved model and drawn images."""

import json
from pathlib import Path
from typing import Any

import in_process
import numpy as np
import pytest
import torch
import zoo

from profiling_agent.data.prepared import iter_batches
from profiling_agent.errors import ArtifactError, QuantizationError
from profiling_agent.jobs.tasks import DeployTask, EvaluateTask, ExportTask
from profiling_agent.lib.machine import environment, has_vnni
from profiling_agent.measure.predictions import read_predictions
from profiling_agent.runtimes.torch_artifact import load_module, load_recipe
from profiling_agent.schemas import ArtifactRef, Deployment, SplitInfo

NUM_IMAGES = 20


def ref(path: str, kind: Any = "model") -> ArtifactRef:
    return ArtifactRef(path=path, sha256=path, size_bytes=1, kind=kind)


def split(name: str = "calibration", num_images: int = NUM_IMAGES) -> SplitInfo:
    return SplitInfo(
        name="calibration", source_split="train", num_images=num_images, file=ref(f"{name}.parquet", "split")
    )


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    in_process.saved(root, "baseline", zoo.resnet("basic"))
    for name, num_images in (("calibration", NUM_IMAGES), ("search", 0), ("recovery", 2)):
        in_process.drawn(root, name, num_images)
    return root


@pytest.fixture(scope="module")
def onnx(root: Path) -> ArtifactRef:
    exported = in_process.run(ExportTask(model=ref("baseline")), root, "export")
    assert exported.distance < 1e-5
    return exported.onnx


def deployed(root: Path, name: str, deployment: Deployment, onnx: ArtifactRef | None = None, **asked):
    given: dict[str, Any] = {
        "model": ref("baseline"),
        "deployment": deployment,
        "calibration": split(),
        "batch_size": 8,
        "onnx": onnx,
    }
    return in_process.run(DeployTask(**(given | asked)), root, name)


def test_a_deployed_model_and_how_far_it_is_from_its_parent(root: Path, onnx: ArtifactRef):
    made = deployed(root, "static", Deployment(runtime="onnxruntime", scheme="static"), onnx)

    parent = load_module(root / "baseline")
    layers = [name for name, module in parent.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)]
    assert list(made.layers) == layers
    # One side of int8 has 7 bits where 8 would saturate: steps twice as wide.
    assert 0 < made.distance < (0.1 if has_vnni("onnxruntime", environment().cpu_flags) else 0.2)
    assert 0 < made.kl < 0.05
    assert (root / made.model.path / "model.onnx").stat().st_size < (root / onnx.path).stat().st_size / 2
    assert sorted(path.name for path in (root / "jobs" / "static").iterdir()) == ["model", "result.json"]


def test_what_is_counted_is_the_float_parent_and_its_bytes_are_those_held(root: Path, onnx: ArtifactRef):
    made = deployed(root, "counted", Deployment(runtime="onnxruntime"), onnx)

    counts = load_recipe(root / made.model.path).counts

    assert counts is not None
    assert counts.params == sum(parameter.numel() for parameter in load_module(root / "baseline").parameters())
    assert counts.parameter_bytes == (root / made.model.path / "model.onnx").stat().st_size
    assert made.distance < 1e-5
    assert made.kl < 1e-9


def test_every_runtime_answers_the_same_images_in_their_order(root: Path, onnx: ArtifactRef):
    made = deployed(root, "answering", Deployment(runtime="onnxruntime"), onnx)

    def task(model: ArtifactRef) -> EvaluateTask:
        return EvaluateTask(model=model, split=split(), shard=0, batch_size=8, device="cpu")

    def answers(model: ArtifactRef, name: str):
        measured = in_process.run(task(model), root, name)
        return measured, read_predictions(root / measured.predictions.files[0].path).predicted

    ours, theirs = answers(ref("baseline"), "evaluated-eager"), answers(made.model, "evaluated-onnx")

    batches = iter_batches(in_process.context(task(ref("baseline")), root, "reading").images("images"), batch_size=8)
    with torch.inference_mode():
        expected = [load_module(root / "baseline")(pixel_values=x).logits.argmax(-1) for x, _ in batches]
    assert np.array_equal(ours[1], torch.cat(expected).numpy())
    assert np.array_equal(ours[1], theirs[1])
    assert ours[0].footprint.macs == theirs[0].footprint.macs > 0


def test_a_damaged_model_is_not_evaluated(root: Path):
    in_process.saved(root, "damaged", zoo.resnet("basic"))
    (root / "damaged" / "preprocessor_config.json").write_text(json.dumps({"mine": True}))

    with pytest.raises(ArtifactError, match=r"preprocessor_config\.json"):
        in_process.run(
            EvaluateTask(model=ref("damaged"), split=split(), shard=0, batch_size=8, device="cpu"), root, "damage"
        )


def test_no_calibration_images_are_refused(root: Path):
    with pytest.raises(QuantizationError, match="0 calibration images"):
        deployed(root, "empty", Deployment(scheme="dynamic"), calibration=split("search", 0))


def test_too_few_calibration_images_for_static_scales_are_refused(root: Path):
    with pytest.raises(QuantizationError, match="at least"):
        deployed(root, "few", Deployment(runtime="inductor", scheme="static"), calibration=split("recovery", 2))
