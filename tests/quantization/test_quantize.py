"""Quantization of whole models: which layers a recommendation names, and every scheme."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import in_process
import pytest
import torch
import zoo
from activated_norms import ActivatedNorm, activated
from pruning.families import FAMILIES, TYPICAL_FIRST, processor_of, spec_of
from quantization.asked import CALIBRATION, IMAGES, asked
from torch import nn

from profiling_agent.errors import PlanError, QuantizationError
from profiling_agent.jobs.tasks import DeployTask
from profiling_agent.lib.inference import Folded
from profiling_agent.lib.modules import logits_of, relative_distance
from profiling_agent.quantization.layers import RowwiseLinear, StaticLayer, quantized_modules, torch_has_vnni
from profiling_agent.quantization.quantize import fold_norms_, quantize_model, quantize_rowwise
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import Deployment


@pytest.mark.parametrize(
    ("kind", "dtype", "types", "most"),
    [
        ("dynamic", "qint8", (nn.Linear,), 0.1),
        ("static", "qint8", (nn.Linear, nn.Conv2d), 0.05),
        ("cast", "bfloat16", (nn.Linear, nn.Conv2d), 0.05),
    ],
)
@pytest.mark.parametrize("family", ["swin", "resnet"])
def test_all_means_every_layer_of_its_types_and_the_given_model_is_untouched(
    family: str, kind: str, dtype: str, types: tuple[type, ...], most: float
):
    model = zoo.FAMILIES[family]()
    names = tuple(name for name, module in model.named_modules() if type(module) in types)
    before = logits_of(model, IMAGES)

    quantized = quantize_model(model, asked("all", kind, dtype), calibration=CALIBRATION)

    assert quantized.layers == names == tuple(quantized_modules(quantized.model))
    assert torch.equal(logits_of(model, IMAGES), before)
    assert relative_distance(logits_of(quantized.model, IMAGES), before) < most


def test_the_last_recommendation_that_hits_a_layer_wins_and_schemes_mix():
    plan = [
        *asked(),
        *asked(r"mlp\.fc\d$", "dynamic", "float16"),
        *asked(r"layers\.1\.mlp\.fc2", "dynamic"),
        *asked("q_proj", "cast", "bfloat16"),
        *asked("classifier", "cast", "float32"),
    ]

    quantized = quantize_model(zoo.vit(), plan, calibration=CALIBRATION)

    inner = zoo.inside(quantized.model)
    first, second = inner.vit.layers
    assert [layer.dtype for layer in (first.mlp.fc1, second.mlp.fc1, second.mlp.fc2)] == ["float16", "float16", "qint8"]
    assert (second.mlp.fc2.kind, first.attention.q_proj.kind) == ("dynamic", "cast")
    assert isinstance(first.attention.o_proj, StaticLayer)
    assert isinstance(inner.vit.embeddings.patch_embeddings.projection, StaticLayer)
    assert type(inner.classifier) is nn.Linear
    assert "classifier" not in quantized.layers


NO_LINEAR = r"hits no nn\.Linear, which alone"


@pytest.mark.parametrize(
    ("pattern", "error", "says"),
    [
        (r"vit\.encoder\.layer\.0\.intermediate\.dense", PlanError, r"vit\.layers\.0\.mlp\.fc1"),
        # A convolution.
        ("projection", QuantizationError, NO_LINEAR),
        *((pattern, PlanError, "RE2") for pattern in ("(", r"(a)\1", "(?=x)", "(((a{1,1000}){1,1000}){1,1000})")),
    ],
)
def test_a_pattern_that_is_invalid_or_hits_nothing_is_refused(pattern: str, error: type[Exception], says: str):
    with pytest.raises(error, match=says):
        quantize_model(zoo.vit(), asked(pattern, "dynamic"))


def test_a_layer_that_is_shared_is_quantized_under_both_names_and_subclasses_of_linear_are_left_alone():
    layer = nn.Linear(8, 8)
    # Attention's forward pass reads `out_proj.weight`, which a packed layer doesn't have.
    model = nn.ModuleDict({"a": layer, "attention": nn.MultiheadAttention(8, 2), "b": layer})

    assert quantize_model(model, asked("all", "dynamic")).layers == ("a", "b")


@pytest.mark.parametrize(("kind", "broken"), [("dynamic", "classifier"), ("static", "vit.layernorm")])
def test_the_layer_whose_weights_or_inputs_are_broken_is_named(kind: str, broken: str):
    model = zoo.vit()
    with torch.no_grad():
        model.get_submodule(broken).weight.view(-1)[0] = float("inf")

    with pytest.raises(QuantizationError, match="'classifier'"):
        quantize_model(model, asked("all", kind), calibration=CALIBRATION)


def test_a_model_of_int8_alone_keeps_its_activations_and_knows_its_images_type():
    model = activated()

    quantized = quantize_model(model, asked(), calibration=CALIBRATION)

    assert (quantized.layers, quantized.folded) == (("conv", "head"), ("norm",))
    assert sum(parameter.numel() for parameter in quantized.model.parameters()) == 0
    assert relative_distance(logits_of(quantized.model, IMAGES), logits_of(model, IMAGES)) < 0.05


@pytest.mark.parametrize("reduced", [False, True, None])
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_int8_layers_have_as_many_bits_as_what_executes_them_can_add_up(kind: str, reduced: bool | None):
    quantized = quantize_model(zoo.vit(), asked("all", kind), calibration=CALIBRATION, reduce_range=reduced)

    layers: list[Any] = list(quantized_modules(quantized.model).values())
    # Torch executes dynamic layers, and static ones of no named runtime.
    expected = reduced if kind == "static" and reduced is not None else not torch_has_vnni()
    assert {layer.reduce_range for layer in layers} == {expected}
    if kind == "static":
        assert {layer.grid.levels for layer in layers} == {127 if expected else 255}


@pytest.mark.parametrize(("pattern", "prefix"), [("all", "resnet"), ("embedder", "resnet.embedder")])
def test_batch_norms_go_into_the_convolutions_before_them_that_are_quantized(pattern: str, prefix: str):
    model = zoo.resnet()

    quantized = quantize_model(model, asked(pattern), calibration=CALIBRATION)

    norms = {name for name, module in model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    folded = {name for name in norms if name.startswith(prefix)}
    left = {name for name, module in quantized.model.named_modules() if isinstance(module, nn.BatchNorm2d)}
    assert set(quantized.folded) == folded
    assert left == norms - folded


class Branching(nn.Module):
    """Its first convolution is read by a batch norm and, past it, by a sum; its second by a batch norm alone."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)
        self.last, self.last_norm = nn.Conv2d(3, 3, 1), nn.BatchNorm2d(3)

    def forward(self, pixel_values: torch.Tensor) -> SimpleNamespace:
        given = self.conv(pixel_values)
        return SimpleNamespace(logits=self.last_norm(self.last(given + self.norm(given))).mean((2, 3)))


def test_a_batch_norm_whose_input_is_read_elsewhere_stays():
    model = zoo.randomised(Branching())
    before = logits_of(model, IMAGES).clone()

    with torch.no_grad():
        folded = fold_norms_(model, ["conv", "last"], IMAGES)

    assert folded == ("last_norm",)
    assert isinstance(model.norm, nn.BatchNorm2d)
    assert relative_distance(logits_of(model, IMAGES), before) < 1e-5


def test_a_model_in_training_is_quantized_as_in_evaluation_and_what_no_image_reaches_stays_float():
    model = zoo.resnet("basic")
    model.spare = nn.Linear(4, 4)
    expected = logits_of(quantize_model(model, asked(), calibration=CALIBRATION).model, IMAGES)

    quantized = quantize_model(model.train(), asked(), calibration=CALIBRATION)

    assert model.training
    assert quantized.model.training
    assert torch.equal(logits_of(quantized.model.eval(), IMAGES), expected)
    assert "spare" not in quantized.layers
    assert type(quantized.model.spare) is nn.Linear


@pytest.mark.parametrize(
    ("family", "given", "says"),
    [
        ("vit", (), "at least 8 calibration images, 0"),
        ("vit", [IMAGES[:7]], "at least 8 calibration images, 7"),
        ("vit", [IMAGES[:, :, :16, :16]], r"images of shape \(3, 16, 16\)"),
        # A ResNet takes images of any size.
        ("resnet", [IMAGES[:, :1]], "images of shape"),
    ],
)
def test_static_quantization_without_enough_images_that_fit_is_refused(family: str, given: Any, says: str):
    with pytest.raises(QuantizationError, match=says) as refused:
        quantize_model(zoo.FAMILIES[family](), asked(), calibration=given)

    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("scheme", "pattern", "dtype"),
    [("dynamic", "all", "qint8"), ("float8", "all", "float8"), ("float8", "fc1", "float8")],
)
def test_linear_layers_that_a_pattern_hits_are_quantized_but_not_the_classifier(scheme: Any, pattern: str, dtype: str):
    model = zoo.vit()

    quantized = quantize_rowwise(model, recommend(scheme, pattern))

    linear = [name for name, module in model.named_modules() if type(module) is nn.Linear and name != "classifier"]
    made = {name: module.dtype for name, module in quantized.named_modules() if isinstance(module, RowwiseLinear)}
    assert made == {name: dtype for name in linear if pattern == "all" or name.endswith(pattern)} != {}
    assert quantized.get_submodule("classifier").out_features == len(zoo.LABELS)


def test_a_model_without_such_layers_is_refused_in_one_line():
    for model, chosen in (
        (zoo.resnet(), recommend("dynamic")),
        (zoo.vit(intermediate_size=250), recommend("float8", "fc1")),
    ):
        with pytest.raises(QuantizationError, match="besides the classifier, has widths that are multiples of 16"):
            quantize_rowwise(model, chosen)


SCHEMES = (("dynamic", "qint8"), ("static", "qint8"), ("cast", "bfloat16"), ("dynamic", "float16"))
SIZES = {"mobilevit": 64, "mobilevitv2": 64, "levit": 64, "levit_teacher": 64}


@pytest.mark.parametrize("family", TYPICAL_FIRST)
def test_a_family_runs_in_every_scheme(family: str):
    model, size = FAMILIES[family](), SIZES.get(family, 32)
    images = torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(1))
    has_linear = any(type(module) is nn.Linear for module in model.modules())
    expected = logits_of(model, images)

    for kind, dtype in SCHEMES:
        if kind == "dynamic" and not has_linear:
            with pytest.raises(QuantizationError, match=r"^the model has no nn\.Linear, "):
                quantize_model(model, asked("all", kind, dtype))
            continue
        quantized = quantize_model(model, asked("all", kind, dtype), calibration=images.split(4))
        assert quantized.layers == tuple(quantized_modules(quantized.model))
        assert has_linear <= bool(quantized.layers)
        # Random weights feed rounding through to the logits more than trained ones do.
        assert relative_distance(logits_of(quantized.model, images), expected) < 0.5, (kind, dtype)


@pytest.mark.slow
def test_a_convolution_whose_border_has_a_name_is_compiled_in_int8(tmp_path: Path):
    """SigLIP's patches and EfficientNet's stem are such: the int8 kernel that torch.compile chooses takes no name."""
    model = FAMILIES["siglip"]()
    spec = spec_of(model)
    deployment = Deployment(runtime="inductor", scheme="static")
    saved = in_process.saved(tmp_path, "siglip", model, spec=spec, processor=processor_of(spec))
    images = in_process.drawn(tmp_path, "calibration", 16, side=spec.height)

    task = DeployTask(model=saved, deployment=deployment, calibration=images, batch_size=8)

    assert 0 < in_process.run(task, tmp_path, "deployed").distance < 0.25


def test_what_takes_a_norms_place_answers_its_attributes_and_keeps_its_activation():
    norm, images = ActivatedNorm(8).eval(), torch.randn(2, 8, 4, 4)

    found: Any = Folded(norm)

    assert (found.num_features, found.eps, found.momentum) == (norm.num_features, norm.eps, norm.momentum)
    assert torch.equal(found(images.clone()), images.relu())
    assert list(found.children()) == [norm.act]
