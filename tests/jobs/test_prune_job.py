"""What the prune job makes of a saved model and a drawn split."""

import io

import in_process
import numpy as np
import pytest
import torch
import zoo
from PIL import Image

from profiling_agent.acquisition.images import write_rows
from profiling_agent.acquisition.prepared import iter_batches
from profiling_agent.artifacts.load import load_module, load_recipe
from profiling_agent.artifacts.save import save_model
from profiling_agent.files import file_sha256
from profiling_agent.jobs.handlers.models import prune
from profiling_agent.jobs.tasks import PruneTask
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.records import ArtifactRef, Cut, SplitInfo


def png(rng: np.random.Generator) -> bytes:
    held = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(held, format="PNG")
    return held.getvalue()


@pytest.fixture
def task(tmp_path) -> PruneTask:
    model, rng = zoo.vit(), np.random.default_rng(0)
    save_model(model, tmp_path / "baseline", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    write_rows(tmp_path / "split.parquet", zip([png(rng) for _ in range(128)], [0] * 128, strict=True))
    sha256 = file_sha256(tmp_path / "baseline" / "recipe.json")
    units = find_units(model, zoo.SPEC, {}).units
    return PruneTask(
        baseline=ArtifactRef(path="baseline", sha256=sha256, size_bytes=1, kind="model"),
        cuts=tuple(Cut(unit=unit, keep=snap(unit, 0.4), requested_ratio=0.4) for unit in units),
        calibration=SplitInfo(
            name="calibration",
            source_split="train",
            num_images=128,
            file=ArtifactRef(
                path="split.parquet", sha256=file_sha256(tmp_path / "split.parquet"), size_bytes=1, kind="split"
            ),
        ),
        seed=0,
    )


def logits(path, images):
    with torch.inference_mode():
        return load_module(path)(pixel_values=images).logits


def test_the_saved_candidate_is_the_compensated_one(task: PruneTask, tmp_path):
    job = in_process.context(task, tmp_path, "on")
    done = prune(task, job)
    plain = in_process.run(task.model_copy(update={"compensate": False}), tmp_path, "off")
    images = torch.cat([images for images, _ in iter_batches(job.images("calibration"), batch_size=32)])
    expected, near, far = (
        logits(folder, images)
        for folder in (tmp_path / "baseline", job.folder / "model", tmp_path / "jobs" / "off" / "model")
    )

    assert done.compensation == ("least squares",)
    assert done.kl is not None
    assert done.kl_uncompensated is not None
    assert done.kl < done.kl_uncompensated
    assert (near - expected).norm() < (far - expected).norm()
    assert (plain.kl, plain.kl_uncompensated, plain.compensation) == (None, None, ())
    assert plain.mask_error == done.mask_error
    assert load_recipe(job.folder / "model").cuts == task.cuts
