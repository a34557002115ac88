"""A whole run in which other runtimes than torch compete."""

from pathlib import Path

import pytest
from conftest import World
from PIL import Image

from profiling_agent import load, optimize
from profiling_agent.runtimes.artifact import SCHEMES
from profiling_agent.search.deployment_search import MAX_SHIFT

pytestmark = pytest.mark.slow


def test_runtimes_compete_and_the_winner_is_loaded_in_its_own(world: World, tmp_path: Path):
    report = optimize(world.request(tmp_path, runtimes="onnxruntime,openvino", quantize_dtype="qint8", iterate=False))

    assert report.deployment_search is not None
    tried = {option.deployment.name: option for option in report.deployment_search.options}
    assert set(tried) == {
        "onnxruntime float32",
        "onnxruntime dynamic",
        "onnxruntime static",
        "openvino float32",
        "openvino static",
        "openvino static_nncf",
    }
    assert all(option.deployed for option in tried.values()), {name: option.reason for name, option in tried.items()}
    assert report.deployment_search.chosen is not None
    assert report.best.deployment.runtime in ("onnxruntime", "openvino")
    # Each variant, and the winner's float32 model in every deployment that suited the baseline: in eager torch unless the leader is so far ahead that it couldn't win.
    variants = {row.evaluation.variant for row in report.variants}
    assert variants >= {"baseline", "quantized", "pruned+quantized"}
    (attempt,) = report.attempts
    assert attempt.dry_run is not None
    leader = report.deployment_search.of(report.deployment_search.chosen).race_result
    fewer = report.baseline.macs / attempt.dry_run.macs
    assert "pruned" in variants or (leader is not None and leader.speedup_low > MAX_SHIFT * fewer)

    best = load(tmp_path / "quick" / "best")
    answer = best.predict(Image.new("RGB", (32, 32), (200, 40, 40)))
    assert best.runtime == report.best.deployment.runtime
    assert 0 < answer.probability <= 1
    card = (tmp_path / "quick" / "best" / "README.md").read_text()
    assert SCHEMES[report.best.deployment.scheme] in card
    assert "held-out images" in card
