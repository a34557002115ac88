"""A real checkpoint: MobileNetV1 with ImageNet's weights, a thousand photographs, and a contract that int8 of its convolutions meets."""

from pathlib import Path

import pytest

from profiling_agent import Request, load, optimize
from profiling_agent.schemas import Outcome
from profiling_agent.search.deployments import INT8

SHARED = Path(__file__).resolve().parents[3] / "shared"
MODEL, DATASET = SHARED / "models" / "mobilenetv1-imagenet", SHARED / "data" / "imagenet-sample"

pytestmark = [
    pytest.mark.matrix,
    pytest.mark.skipif(not (MODEL.exists() and DATASET.exists()), reason=f"{MODEL} or {DATASET} is missing"),
]


def test_int8_of_the_convolutions_meets_a_contract_of_two_points_and_a_third_of_the_bytes(tmp_path: Path):
    folders = {"model": str(MODEL), "dataset": str(DATASET), "output": str(tmp_path)}
    contract = {"max_accuracy_drop": 0.02, "max_size_ratio": 0.3}
    few = {"max_iterations": 1, "num_sessions": 2, "batch_size": 8}
    report = optimize(Request.model_validate(folders | contract | few))

    search = report.deployment_search
    assert search is not None
    tried = {option.deployment.name: option.reason for option in search.options}
    assert report.verdict.outcome is Outcome.MET, (report.verdict.explanation, tried, report.notes)
    assert report.best.deployment.scheme in INT8
    assert report.best.size_bytes <= 0.3 * report.baseline.size_bytes
    (winner,) = [option.deployed for option in search.options if option.deployment == report.best.deployment]
    assert winner is not None
    assert sum(".convolution" in name for name in winner.layers) >= 20
    assert report.heldout.drop is not None
    assert report.heldout.drop.drop <= 0.02
    assert load(tmp_path / report.run_id / "best").runtime == report.best.deployment.runtime
