"""Which other deployments of the best attempt are worth making: those that may win, by what the baseline showed."""

from typing import Any

import made
import pytest

from profiling_agent.iteration.finalize import _rivals
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


def test_of_a_slow_model_what_stays_larger_than_the_contract_allows_is_not_made():
    # Of 2,000 bytes the pruned model has 600 in its deployment, and half of the params are left: 1,000 in eager float32, and half of what others have.
    def sized(runtime: Any, size_bytes: int) -> DeploymentOption:
        evaluation = made.evaluation(runtime, Variant.QUANTIZED, size_bytes=size_bytes)
        return option(runtime, 3.0).model_copy(update={"evaluation": evaluation})

    options = (sized("openvino", 1000), sized("onnxruntime", 1700), sized("inductor", 1500))
    search = DeploymentSearch(options=options, chosen=options[0].deployment)
    whole = made.evaluation("m0", Variant.BASELINE, size_bytes=2000)
    journal = made.journal().model_copy(update={"deployment_search": search, "baseline": whole})

    def rivals_of(max_size_ratio: float, *, size_bytes: int = 600, small_alone: bool = True) -> list[str]:
        own = made.evaluation("both1", Variant.BOTH, macs=400, params=500, size_bytes=size_bytes)
        pruned = Candidate(variant=Variant.BOTH, attempt=1, evaluation=own)
        goal = made.GOAL.model_copy(update={"max_size_ratio": max_size_ratio})
        return [each.runtime for each in _rivals(journal, pruned, goal, small_alone=small_alone)]

    assert rivals_of(0.5) == ["eager", "openvino", "onnxruntime", "inductor"]
    assert rivals_of(0.4) == ["openvino", "inductor"]
    assert rivals_of(0.4, small_alone=False) == ["eager", "openvino", "onnxruntime", "inductor"]
    # Where it isn't small enough as it is, the others may not be worse.
    assert rivals_of(0.4, size_bytes=900) == ["eager", "openvino", "onnxruntime", "inductor"]


@pytest.mark.parametrize("objective", ["size", "memory"])
def test_whoever_asks_for_less_of_something_else_tries_all(objective: str):
    assert rivals(option("openvino", 6.0), option("onnxruntime", 2.0), objective=objective) == [
        "eager", "openvino", "onnxruntime",
    ]  # fmt: skip


def test_where_nothing_else_was_tried_eager_float32_is():
    assert rivals() == ["eager"]
