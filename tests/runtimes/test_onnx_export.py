"""ONNX export: one file that computes what torch does; attention and patches as runtimes know them."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import deployments
import numpy as np
import onnx
import onnxruntime
import openvino
import pytest
import torch
import zoo
from torch.nn.functional import fold, scaled_dot_product_attention, unfold
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersForImageClassification

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.modules import logits_of, random_batch, relative_distance
from profiling_agent.runtimes.artifact import ONNX, load_recipe
from profiling_agent.runtimes.onnx_export import PlainOperators, _attend, export_onnx
from profiling_agent.runtimes.onnx_runtime import DOMAIN, fuse_attention
from profiling_agent.runtimes.registry import noise_batch
from profiling_agent.runtimes.torch_artifact import save_deployed
from profiling_agent.schemas import QuantizationRecommendation


def dims(value):
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


# torch.export takes ten times as long on Swin's windows as on the others.
@pytest.mark.parametrize(
    "family", [name if name == "vit" else pytest.param(name, marks=pytest.mark.slow) for name in zoo.FAMILIES]
)
def test_a_pruned_model_of_each_family_says_the_same_in_onnx_runtime_in_silence_and_stays_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture, family: str
):
    model, path = deployments.pruned(zoo.FAMILIES[family]())[0].train(), tmp_path / "model.onnx"

    with zoo.left_alone(model):
        distance = export_onnx(model, path, spec=zoo.SPEC)

    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    # Float32 added in another order: exactly equal logits would mean that something was compared with itself.
    assert 0 < distance < 1e-5
    assert [*tmp_path.iterdir()] == [path]
    saved = onnx.load(path)
    onnx.checker.check_model(saved)
    assert [(each.name, dims(each)) for each in saved.graph.input] == [("pixel_values", ["batch", 3, 32, 32])]
    assert [(each.name, dims(each)) for each in saved.graph.output] == [("logits", ["batch", 5])]
    # Images have no padding to mask; Swin's shifted windows have a mask of their own.
    assert family == "swin" or not {"IsNaN", "Where"} & set(operators(saved))


@pytest.mark.slow
def test_positions_that_are_resized_to_the_images_are_openvinos_too(tmp_path: Path):
    settings: dict[str, Any] = zoo.PLAIN | {"image_size": 96, "num_hidden_layers": 1}
    model = zoo.randomised(Dinov2WithRegistersForImageClassification(Dinov2WithRegistersConfig(**settings)))
    export_onnx(model, tmp_path / "model.onnx", spec=zoo.SPEC)
    saved, images = onnx.load(tmp_path / "model.onnx"), random_batch(zoo.SPEC, 3, seed=3)

    compiled = openvino.compile_model(tmp_path / "model.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    onnx.checker.check_model(saved)
    assert "Resize" not in operators(saved)
    found = torch.from_numpy(np.asarray(compiled(images.numpy())[0]))
    assert relative_distance(found, logits_of(model, images)) < 1e-5


class Answers(torch.nn.Module):
    """A head whose answer depends on a number that it reads out of the tensor, which no graph can hold."""

    def forward(self, features):
        return features[:, :5] if features.sum().item() > 0 else features[:, 5:10]


class Sensitive(torch.nn.Module):
    """A head that has a trace say something else than the module does outside of one."""

    def forward(self, features):
        return features[:, :5] * (1.01 if torch.compiler.is_exporting() else 1.0)


@pytest.mark.slow
@pytest.mark.parametrize(("head", "message"), [(Answers(), "can't export"), (Sensitive(), r"0\.01.* from torch's")])
def test_what_torch_can_not_export_as_it_is_is_one_line(tmp_path: Path, head: torch.nn.Module, message: str):
    model: Any = zoo.vit(num_hidden_layers=1)
    model.classifier = head
    with pytest.raises(ArtifactError, match=message) as raised:
        export_onnx(model, tmp_path / "model.onnx", spec=zoo.SPEC)

    assert "\n" not in str(raised.value)


IMAGES = noise_batch(zoo.SPEC, 3, seed=4)


def logits(model: onnx.ModelProto) -> Any:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    return session.run(None, {"pixel_values": IMAGES})[0]


@pytest.mark.slow
@pytest.mark.parametrize("family", ["vit", "swin"])
def test_each_block_becomes_one_node_that_computes_the_same(sources: deployments.Sources, family: str):
    source = sources(family)
    model = onnx.load(str(source.onnx))

    found, taken = fuse_attention(model, ())

    blocks = operators(model).count("Softmax")
    assert len(taken) == operators(found).count("Attention") == blocks > 0
    assert "Softmax" not in operators(found)
    assert all([name.rsplit(".", 1)[1] for name in names] == ["q_proj", "k_proj", "v_proj"] for names in taken.values())
    assert deployments.distance(logits(found), logits(model)) < 1e-6
    if family == "swin":
        # Int8 with a position bias isn't fused.
        unfused, taken = fuse_attention(model, [name for name, _ in source.module.named_modules()])
        assert unfused is model
        assert not taken
        assert not any(node.domain == DOMAIN for node in model.graph.node)


def test_dynamic_int8_has_attention_in_int8_and_says_so(saved: Callable[..., Path]):
    folder = saved("onnxruntime dynamic")

    found, recipe = operators(onnx.load(folder / ONNX)), load_recipe(folder)
    projections = [row.name for row in recipe.quantized if row.name.endswith(("q_proj", "k_proj", "v_proj"))]
    assert found.count("QAttention") == len(projections) / 3 > 0
    assert "Attention" not in found


def test_with_keys_left_in_float_nothing_is_fused(sources: deployments.Sources, tmp_path: Path):
    recommendation = QuantizationRecommendation(layer=r"q_proj|v_proj|fc1", quantization_type="dynamic", dtype="qint8")
    deployment = deployments.deployment("onnxruntime dynamic").model_copy(update={"recommendations": (recommendation,)})

    recipe = save_deployed(sources("vit"), deployment, tmp_path / "model", num_threads=1)

    assert not {"Attention", "QAttention"} & set(operators(onnx.load(tmp_path / "model" / ONNX)))
    assert recipe.quantized
    assert not any("k_proj" in row.name for row in recipe.quantized)


def test_a_mask_of_either_kind_does_what_torchs_attention_does_with_it():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 4) for _ in range(3))
    hidden = torch.rand(2, 1, 5, 5) < 0.7
    hidden[..., 0] = True
    for mask in (None, hidden, torch.randn(2, 3, 5, 5)):
        found, _ = _attend(torch.nn.Identity(), query, key, value, mask)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        assert torch.allclose(found, expected.transpose(1, 2), atol=1e-6)


@pytest.mark.parametrize("options", [{}, {"scale": 0.3}, {"is_causal": True}, {"enable_gqa": True}], ids=str)
def test_plain_attention_is_torchs_in_any_number_of_dimensions(options: dict[str, Any]):
    torch.manual_seed(0)
    query, value = torch.randn(2, 3, 4, 6, 8), torch.randn(2, 3, 2 if "enable_gqa" in options else 4, 5, 8)
    expected = scaled_dot_product_attention(query, value + 1, value, **options)

    with torch.profiler.profile() as seen, PlainOperators():
        found = scaled_dot_product_attention(query, value + 1, value, **options)

    assert "aten::scaled_dot_product_attention" not in {event.name for event in seen.events() or ()}
    assert torch.allclose(found, expected, atol=1e-6)


class Windows(torch.nn.Module):
    """A head that attends within windows: torch's fused attention in five dimensions, as Hiera's of timm."""

    def forward(self, features):
        windows = features.reshape(len(features), 2, 2, 4, -1)
        return scaled_dot_product_attention(windows, windows, windows).reshape(len(features), -1)[:, :5]


def test_attention_within_windows_is_exported(tmp_path: Path):
    model: Any = zoo.vit(num_hidden_layers=1)
    model.classifier = Windows()

    assert export_onnx(model, tmp_path / "model.onnx", spec=zoo.SPEC) < 1e-5


@pytest.mark.parametrize(
    ("window", "has_gather"),
    [
        *(({"kernel_size": sides, "stride": sides}, sides == 3) for sides in ((2, 2), (2, 3), 2, 3)),
        ({"kernel_size": (2, 2), "stride": 1}, True),
        ({"kernel_size": 2, "stride": 2, "padding": 1, "dilation": 2}, True),
    ],
)
def test_patches_are_cut_and_joined_as_torch_does_those_that_fill_the_image_without_a_gather(window, has_gather: bool):
    images = torch.arange(2 * 3 * 4 * 6, dtype=torch.float32).reshape(2, 3, 4, 6)
    expected = unfold(images, **window)
    with torch.profiler.profile() as seen, PlainOperators():
        found = unfold(images, **window)
        joined = fold(found, (4, 6), **window)
    names = {event.name for event in seen.events() or ()}

    assert torch.equal(found, expected)
    assert torch.equal(joined, fold(expected, (4, 6), **window))
    assert bool(names & {"aten::im2col", "aten::col2im"}) == has_gather
