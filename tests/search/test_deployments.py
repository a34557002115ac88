"""Which deployments may be made, and that of a plan: a wish is carried out, or refused with a reason."""

import re
from typing import Any

import pytest
from sample_records import BASELINE, GOAL, journal
from search.scripted import deployment, option

from profiling_agent.errors import PlanError, RequestError
from profiling_agent.pruning.widths import matching_names
from profiling_agent.request import Request
from profiling_agent.schemas import (
    Deployment,
    DeploymentSearch,
    Journal,
    Plan,
    QuantizationRecommendation,
    RuntimeName,
    Scheme,
)
from profiling_agent.search import deployments
from profiling_agent.search.attempt import deployment_of
from profiling_agent.search.deployments import (
    ASKED_SCHEMES,
    DeploymentChoices,
    deployment_choices,
    possible_deployments,
)

EVERY: dict[RuntimeName, tuple[Scheme, ...]] = {
    "eager": ("float32", "bfloat16", "float16", "dynamic"),
    "inductor": ("float32", "bfloat16", "static"),
    "onnxruntime": ("float32", "dynamic", "static"),
    "openvino": ("float32", "bfloat16", "static", "static_nncf"),
}


def rec(layer: str, kind: str, dtype: str) -> QuantizationRecommendation:
    return QuantizationRecommendation.model_validate({"layer": layer, "quantization_type": kind, "dtype": dtype})


def names(plan: Plan, choices: DeploymentChoices) -> set[str]:
    return {deployment.name for deployment in possible_deployments(plan.quantization, choices)}


FLOAT32 = {"inductor float32", "onnxruntime float32", "openvino float32"}
INT8 = rec("all", "dynamic", "qint8")
STATIC = rec("all", "static", "qint8")
PAPERS = QuantizationRecommendation(layer="all", dtype="qint8")
STATICS = {"inductor static", "onnxruntime static", "openvino static", "openvino static_nncf"}
ALL_BUT_THE_BASELINES = {f"{name} {scheme}" for name, known in EVERY.items() for scheme in known} - {"eager float32"}


@pytest.mark.parametrize(
    ("plan", "dtype", "expected"),
    [
        (Plan(), "auto", ALL_BUT_THE_BASELINES),
        # Without quantization the choice of runtime is left.
        (Plan(), "none", FLOAT32),
        (Plan(quantization=()), "auto", FLOAT32),
        # The paper's plan is carried out by whoever can.
        (Plan(quantization=(PAPERS,)), "auto", {"eager dynamic", "onnxruntime dynamic"}),
        (Plan(quantization=(STATIC,)), "auto", STATICS),
        (Plan(quantization=(rec("all", "dynamic", "float16"),)), "auto", {"eager float16"}),
        # A mixture goes to the runtimes that can mix.
        (Plan(quantization=(STATIC, rec("fc2", "cast", "bfloat16"))), "auto", {"inductor static"}),
        (Plan(quantization=(INT8, rec("fc2", "cast", "bfloat16"))), "auto", {"eager dynamic"}),
        (Plan(quantization=(INT8, rec("fc2", "cast", "float32"))), "auto", {"eager dynamic", "onnxruntime dynamic"}),
        (Plan(quantization=(STATIC, rec("fc2", "dynamic", "qint8"))), "auto", set()),
    ],
)
def test_a_plan_has_the_deployments_that_can_carry_it_out(plan: Plan, dtype: str, expected: set[str]):
    choices = DeploymentChoices(EVERY, ASKED_SCHEMES[dtype])

    assert names(plan, choices) == expected
    for found in possible_deployments(plan.quantization, choices):
        assert plan.quantization in (None, found.recommendations)
    # A runtime that is not there has none.
    here = DeploymentChoices({"eager": EVERY["eager"]}, ASKED_SCHEMES[dtype])
    assert names(plan, here) == {name for name in expected if name.startswith("eager")}


def test_a_layer_left_in_float_is_that_layer_alone():
    kept = deployments.keep_layers_in_float(deployment("openvino", "static"), ["vit.layers.1.mlp.fc1"])
    left = kept.recommendations[-1]

    layers = ["vit.layers.1.mlp.fc1", "vit.layers.1.mlp.fc10", "vit.layers.11.mlp.fc1"]
    assert left.dtype == "float32"
    assert matching_names(left.layer, layers) == layers[:1]


def test_dtypes_that_do_not_go_with_their_type_are_refused():
    with pytest.raises(ValueError, match="takes dtype qint8, not 'float16'"):
        rec("all", "static", "float16")


def test_on_cuda_nothing_is_offered_that_has_no_kernels_there():
    found = possible_deployments(None, deployment_choices(Request(), "cuda"))
    named = {deployment.name for deployment in found}
    assert {deployment.runtime for deployment in found} <= {"eager", "graphed", "inductor"}
    assert not {deployment.scheme for deployment in found} & {"static", "static_nncf"}
    assert {"eager tf32", "eager bfloat16", "eager float16", "graphed dynamic", "graphed float8"} <= named
    assert {each.name for each in deployments.by_promise(found)[:2]} == {"graphed dynamic", "graphed float8"}
    assert not any("graphed" in note for note in deployment_choices(Request(), "cpu").notes)


def test_on_cuda_a_request_limits_the_schemes():
    # Without quantization TF32 is left, as float32 is; a pattern chooses the layers that are int8 or float8.
    for asked, schemes in (
        (Request(quantize_dtype="none"), {"float32", "tf32"}),
        (Request(quantize_layers="mlp"), {"float32", "tf32", "dynamic", "float8"}),
    ):
        found = possible_deployments(None, deployment_choices(asked, "cuda"))
        assert {deployment.scheme for deployment in found} <= schemes


@pytest.mark.parametrize(
    ("recommendations", "expected"),
    [
        ((INT8,), "graphed dynamic"),
        ((rec("all", "dynamic", "float8"), rec("fc2", "cast", "bfloat16")), "graphed float8"),
        ((INT8, rec("fc2", "dynamic", "float8")), "graphed float8"),
        ((INT8, rec("fc2", "dynamic", "float16")), None),
    ],
)
def test_on_cuda_a_plan_mixes_int8_float8_and_bfloat16(recommendations, expected: str | None):
    choices = deployment_choices(Request(runtimes="eager,graphed"), "cuda")

    found = possible_deployments(recommendations, choices)

    assert [deployment.name for deployment in found] == ([expected] if expected else [])


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"runtimes": "eager,onnxruntime"}, "runtimes asks for onnxruntime, which here runs on cpu only"),
        ({"runtimes": "openvino"}, "runtimes asks for openvino, which here runs on cpu only"),
        (
            {"quantize_layers": "mlp", "quantize_dtype": "bfloat16"},
            "quantize_layers is 'mlp' and device is 'cuda', where half precision is the whole",
        ),
    ],
)
def test_what_cuda_can_not_do_is_refused_before_anything_is_done(asked: dict, says: str):
    with pytest.raises(RequestError, match=says):
        deployments.check_runtimes(Request(device="cuda", **asked))
    deployments.check_runtimes(Request(device="cpu", **asked))
    deployments.check_runtimes(Request(device="cuda", runtimes="eager", quantize_dtype="bfloat16"))


HERE: dict[RuntimeName, tuple[Scheme, ...]] = {
    "eager": ("float32", "dynamic"),
    "onnxruntime": ("float32", "dynamic", "static"),
    "openvino": ("float32", "static", "static_nncf"),
}
CHOICES = DeploymentChoices(HERE, ASKED_SCHEMES["auto"])


def seen(*attempts) -> Journal:
    """Return a journal in which onnxruntime's dynamic int8 leads, and openvino's static one was faster than onnxruntime's."""
    options = (
        option("onnxruntime", "dynamic", speedup=3.0),
        option("onnxruntime", "static", speedup=2.0),
        option("openvino", "static", speedup=2.5),
        option("openvino", "static_nncf", deployed=None),
        option("eager", "dynamic", speedup=1.2),
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
        ((STATIC,), "openvino static"),
        ((INT8,), "onnxruntime dynamic"),
        ((INT8, rec("classifier", "cast", "float32")), "onnxruntime dynamic"),
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
    kept = (INT8, rec("classifier", "cast", "float32"))
    leads = Deployment(runtime="onnxruntime", scheme="dynamic", recommendations=kept)
    search = DeploymentSearch(options=(), chosen=leads)
    opened = Journal(baseline=BASELINE, deployment_search=search, requested_quantization=(INT8,))

    assert deployment_of(Plan(quantization=(INT8,)), opened, CHOICES, GOAL) == leads


def test_what_a_users_plan_asks_for_is_measured_even_if_all_of_it_was_rejected_for_the_unpruned_model():
    rejected = seen().model_copy(update={"requested_quantization": (INT8,)})
    assert rejected.deployment_search is not None
    search = rejected.deployment_search.model_copy(update={"chosen": None})
    rejected = rejected.model_copy(update={"deployment_search": search})

    found = deployment_of(Plan(quantization=(INT8,)), rejected, CHOICES, GOAL)

    assert found is not None
    assert found.name == "onnxruntime dynamic"
    # float32 was asked for, or the paper's selection, which judges nothing else.
    assert deployment_of(Plan(quantization=(INT8,)), rejected, CHOICES, GOAL.model_copy(update=PAPER)) is None
    rejected = rejected.model_copy(update={"requested_quantization": ()})
    assert deployment_of(Plan(quantization=()), rejected, CHOICES, GOAL) is None


PAPER: dict[str, Any] = {"selection": "paper"}
EAGER = DeploymentChoices({"eager": ("float32", "dynamic")}, ASKED_SCHEMES["auto"])
CUDA = DeploymentChoices({"eager": ("float32", "bfloat16")}, ASKED_SCHEMES["auto"], on_cuda=True)
HALF, NO_RUNTIME = rec("all", "cast", "bfloat16"), "no runtime that is installed"


@pytest.mark.parametrize(
    ("wish", "choices", "selection", "why"),
    [
        # Float32 where no other runtime is there is no deployment, and no problem.
        ((), EAGER, "contract", None),
        (
            (HALF,),
            CHOICES,
            "contract",
            f"{NO_RUNTIME} can do what the plan asks of quantization: there are eager float32",
        ),
        # Neither can two schemes be mixed in a runtime that knows one at a time.
        ((STATIC, rec("fc2", "dynamic", "qint8")), CHOICES, "contract", NO_RUNTIME),
        # On CUDA half precision is the whole model's.
        ((HALF,), CUDA, "contract", None),
        ((HALF, rec("classifier", "cast", "float32")), CUDA, "contract", "on CUDA half precision is the whole"),
        # By the paper's selection attempts stay in float32.
        ((INT8,), CHOICES, "paper", "the paper's selection judges attempts in eager float32"),
        (None, CHOICES, "paper", None),
    ],
)
def test_what_no_runtime_here_can_do_is_refused_with_what_there_is(
    wish: tuple[QuantizationRecommendation, ...] | None, choices: DeploymentChoices, selection: str, why: str | None
):
    plan, goal = Plan(quantization=wish), GOAL.model_copy(update={"selection": selection})
    found = deployments.why_undeployable(plan, choices, goal)

    assert (found or "").startswith(why or "")
    assert (found is None) == (why is None)
    if why is not None:
        with pytest.raises(PlanError, match=re.escape(why)):
            deployment_of(plan, journal(), choices, goal)
    elif choices is EAGER:
        assert deployment_of(plan, journal(), choices, goal) is None
