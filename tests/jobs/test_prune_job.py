"""What the prune job makes of a saved model and a drawn split."""

import in_process
import pytest
import torch
import zoo

from profiling_agent.data.prepared import iter_batches
from profiling_agent.jobs.handlers.models import prune
from profiling_agent.jobs.tasks import PruneTask
from profiling_agent.modules.inference import logits_of
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.torch_artifact import load_module, load_recipe
from profiling_agent.schemas import Cut


@pytest.fixture
def task(tmp_path) -> PruneTask:
    model = zoo.vit()
    units = find_units(model, zoo.SPEC, {}).units
    return PruneTask(
        baseline=in_process.saved(tmp_path, "baseline", model),
        cuts=tuple(Cut(unit=unit, keep=snap(unit, 0.4), requested_ratio=0.4) for unit in units),
        calibration=in_process.drawn(tmp_path, "calibration", 128),
        seed=0,
    )


def test_the_saved_candidate_is_the_compensated_one(task: PruneTask, tmp_path):
    job = in_process.context(task, tmp_path, "on")
    done = prune(task, job)
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
    assert plain.mask_error == done.mask_error
    assert load_recipe(job.folder / "model").cuts == task.cuts
