"""What the tuning job makes of a saved model and a drawn split."""

from pathlib import Path

import in_process
import torch
import zoo
from outlier_channels import stick_out
from torch import nn

from profiling_agent.jobs.tasks import TuneTask
from profiling_agent.modules.inference import random_batch
from profiling_agent.runtimes.torch_artifact import load_module, load_recipe


def ask(root: Path, model: nn.Module, num_images: int = 40) -> TuneTask:
    return TuneTask(
        model=in_process.saved(root, "model", model),
        scheme="dynamic",
        calibration=in_process.drawn(root, "calibration", num_images),
        latency_shares={"classifier": 0.25},
        batch_size=16,
    )


def test_a_folded_model_is_saved_in_float32_and_says_the_same(tmp_path: Path):
    model = zoo.vit()
    stick_out(model)
    batch = random_batch(zoo.SPEC, 4, seed=9)

    done = in_process.run(ask(tmp_path, model), tmp_path, "tune")

    assert done.model.path == "jobs/tune/model"
    assert load_recipe(tmp_path / "jobs" / "tune" / "model").quantized == ()
    with torch.inference_mode():
        expected, found = (
            model(pixel_values=batch).logits,
            load_module(tmp_path / "jobs" / "tune" / "model")(pixel_values=batch).logits,
        )
    assert float((found - expected).norm() / expected.norm()) < 1e-4
    assert done.kl < done.kl_unfolded / 4
    assert len(done.sites) == 4
    # Six linear layers a block, and the classifier.
    assert len(done.layers) == 13
    assert {row.layer: row.latency_share for row in done.layers}["classifier"] == 0.25
    assert done.num_images == 32


def test_a_model_with_nothing_to_fold_is_handed_on_as_it_is(tmp_path: Path):
    task = ask(tmp_path, zoo.resnet(), num_images=8)

    done = in_process.run(task.model_copy(update={"scheme": "static"}), tmp_path, "tune")

    assert done.model == task.model
    assert not (tmp_path / "jobs" / "tune" / "model").exists()
    assert done.num_images == 8
