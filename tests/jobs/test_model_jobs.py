"""Jobs that make models: pruning, tuning and deployment."""

import json
from pathlib import Path
from typing import Any

import in_process
import numpy as np
import pytest
import torch
import zoo

from profiling_agent.data.images import SplitImages, iter_batches, write_rows
from profiling_agent.data.labels import label_set_id
from profiling_agent.errors import ArtifactError, QuantizationError
from profiling_agent.jobs.tasks import DeployTask, EvaluateTask, ExportTask, PruneTask, TuneTask
from profiling_agent.lib.modules import logits_of
from profiling_agent.measure.intervals import read_predictions
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.registry import runtime
from profiling_agent.runtimes.torch_artifact import load_module, load_recipe
from profiling_agent.schemas import ArtifactRef, Cut, DeployedModel, Deployment, SplitInfo

NUM_IMAGES = 20


def ref(path: str) -> ArtifactRef:
    return ArtifactRef(path=path, sha256=path, size_bytes=1)


def split(name: str = "calibration", num_images: int = NUM_IMAGES) -> SplitInfo:
    return SplitInfo(name="calibration", source_split="train", num_images=num_images, file=ref(f"{name}.arrow"))


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    in_process.saved(root, "baseline", zoo.resnet("basic"))
    for name, num_images in (("calibration", NUM_IMAGES), ("recovery", 2)):
        in_process.drawn(root, name, num_images)
    return root


@pytest.fixture(scope="module")
def onnx(root: Path) -> ArtifactRef:
    return in_process.run(ExportTask(model=ref("baseline")), root, "export")


def deployed(root: Path, name: str, deployment: Deployment, onnx: ArtifactRef | None = None, **asked):
    given: dict[str, Any] = {
        "model": ref("baseline"),
        "deployment": deployment,
        "calibration": split(),
        "batch_size": 8,
        "onnx": onnx,
    }
    return in_process.run(DeployTask(**(given | asked)), root, name)


@pytest.mark.slow
def test_a_deployed_model_and_how_far_it_is_from_its_parent(root: Path, onnx: ArtifactRef):
    made = deployed(root, "static", Deployment(runtime="onnxruntime", scheme="static"), onnx)

    parent = load_module(root / "baseline")
    layers = [name for name, module in parent.named_modules() if isinstance(module, torch.nn.Linear | torch.nn.Conv2d)]
    assert list(made.layers) == layers
    # One side of int8 has 7 bits where 8 would saturate: steps twice as wide.
    assert 0 < made.distance < (0.2 if runtime("onnxruntime").saturates() else 0.1)
    assert 0 < made.kl < 0.05
    assert (root / made.model.path / "model.onnx").stat().st_size < (root / onnx.path).stat().st_size / 2
    assert sorted(path.name for path in (root / "jobs" / "static").iterdir()) == ["model", "result.json"]


@pytest.fixture(scope="module")
def made(root: Path, onnx: ArtifactRef) -> DeployedModel:
    return deployed(root, "float32", Deployment(runtime="onnxruntime"), onnx)


def test_what_is_counted_is_the_float_parent_and_its_bytes_are_those_held(root: Path, made: DeployedModel):
    footprint = load_recipe(root / made.model.path).footprint

    assert footprint is not None
    assert footprint.params == sum(parameter.numel() for parameter in load_module(root / "baseline").parameters())
    assert footprint.parameter_bytes == (root / made.model.path / "model.onnx").stat().st_size
    assert made.distance < 1e-5
    assert made.kl < 1e-9


def test_every_runtime_answers_the_same_images_in_their_order(root: Path, made: DeployedModel):
    ours, theirs = (
        in_process.run(EvaluateTask(model=model, split=split(), shard=0, batch_size=8, device="cpu"), root, name)
        for name, model in (("evaluated-eager", ref("baseline")), ("evaluated-onnx", made.model))
    )

    answers = [read_predictions(root / each.predictions.files[0].path).predicted for each in (ours, theirs)]
    assert np.array_equal(answers[0], answers[1])
    assert ours.footprint.macs == theirs.footprint.macs > 0


def test_a_multi_label_model_is_right_if_its_set_of_classes_is_that_of_the_image(tmp_path: Path):
    model = zoo.vit(problem_type="multi_label_classification")
    baseline = in_process.saved(tmp_path, "several", model)
    images = SplitImages(tmp_path / in_process.drawn(tmp_path, "calibration", NUM_IMAGES).file.path)
    pixels = zoo.processor()([images.image(row) for row in range(NUM_IMAGES)], return_tensors="pt")["pixel_values"]
    answers = [np.flatnonzero(row).tolist() for row in (logits_of(model, pixels).sigmoid() >= 0.5).numpy()]
    assert len({len(answer) for answer in answers}) > 1
    wrong = {2: [*answers[2], 9], 3: answers[3][1:] or [1]}
    labels = [label_set_id(wrong.get(row, answer)) for row, answer in enumerate(answers)]
    write_rows(
        tmp_path / "labelled.arrow", zip([images.encoded(row) for row in range(NUM_IMAGES)], labels, strict=True)
    )
    task = EvaluateTask(model=baseline, split=split("labelled"), shard=0, batch_size=8, device="cpu")

    done = in_process.run(task, tmp_path, "evaluated")

    right = read_predictions(tmp_path / done.predictions.files[0].path).right
    assert np.flatnonzero(~right).tolist() == [2, 3]
    assert done.predictions.num_correct == NUM_IMAGES - 2


def test_a_damaged_model_is_not_evaluated(root: Path):
    in_process.saved(root, "damaged", zoo.resnet("basic"))
    (root / "damaged" / "preprocessor_config.json").write_text(json.dumps({"mine": True}))

    with pytest.raises(ArtifactError, match=r"preprocessor_config\.json"):
        in_process.run(
            EvaluateTask(model=ref("damaged"), split=split(), shard=0, batch_size=8, device="cpu"), root, "damage"
        )


def test_too_few_calibration_images_are_refused(root: Path):
    with pytest.raises(QuantizationError, match="at least"):
        deployed(root, "few", Deployment(runtime="inductor", scheme="static"), calibration=split("recovery", 2))


@pytest.fixture
def task(tmp_path) -> PruneTask:
    model = zoo.vit()
    units = find_units(model, zoo.SPEC, {}).units
    return PruneTask(
        baseline=in_process.saved(tmp_path, "baseline", model),
        cuts=tuple(Cut(unit=unit, keep=snap(unit, 0.4), requested_ratio=0.4) for unit in units),
        calibration=in_process.drawn(tmp_path, "calibration", 128),
    )


def test_the_saved_candidate_is_the_compensated_one(task: PruneTask, tmp_path):
    job = in_process.context(task, tmp_path, "on")
    done = task.run(job)
    plain = in_process.run(task.model_copy(update={"compensate": False}), tmp_path, "off")
    images = torch.cat([images for images, _ in iter_batches(job.images("calibration"), batch_size=32)])
    expected, near, far = (
        logits_of(load_module(folder), images)
        for folder in (tmp_path / "baseline", job.folder / "model", tmp_path / "jobs" / "off" / "model")
    )

    assert done.compensation == ("least squares",)
    assert done.kl is not None
    assert done.kl_uncompensated is not None
    assert done.kl < done.kl_uncompensated
    assert (near - expected).norm() < (far - expected).norm()
    assert (plain.kl, plain.kl_uncompensated, plain.compensation) == (None, None, ())
    assert load_recipe(job.folder / "model").cuts == task.cuts


def test_the_layers_of_a_model_that_int8_hurts_are_measured(tmp_path: Path):
    model = zoo.vit()
    with torch.no_grad():
        # Larger logits make more of every error.
        model.classifier.weight.mul_(30)
    task = TuneTask(
        model=in_process.saved(tmp_path, "model", model),
        scheme="dynamic",
        calibration=in_process.drawn(tmp_path, "calibration", 40),
        latency_shares={"classifier": 0.25},
        batch_size=16,
    )

    done = in_process.run(task, tmp_path, "tune")

    # Six linear layers a block, and the classifier.
    assert len(done.layers) == 13
    assert {row.layer: row.latency_share for row in done.layers}["classifier"] == 0.25
    assert done.num_images == 32
