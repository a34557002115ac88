"""Which deployments may be made, and that of a plan: a wish is carried out, or refused with a reason."""

import pytest
from sample_records import BASELINE, GOAL, attempt, journal, profile, race_result, ref

from profiling_agent.errors import PlanError, RequestError
from profiling_agent.modules.layer_names import matching_names
from profiling_agent.request import Request
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import (
    DeployedModel,
    Deployment,
    DeploymentOption,
    DeploymentSearch,
    Journal,
    Plan,
    QuantizationRecommendation,
)
from profiling_agent.schemas.plan import RuntimeName, Scheme
from profiling_agent.search.attempt import deployment_of
from profiling_agent.search.deployments import (
    ASKED_SCHEMES,
    DeploymentChoices,
    by_promise,
    check_runtimes,
    deployment_choices,
    keep_layers_in_float,
    possible_deployments,
    schemes_of,
    why_undeployable,
)
from profiling_agent.search.planners import propose

EVERY: dict[RuntimeName, tuple[Scheme, ...]] = {
    "eager": ("float32", "bfloat16", "float16", "dynamic"),
    "inductor": ("float32", "bfloat16", "static"),
    "onnxruntime": ("float32", "dynamic", "static"),
    "openvino": ("float32", "bfloat16", "static", "static_nncf"),
}


def rec(layer: str, kind: str, dtype: str) -> QuantizationRecommendation:
    return QuantizationRecommendation.model_validate({"layer": layer, "quantization_type": kind, "dtype": dtype})


def names(plan: Plan, dtype: str = "auto", supported=EVERY) -> set[str]:
    choices = DeploymentChoices(supported, ASKED_SCHEMES[dtype])
    return {deployment.name for deployment in possible_deployments(plan, choices)}


def test_where_nothing_is_said_every_deployment_but_the_baselines_own_is_tried():
    assert len(names(Plan())) == sum(map(len, EVERY.values())) - 1
    assert "eager float32" not in names(Plan())


def test_a_runtime_that_is_not_there_has_no_deployment():
    assert names(Plan(), supported={"eager": EVERY["eager"]}) == {"eager bfloat16", "eager float16", "eager dynamic"}


def test_no_quantization_leaves_the_choice_of_runtime():
    assert names(Plan(), "none") == {"inductor float32", "onnxruntime float32", "openvino float32"}
    assert names(Plan(quantization=())) == {"inductor float32", "onnxruntime float32", "openvino float32"}


def test_the_papers_plan_is_carried_out_by_whoever_can():
    plan = Plan(quantization=(QuantizationRecommendation(layer="all", dtype="qint8"),))

    assert names(plan) == {"eager dynamic", "onnxruntime dynamic"}
    deployments = possible_deployments(plan, DeploymentChoices(EVERY, ASKED_SCHEMES["auto"]))
    assert all(deployment.recommendations == plan.quantization for deployment in deployments)


@pytest.mark.parametrize(
    ("recommendations", "expected"),
    [
        (
            (rec("all", "static", "qint8"),),
            {"inductor static", "onnxruntime static", "openvino static", "openvino static_nncf"},
        ),
        ((rec("all", "dynamic", "float16"),), {"eager float16"}),
        ((rec("all", "static", "qint8"), rec("fc2", "cast", "bfloat16")), {"inductor static"}),
        ((rec("all", "dynamic", "qint8"), rec("fc2", "cast", "bfloat16")), {"eager dynamic"}),
        (
            (rec("all", "dynamic", "qint8"), rec("fc2", "cast", "float32")),
            {"eager dynamic", "onnxruntime dynamic"},
        ),
        ((rec("all", "static", "qint8"), rec("fc2", "dynamic", "qint8")), set()),
    ],
)
def test_a_mixture_goes_to_the_runtimes_that_can_mix(recommendations, expected: set[str]):
    assert names(Plan(quantization=recommendations)) == expected


def test_each_scheme_is_read_back_from_its_own_recommendation():
    for scheme in ("bfloat16", "float16", "dynamic", "static"):
        assert scheme in schemes_of(recommend(scheme))
    assert recommend("float32") == ()


def test_a_layer_left_in_float_is_that_layer_alone():
    deployment = keep_layers_in_float(
        Deployment(scheme="static", recommendations=recommend("static")), ["vit.layers.1.mlp.fc1"]
    )

    layers = ["vit.layers.1.mlp.fc1", "vit.layers.1.mlp.fc10", "vit.layers.11.mlp.fc1"]
    assert deployment.recommendations[-1].dtype == "float32"
    assert matching_names(deployment.recommendations[-1].layer, layers) == layers[:1]


def test_dtypes_that_do_not_go_with_their_type_are_refused():
    with pytest.raises(ValueError, match="takes dtype qint8, not 'float16'"):
        rec("all", "static", "float16")


def test_on_cuda_nothing_is_offered_that_has_no_kernels_there():
    choices = deployment_choices(Request(), "cuda")

    found = possible_deployments(Plan(), choices)
    named = {deployment.name for deployment in found}
    assert {deployment.runtime for deployment in found} <= {"eager", "graphed", "inductor"}
    assert not {deployment.scheme for deployment in found} & {"static", "static_nncf"}
    assert {"eager tf32", "eager bfloat16", "eager float16", "graphed dynamic", "graphed float8"} <= named
    assert by_promise(found)[0].name == "graphed float8"
    assert not any("graphed" in note for note in deployment_choices(Request(), "cpu").notes)
    # Without quantization TF32 is left, as float32 is.
    unquantized = possible_deployments(Plan(), deployment_choices(Request(quantize_dtype="none"), "cuda"))
    assert {deployment.scheme for deployment in unquantized} <= {"float32", "tf32"}
    # A pattern chooses the layers that are int8 or float8.
    some = possible_deployments(Plan(), deployment_choices(Request(quantize_layers="mlp"), "cuda"))
    assert {deployment.scheme for deployment in some} <= {"float32", "tf32", "dynamic", "float8"}


@pytest.mark.parametrize(
    ("recommendations", "expected"),
    [
        ((rec("all", "dynamic", "qint8"),), "graphed dynamic"),
        ((rec("all", "dynamic", "float8"), rec("fc2", "cast", "bfloat16")), "graphed float8"),
        ((rec("all", "dynamic", "qint8"), rec("fc2", "dynamic", "float8")), "graphed float8"),
        ((rec("all", "dynamic", "qint8"), rec("fc2", "dynamic", "float16")), None),
    ],
)
def test_on_cuda_a_plan_mixes_int8_float8_and_bfloat16(recommendations, expected: str | None):
    choices = deployment_choices(Request(runtimes="eager,graphed"), "cuda")

    found = possible_deployments(Plan(quantization=recommendations), choices)

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
        check_runtimes(Request(device="cuda", **asked))
    check_runtimes(Request(device="cpu", **asked))
    check_runtimes(Request(device="cuda", runtimes="eager", quantize_dtype="bfloat16"))


HERE: dict[RuntimeName, tuple[Scheme, ...]] = {
    "eager": ("float32", "dynamic"),
    "onnxruntime": ("float32", "dynamic", "static"),
    "openvino": ("float32", "static", "static_nncf"),
}
CHOICES = DeploymentChoices(HERE, ASKED_SCHEMES["auto"])
PAPER = GOAL.model_copy(update={"selection": "paper"})


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
    cuda = DeploymentChoices({"eager": ("float32", "bfloat16")}, ASKED_SCHEMES["auto"], on_cuda=True)

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
