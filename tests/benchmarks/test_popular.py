"""What benchmarks/popular.py holds against a run: a crash, time, and deployments that failed where the tiny model has them."""

import popular
from deployed import all_deployments, deployment
from pruning.families import FAMILIES

from profiling_agent.schemas import DeploymentOption


def failed(name: str, reason: str) -> DeploymentOption:
    return DeploymentOption(deployment=deployment(name), reason=reason)


def test_a_deployment_that_failed_is_missed_where_the_tiny_model_has_it():
    options = [
        failed("openvino static", "could not be made: why"),
        failed("inductor static", "dropped out of the race"),
        failed("eager bfloat16", "loses 3.0 points"),
    ]

    assert popular.missed(options, "vit") == [
        "openvino static: could not be made: why",
        "inductor static: dropped out of the race",
    ]
    # docs/support.md has it among what OpenVINO computes otherwise.
    assert popular.missed(options[:1], "levit") == []


def test_every_popular_model_has_a_tiny_one_that_was_taken_through_all_deployments():
    every = {(each.runtime, each.scheme) for each in all_deployments()}

    assert {model.family for model in popular.MODELS.values()} <= set(FAMILIES)
    assert popular.can_do("vit") == every
