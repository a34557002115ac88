import pytest

from profiling_agent.deployment.choices import recommend
from profiling_agent.errors import RequestError
from profiling_agent.iteration.deployments import (
    ASKED_SCHEMES,
    DeploymentChoices,
    by_promise,
    check_runtimes,
    deployment_choices,
    leaving_in_float,
    possible_deployments,
    schemes_of,
)
from profiling_agent.modules.layer_names import matching_names
from profiling_agent.records import Deployment, Plan, QuantizationRecommendation
from profiling_agent.records.deployment import RuntimeName, Scheme
from profiling_agent.request import Request

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
    deployment = leaving_in_float(
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
