"""Which other deployments of the best attempt are worth making: those that may win, by what the baseline showed."""

from typing import Any

import made
import pytest

from profiling_agent.iteration.finalists import _rivals
from profiling_agent.records import Candidate, Deployment, DeploymentOption, DeploymentSearch, Variant


def option(runtime: Any, speedup: float | None) -> DeploymentOption:
    deployment = Deployment(runtime=runtime, scheme="static")
    raced = made.race_result(runtime, speedup, speedup * 0.95, speedup * 1.05) if speedup else None
    return DeploymentOption(deployment=deployment, race_result=raced, keeps_accuracy=True, reason="kept")


def rivals(*options: DeploymentOption, macs: int = 500, **goal: Any) -> list[str]:
    search = DeploymentSearch(options=options, chosen=options[0].deployment) if options else None
    journal = made.journal().model_copy(update={"deployment_search": search})
    pruned = Candidate(variant=Variant.BOTH, attempt=1, evaluation=made.evaluation("both1", Variant.BOTH, macs=macs))
    return [each.runtime for each in _rivals(journal, pruned, made.GOAL.model_copy(update=goal))]


def test_what_was_far_behind_on_the_baseline_is_not_made_of_the_pruned_model():
    # The leader has 5.7 at least; 4.0 may reach 1.05 * 1.5 * 4.0, 3.5 may not.
    assert rivals(option("openvino", 6.0), option("onnxruntime", 4.0)) == ["openvino", "onnxruntime"]
    assert rivals(option("openvino", 6.0), option("onnxruntime", 3.5)) == ["openvino"]
    assert rivals(option("openvino", 6.0), option("onnxruntime", None)) == ["openvino", "onnxruntime"]


def test_eager_float32_is_as_much_faster_as_its_macs_are_fewer():
    # Half of 1,000 MACs: 2.0, which may be 3.0.
    assert rivals(option("openvino", 3.1)) == ["eager", "openvino"]
    assert rivals(option("openvino", 3.2)) == ["openvino"]
    assert rivals(option("openvino", 3.2), macs=400) == ["eager", "openvino"]


@pytest.mark.parametrize("objective", ["size", "memory"])
def test_whoever_asks_for_less_of_something_else_tries_all(objective: str):
    assert rivals(option("openvino", 6.0), option("onnxruntime", 2.0), objective=objective) == [
        "eager", "openvino", "onnxruntime",
    ]  # fmt: skip


def test_where_nothing_else_was_tried_eager_float32_is():
    assert rivals() == ["eager"]
