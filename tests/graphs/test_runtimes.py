"""A whole run in which other runtimes than torch compete."""

from pathlib import Path

import pytest
from conftest import World
from PIL import Image

from profiling_agent import load, optimize
from profiling_agent.artifacts.card import SCHEMES

pytestmark = pytest.mark.slow


def test_runtimes_compete_and_the_winner_is_loaded_in_its_own(world: World, tmp_path: Path):
    report = optimize(world.request(tmp_path, runtimes="onnxruntime,openvino", quantize_dtype="qint8", iterate=False))

    assert report.contest is not None
    tried = {trial.form.name: trial for trial in report.contest.trials}
    assert set(tried) == {
        "onnxruntime float32",
        "onnxruntime dynamic",
        "onnxruntime static",
        "openvino float32",
        "openvino static",
        "openvino static_nncf",
    }
    assert all(trial.deployed for trial in tried.values()), {name: trial.reason for name, trial in tried.items()}
    assert report.contest.chosen is not None
    assert report.best.form.runtime in ("onnxruntime", "openvino")
    # Each corner, and the winner's float32 model in every form that suited the baseline.
    assert {row.evaluation.variant for row in report.variants} >= {
        "baseline",
        "quantized",
        "pruned",
        "pruned+quantized",
    }

    best = load(tmp_path / "quick" / "best")
    answer = best.predict(Image.new("RGB", (32, 32), (200, 40, 40)))
    assert best.runtime == report.best.form.runtime
    assert 0 < answer.probability <= 1
    card = (tmp_path / "quick" / "best" / "README.md").read_text()
    assert SCHEMES[report.best.form.scheme] in card
    assert "held-out images" in card
