"""A whole run that recovers what it prunes, and in which other runtimes than torch compete."""

from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
import world as made_world
from conftest import World
from PIL import Image

from profiling_agent import load, optimize
from profiling_agent.data.images import SplitImages
from profiling_agent.reporting.report import RunReport
from profiling_agent.schemas import SplitInfo


class Run(NamedTuple):
    folder: Path
    report: RunReport


@pytest.fixture(scope="module")
def run(world: World, tmp_path_factory: pytest.TempPathFactory) -> Run:
    output, options = tmp_path_factory.mktemp("runs"), {"recover_epochs": 1, "runtimes": "onnxruntime,openvino"}
    return Run(output / "quick", optimize(world.request(output, iterate=False, **options)))


@pytest.mark.slow
def test_runtimes_compete_and_the_winner_is_loaded_in_its_own(run: Run):
    report = run.report

    assert report.deployment_search is not None
    tried = {option.deployment.name: option for option in report.deployment_search.options}
    assert set(tried) == {
        *(f"onnxruntime {scheme}" for scheme in ("float32", "dynamic", "static")),
        *(f"openvino {scheme}" for scheme in ("float32", "static", "static_nncf")),
    }
    assert all(option.deployed for option in tried.values()), {name: option.reason for name, option in tried.items()}
    assert report.deployment_search.chosen is not None
    assert report.best.deployment.runtime in ("onnxruntime", "openvino")
    # Each variant, and the winner's float32 model in eager torch and every accepted deployment.
    variants = {row.evaluation.variant for row in report.variants}
    assert variants >= {"baseline", "quantized", "pruned+quantized"}
    (attempt,) = report.attempts
    assert "pruned" in variants or not attempt.accepted

    best = load(run.folder / "best")
    (answer,) = best.predict([Image.new("RGB", (32, 32), (200, 40, 40))])
    assert best.runtime == report.best.deployment.runtime
    assert 0 < answer.probability <= 1
    card = (run.folder / "best" / "README.md").read_text()
    assert f"- Runtime: {report.best.deployment.runtime}; " in card
    assert "held-out images" in card


def images_of(run: Run, splits: Iterable[SplitInfo]) -> set[bytes]:
    opened = [SplitImages(run.folder / split.file.path) for split in splits]
    return {images.encoded(row) for images in opened for row in range(len(images))}


@pytest.mark.slow
def test_what_is_pruned_is_trained_on_images_of_its_own_and_the_report_says_so(run: Run):
    report, attempt = run.report, run.report.attempts[0]
    acquired, text = report.acquired, (run.folder / "report.md").read_text()

    assert acquired.recovery is not None
    assert acquired.recovery.num_images == made_world.NUM_TRAIN - acquired.calibration.num_images
    others = images_of(run, (acquired.calibration, acquired.search, acquired.heldout))
    assert not images_of(run, [acquired.recovery]) & others
    assert attempt.recovery is not None
    assert attempt.recovery.epochs_run == 1
    assert attempt.recovery.kl_before == pytest.approx(attempt.calibration_kl, rel=1e-3)
    assert attempt.pruned_model == attempt.recovery.model
    assert f"Recovered by distillation: 1 of 1 epochs, KL {attempt.recovery.kl_before:.4f} -> " in text
    assert RunReport.model_validate_json((run.folder / "report.json").read_text()) == report
    assert load(run.folder / attempt.recovery.model.path)(pixel_values=torch.zeros(1, 3, 32, 32)).logits.shape == (1, 5)
    assert not (run.folder / "recovery").exists()
