"""A real model from outside: ImageNet weights, photographs, TensorFlow's padding, all deployments."""

from pathlib import Path

import pytest

from profiling_agent import Request, optimize

SHARED = Path(__file__).parents[2].parent / "shared"
MODEL, DATA = SHARED / "models" / "mobilenetv1-imagenet", SHARED / "data" / "imagenet-sample"


@pytest.mark.slow
@pytest.mark.skipif(not (MODEL.is_dir() and DATA.is_dir()), reason="the real MobileNet and its photographs aren't here")
def test_a_real_mobilenet_meets_two_points_in_int8_with_three_tenths_of_its_bytes(tmp_path: Path):
    report = optimize(
        Request(
            model=str(MODEL),
            dataset=str(DATA),
            max_accuracy_drop=0.02,
            max_size_ratio=0.3,
            max_iterations=2,
            num_sessions=2,
            advisor="rules",
            output=str(tmp_path),
        )
    )

    assert report.verdict.outcome == "MET"
    assert report.best.deployment.scheme in ("static", "static_nncf")
    assert report.best.size_bytes <= 0.3 * report.baseline.size_bytes
    assert report.best.latency_ms < report.baseline.latency_ms
    search = report.deployment_search
    assert search is not None
    made = {option.deployment.name for option in search.options if option.deployed is not None}
    assert made >= {"onnxruntime static", "openvino static", "openvino static_nncf"}, search.options
    assert {option.deployment.runtime for option in search.options} >= {"eager", "onnxruntime", "openvino"}
