"""Every family in every scheme of torch's own layers: each can be made, answers its layers' attributes, and is near."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import zoo
from activated_norms import ActivatedNorm
from pruning.families import FAMILIES, TYPICAL_FIRST, processor_of, spec_of
from quantization.asked import asked
from torch import nn

from profiling_agent.errors import QuantizationError
from profiling_agent.jobs.handlers import model_check
from profiling_agent.lib.inference import Folded
from profiling_agent.lib.modules import logits_of, relative_distance
from profiling_agent.quantization.layers import CLASSES, quantized_modules
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.schemas import Deployment

SCHEMES: dict[Any, str] = {"dynamic": "qint8", "static": "qint8", "cast": "bfloat16"}
SIZES = {"mobilevit": 64, "mobilevitv2": 64, "levit": 64, "levit_teacher": 64}


@pytest.mark.parametrize("family", TYPICAL_FIRST)
def test_a_family_runs_in_every_scheme(family: str):
    model, size = FAMILIES[family](), SIZES.get(family, 32)
    images = torch.randn(8, 3, size, size, generator=torch.Generator().manual_seed(1))
    has_linear = any(type(module) is nn.Linear for module in model.modules())
    expected = logits_of(model, images)

    for kind, dtype in (*SCHEMES.items(), ("dynamic", "float16")):
        if kind == "dynamic" and not has_linear:
            with pytest.raises(QuantizationError, match=r"^the model has no nn\.Linear, .*nn\.Conv2d as well$"):
                quantize_model(model, asked("all", kind, dtype))
            continue
        quantized = quantize_model(model, asked("all", kind, dtype), calibration=lambda: list(images.split(4)))
        assert quantized.layers == tuple(quantized_modules(quantized.model))
        assert has_linear <= bool(quantized.layers)
        # Random weights feed rounding through to the logits more than trained ones do.
        assert relative_distance(logits_of(quantized.model, images), expected) < 0.5, (kind, dtype)


class OneLayer(nn.Module):
    def __init__(self, layer: nn.Module):
        super().__init__()
        self.layer = layer

    def forward(self, pixel_values: torch.Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=self.layer(pixel_values).flatten(1))


LAYERS: dict[type[nn.Module], Callable[[], nn.Linear | nn.Conv2d]] = {
    nn.Linear: lambda: nn.Linear(8, 6),
    nn.Conv2d: lambda: nn.Conv2d(8, 6, (3, 1), stride=2, padding=(1, 0), dilation=1, groups=2),
}


def plain(layer: nn.Module) -> list[str]:
    """What a layer says of itself: its widths, how it moves."""
    return [name for name in vars(layer) if not name.startswith("_") and name != "training"]


@pytest.mark.parametrize(
    ("kind", "replaced"),
    [(kind, replaced) for kind in SCHEMES for replaced in CLASSES[kind].replaces],
    ids=lambda value: getattr(value, "__name__", value),
)
@pytest.mark.parametrize("bias", [True, False])
def test_what_takes_a_layers_place_answers_its_attributes(kind: Any, replaced: type[nn.Module], bias: bool):
    layer = LAYERS[replaced]()
    if not bias:
        layer.register_parameter("bias", None)
    images = torch.randn(4, 8, 8, 8)
    recommended = asked("all", kind, SCHEMES[kind])

    quantized = quantize_model(OneLayer(layer), recommended, calibration=lambda: [images, images]).model
    ours = zoo.inside(quantized).layer

    assert {name: getattr(ours, name) for name in plain(layer)} == {name: getattr(layer, name) for name in plain(layer)}
    assert torch.allclose(ours.weight, layer.weight, atol=0.02)
    assert (ours.bias is None) == (layer.bias is None)


# An even kernel puts one pixel more on one side than on the other, which torch warns of.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")
@pytest.mark.parametrize(("padding", "kernel"), [("valid", 3), ("same", 3), ("same", (2, 5)), ([1], 3)])
@pytest.mark.parametrize("kind", ["static", "cast"])
def test_a_border_that_has_a_name_is_one_in_numbers(kind: Any, padding: Any, kernel: Any):
    layer = nn.Conv2d(8, 6, kernel, padding=padding, dilation=(1, 2))
    images = torch.randn(8, 8, 9, 9, generator=torch.Generator().manual_seed(1))
    recommended = asked("all", kind, SCHEMES[kind])

    ours = zoo.inside(quantize_model(OneLayer(layer), recommended, calibration=lambda: [images]).model).layer

    with torch.inference_mode():
        expected, found = layer(images), ours(images)
    assert ours.padding == layer.padding
    assert found.shape == expected.shape
    assert relative_distance(found, expected) < 0.02
    assert all(isinstance(side, int) for side in ours.border)


@pytest.mark.slow
def test_a_convolution_whose_border_has_a_name_is_compiled_in_int8(tmp_path: Path):
    """SigLIP's patches and EfficientNet's stem are such: the int8 kernel that torch.compile chooses takes no name."""
    model = FAMILIES["siglip"]()
    spec = spec_of(model)
    deployment = Deployment(runtime="inductor", scheme="static")
    model_check.lay_out(model, tmp_path, spec=spec, processor=processor_of(spec), name="siglip")

    told = model_check.make(tmp_path, "whole", deployment, num_threads=1)

    assert told.refused == ""
    assert 0 < told.distance < 0.25


def test_what_takes_a_norms_place_answers_its_attributes_and_keeps_its_activation():
    norm, images = ActivatedNorm(8).eval(), torch.randn(2, 8, 4, 4)

    found: Any = Folded(norm)

    assert {"num_features", "eps", "momentum"} <= set(plain(norm))
    assert {name: getattr(found, name) for name in plain(norm)} == {name: getattr(norm, name) for name in plain(norm)}
    assert torch.equal(found(images.clone()), images.relu())
    # It is what a norm does whose statistics are those of white noise.
    for name, value in (("weight", 1), ("bias", 0), ("running_mean", 0), ("running_var", 1)):
        assert torch.equal(getattr(found, name), torch.full((8,), float(value)))
    assert list(found.children()) == [norm.act]
