"""A run that recovers what it prunes, from the request to the report."""

import pytest
import torch
import world as made_world
from conftest import World

from profiling_agent import load, optimize
from profiling_agent.data.images import SplitImages
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import Request


def images_of(path) -> set[bytes]:
    images = SplitImages(path)
    return {images.encoded(row) for row in range(len(images))}


@pytest.mark.slow
def test_a_run_trains_what_it_prunes_on_images_of_its_own_and_says_so(world: World, tmp_path):
    report = optimize(world.request(tmp_path, recover_epochs=1, iterate=False))
    run = tmp_path / "quick"
    text, attempt = (run / "report.md").read_text(), report.attempts[0]

    assert report.acquired.recovery is not None
    assert report.acquired.recovery.num_images == made_world.NUM_TRAIN - report.acquired.calibration.num_images
    recovery = images_of(run / report.acquired.recovery.file.path)
    for split in (report.acquired.calibration, report.acquired.search, report.acquired.heldout):
        assert not recovery & images_of(run / split.file.path)
    assert attempt.recovery is not None
    assert attempt.recovery.epochs_run == 1
    assert attempt.recovery.kl_before == pytest.approx(attempt.calibration_kl, rel=1e-3)
    assert attempt.pruned_model == attempt.recovery.model
    assert f"Recovered by distillation: 1 of 1 epochs, KL {attempt.recovery.kl_before:.4f} -> " in text
    assert RunReport.model_validate_json((run / "report.json").read_text()) == report
    assert attempt.pruned_model is not None
    assert load(run / attempt.pruned_model.path)(pixel_values=torch.zeros(1, 3, 32, 32)).logits.shape == (1, 5)
    assert not (run / "recovery").exists()


def test_a_run_that_asks_for_no_recovery_says_nothing_of_it(finished):
    report = RunReport.model_validate_json((finished / "report.json").read_text())

    assert Request().recover_epochs == 0
    assert report.acquired.recovery is None
    assert all(attempt.recovery is None for attempt in report.attempts)
    assert "distillation" not in (finished / "report.md").read_text()
