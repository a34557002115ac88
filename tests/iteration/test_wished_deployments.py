"""What a plan wishes of quantization: carried out for its attempt, or refused with a reason; it says nothing of other attempts."""

import pytest
from made import BASELINE, GOAL, attempt, journal, profile, race_result, ref

from profiling_agent.deployment.choices import recommend
from profiling_agent.errors import PlanError
from profiling_agent.iteration.attempt import deployment_of
from profiling_agent.iteration.deployments import ASKED_SCHEMES, DeploymentChoices, why_undeployable
from profiling_agent.iteration.planners import propose
from profiling_agent.records import (
    DeployedModel,
    Deployment,
    DeploymentOption,
    DeploymentSearch,
    Journal,
    Plan,
    QuantizationRecommendation,
)
from profiling_agent.records.deployment import RuntimeName, Scheme

HERE: dict[RuntimeName, tuple[Scheme, ...]] = {
    "eager": ("float32", "dynamic"),
    "onnxruntime": ("float32", "dynamic", "static"),
    "openvino": ("float32", "static", "static_nncf"),
}
CHOICES = DeploymentChoices(HERE, ASKED_SCHEMES["auto"])
PAPER = GOAL.model_copy(update={"selection": "paper"})


def rec(layer: str, kind: str, dtype: str) -> QuantizationRecommendation:
    return QuantizationRecommendation.model_validate({"layer": layer, "quantization_type": kind, "dtype": dtype})


def option(runtime: RuntimeName, scheme: Scheme, speedup: float | None) -> DeploymentOption:
    deployment = Deployment(runtime=runtime, scheme=scheme, recommendations=recommend(scheme))
    made = DeployedModel(model=ref(runtime), deployment=deployment, layers=(), distance=0.0, kl=0.0, seconds=1.0)
    raced = None if speedup is None else race_result(runtime, speedup, speedup * 0.9, speedup * 1.1)
    return DeploymentOption(
        deployment=deployment, deployed=None if speedup is None else made, race_result=raced, reason="made"
    )


def seen(*attempts) -> Journal:
    """Return a journal in which onnxruntime's dynamic int8 leads, and openvino's static one was faster than onnxruntime's."""
    options = (
        option("onnxruntime", "dynamic", 3.0),
        option("onnxruntime", "static", 2.0),
        option("openvino", "static", 2.5),
        option("openvino", "static_nncf", None),
        option("eager", "dynamic", 1.2),
    )
    search = DeploymentSearch(options=options, chosen=options[0].deployment)
    return Journal(baseline=BASELINE, deployment_search=search, attempts=attempts)


def test_a_plan_without_a_wish_is_deployed_in_what_leads():
    assert deployment_of(Plan(), seen(), CHOICES, GOAL) == seen().deployment
    assert deployment_of(Plan(), journal(), CHOICES, GOAL) is None


@pytest.mark.parametrize(
    ("wish", "name"),
    [
        # Of the runtimes that know it the one that raced best with it; what could not be made is behind.
        ((rec("all", "static", "qint8"),), "openvino static"),
        ((rec("all", "dynamic", "qint8"),), "onnxruntime dynamic"),
        ((rec("all", "dynamic", "qint8"), rec("classifier", "cast", "float32")), "onnxruntime dynamic"),
        ((rec(r"mlp\.fc1", "static", "qint8"),), "openvino static"),
        # float32: another runtime's, which was not tried.
        ((), "openvino float32"),
    ],
)
def test_a_plan_is_deployed_as_it_says(wish: tuple[QuantizationRecommendation, ...], name: str):
    found = deployment_of(Plan(quantization=wish), seen(), CHOICES, GOAL)

    assert found is not None
    assert found.name == name
    assert found.recommendations == wish


def test_what_a_users_plan_asks_for_is_deployed_in_what_led_of_that():
    wish = (rec("all", "dynamic", "qint8"),)
    kept = (*wish, rec("classifier", "cast", "float32"))
    leads = Deployment(runtime="onnxruntime", scheme="dynamic", recommendations=kept)
    opened = seen().model_copy(update={"wish": wish})
    assert opened.deployment_search is not None
    opened = opened.model_copy(
        update={"deployment_search": opened.deployment_search.model_copy(update={"chosen": leads})}
    )

    assert deployment_of(Plan(quantization=wish), opened, CHOICES, GOAL) == leads


def test_float32_where_no_other_runtime_is_there_is_no_deployment():
    eager = DeploymentChoices({"eager": ("float32", "dynamic")}, ASKED_SCHEMES["auto"])

    assert deployment_of(Plan(quantization=()), journal(), eager, GOAL) is None
    assert why_undeployable(Plan(quantization=()), eager, GOAL) is None


def test_what_no_runtime_here_can_do_is_refused_with_what_there_is():
    wish = Plan(quantization=(rec("all", "cast", "bfloat16"),))

    with pytest.raises(
        PlanError, match=r"no runtime that is installed can do .*: there are eager float32, eager dynamic"
    ):
        deployment_of(wish, seen(), CHOICES, GOAL)
    # Neither can two schemes be mixed in a runtime that knows one at a time.
    mixed = Plan(quantization=(rec("all", "static", "qint8"), rec("fc2", "dynamic", "qint8")))
    assert "no runtime that is installed" in (why_undeployable(mixed, CHOICES, GOAL) or "")


def test_layers_can_not_be_chosen_where_half_precision_is_the_whole_models():
    cuda = DeploymentChoices({"eager": ("float32", "bfloat16")}, ASKED_SCHEMES["auto"], is_whole=True)

    assert why_undeployable(Plan(quantization=(rec("all", "cast", "bfloat16"),)), cuda, GOAL) is None
    wish = Plan(quantization=(rec("all", "cast", "bfloat16"), rec("classifier", "cast", "float32")))
    assert why_undeployable(wish, cuda, GOAL) == (
        "on CUDA half precision is the whole model's: quantization may name layers for int8 and float8 only"
    )


def test_by_the_papers_selection_attempts_stay_in_float32_and_a_wish_is_refused():
    wish = Plan(quantization=(rec("all", "dynamic", "qint8"),))

    assert "eager float32" in (why_undeployable(wish, CHOICES, PAPER) or "")
    assert why_undeployable(Plan(), CHOICES, PAPER) is None


def test_an_attempt_with_a_wish_of_its_own_says_nothing_of_the_deployment_that_leads():
    leading = seen().deployment
    assert leading is not None
    static = Deployment(runtime="openvino", scheme="static", recommendations=recommend("static"))

    def made(number: int, ratio: float, deployment: Deployment, *, accepted: bool):
        one = attempt(number, ratio, accepted=accepted, correct=899 if accepted else 800)
        plan = one.plan.model_copy(update={"quantization": deployment.recommendations})
        return one.model_copy(update={"deployment": deployment, "plan": plan})

    first = made(1, 0.25, leading, accepted=True)
    refused = made(2, 0.375, static, accepted=False)
    assert [seen().is_as_leading(row) for row in (first, refused)] == [True, False]

    # The rules go on from 0.25 as if 0.375 in static int8 had never been: to twice as much.
    after, without = (propose(GOAL, profile(4), seen(*rows), max_iterations=5) for rows in ((first, refused), (first,)))
    assert isinstance(after, Plan)
    assert after == without
    assert after.pruning[0].pruning_ratio == 0.5
    assert after.quantization is None
