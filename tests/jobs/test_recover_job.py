"""What the recovery job makes of saved models and drawn splits."""

import in_process
import pytest
import torch
import zoo

from profiling_agent.data.images import iter_batches
from profiling_agent.jobs.tasks import RecoverTask
from profiling_agent.lib.modules import mean_kl
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.runtimes.torch_artifact import load_module, load_recipe

NUM_IMAGES = 64


@pytest.fixture
def task(tmp_path) -> RecoverTask:
    dense = zoo.vit()
    cuts = zoo.halved(find_units(dense, zoo.SPEC, {}).units)
    pruned = prune_model(dense, cuts, spec=zoo.SPEC)
    return RecoverTask(
        model=in_process.saved(tmp_path, "pruned", pruned.model, cuts=cuts),
        baseline=in_process.saved(tmp_path, "baseline", dense),
        recovery=in_process.drawn(tmp_path, "recovery", NUM_IMAGES, seed=1),
        calibration=in_process.drawn(tmp_path, "calibration", NUM_IMAGES, seed=2),
        epochs=4,
        seed=3,
    )


def test_the_saved_model_is_nearer_to_the_baseline_on_the_judged_images(task: RecoverTask, tmp_path):
    job = in_process.context(task, tmp_path, "job")
    done = task.run(job)
    images = torch.cat([images for images, _ in iter_batches(job.images("calibration"), batch_size=64)])
    # Of each 32 images the last 8.
    judged = images.reshape(2, 32, 3, 32, 32)[:, 24:].flatten(0, 1)
    with torch.inference_mode():
        expected, before, after = (
            load_module(folder)(pixel_values=judged).logits
            for folder in (tmp_path / "baseline", tmp_path / "pruned", job.folder / "model")
        )

    assert done.kl_after < done.kl_before
    assert done.kl_before == pytest.approx(mean_kl(expected, before), rel=1e-4)
    assert done.kl_after == pytest.approx(mean_kl(expected, after), rel=1e-4)
    assert (done.model.path, done.epochs_run) == ("jobs/job/model", 4)
    assert load_recipe(job.folder / "model").cuts == load_recipe(tmp_path / "pruned").cuts
    assert load_recipe(tmp_path / "pruned").cuts


def test_where_no_epoch_helps_the_pruned_model_itself_is_handed_on(task: RecoverTask, tmp_path):
    job = in_process.context(task, tmp_path, "job")
    done = task.model_copy(update={"model": task.baseline}).run(job)

    # The baseline is already at 0, below which no KL falls.
    assert done.model == task.baseline
    assert (done.kl_after, done.stopped) == (done.kl_before, "the KL did not fall for 2 epochs")
    assert not list(job.folder.iterdir())


def test_the_order_of_images_is_the_seeds(task: RecoverTask, tmp_path):
    one, other = (
        task.model_copy(update={"epochs": 1, "seed": seed}).run(in_process.context(task, tmp_path, f"job{seed}"))
        for seed in (1, 2)
    )

    assert one.kl_before == other.kl_before
    assert one.kl_after != other.kl_after
