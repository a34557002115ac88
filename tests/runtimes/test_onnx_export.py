"""What ONNX Runtime computes from an export is what torch computes."""

import logging
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import openvino
import pytest
import torch
import zoo
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersForImageClassification

from profiling_agent.errors import ArtifactError
from profiling_agent.modules.inference import logits_of, random_batch, relative_distance
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.schemas import Cut, QuantizationRecommendation


def pruned(model, ratio=0.25):
    units = find_units(model, zoo.SPEC, {}).units
    cuts = [Cut(unit=unit, keep=snap(unit, ratio), requested_ratio=ratio) for unit in units]
    return prune_model(model, cuts, spec=zoo.SPEC).model


def dims(value):
    return [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]


# torch.export takes ten times as long on Swin's windows as on the others.
@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=pytest.mark.slow) if name == "swin" else name for name in zoo.FAMILIES]
)
def test_a_pruned_model_of_each_family_says_the_same_in_onnx_runtime(tmp_path: Path, family: str):
    distance = export_onnx(pruned(zoo.FAMILIES[family]()), tmp_path / "model.onnx", spec=zoo.SPEC)

    # Float32 added in another order: exactly equal logits would mean that something was compared with itself.
    assert 0 < distance < 1e-5
    assert [path.name for path in tmp_path.iterdir()] == ["model.onnx"]


def test_layers_of_different_widths_and_a_fixed_batch(tmp_path: Path):
    model = zoo.vit()
    units = find_units(model, zoo.SPEC, {}).units
    keeps = iter(range(1, len(units) + 1))
    cuts = [Cut(unit=unit, keep=next(keeps) * unit.width // 8, requested_ratio=0.5) for unit in units]
    assert len({(cut.unit.kind, cut.keep) for cut in cuts}) == 4

    small = prune_model(model, [cut for cut in cuts if cut.keep], spec=zoo.SPEC).model
    export_onnx(small, tmp_path / "model.onnx", spec=zoo.SPEC, batch_size=4)

    assert dims(onnx.load(tmp_path / "model.onnx").graph.input[0]) == [4, 3, 32, 32]


def test_the_file_is_one_graph_from_pixel_values_to_logits_with_a_free_batch(tmp_path: Path):
    export_onnx(zoo.resnet(), tmp_path / "model.onnx", spec=zoo.SPEC)

    saved = onnx.load(tmp_path / "model.onnx")
    onnx.checker.check_model(saved)
    assert [(each.name, dims(each)) for each in saved.graph.input] == [("pixel_values", ["batch", 3, 32, 32])]
    assert [(each.name, dims(each)) for each in saved.graph.output] == [("logits", ["batch", 5])]


def test_positions_that_are_resized_to_the_images_are_openvinos_too(tmp_path: Path):
    settings: dict[str, Any] = zoo.PLAIN | {"image_size": 96, "num_hidden_layers": 1}
    model = zoo.randomised(Dinov2WithRegistersForImageClassification(Dinov2WithRegistersConfig(**settings)))
    export_onnx(model, tmp_path / "model.onnx", spec=zoo.SPEC)
    saved, images = onnx.load(tmp_path / "model.onnx"), random_batch(zoo.SPEC, 3, seed=3)

    compiled = openvino.compile_model(tmp_path / "model.onnx", "CPU", {"INFERENCE_PRECISION_HINT": "f32"})

    onnx.checker.check_model(saved)
    assert "Resize" not in {node.op_type for node in saved.graph.node}
    found = torch.from_numpy(np.asarray(compiled(images.numpy())[0]))
    assert relative_distance(found, logits_of(model, images)) < 1e-5


def test_an_export_is_silent_and_leaves_the_model_as_it_was(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
):
    model = zoo.vit(num_hidden_layers=1).train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    export_onnx(model, tmp_path / "model.onnx", spec=zoo.SPEC)

    said = capfd.readouterr()
    assert (said.out, said.err) == ("", "")
    assert [record for record in caplog.records if record.levelno >= logging.WARNING] == []
    assert model.training
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_quantized_model_is_refused(tmp_path: Path):
    everything = QuantizationRecommendation(layer="all", dtype="qint8")

    with pytest.raises(ArtifactError, match="quantized"):
        export_onnx(
            quantize_model(zoo.vit(num_hidden_layers=1), [everything]).model, tmp_path / "model.onnx", spec=zoo.SPEC
        )

    assert list(tmp_path.iterdir()) == []


def test_a_file_that_exists_is_left_alone(tmp_path: Path):
    (tmp_path / "model.onnx").write_text("mine")

    with pytest.raises(ArtifactError, match="exists already"):
        export_onnx(zoo.vit(num_hidden_layers=1), tmp_path / "model.onnx", spec=zoo.SPEC)

    assert (tmp_path / "model.onnx").read_text() == "mine"


def test_a_missing_extra_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    with pytest.raises(ArtifactError, match=r"pip install profiling-agent\[onnx\]"):
        export_onnx(zoo.vit(num_hidden_layers=1), tmp_path / "model.onnx", spec=zoo.SPEC)


class Answers(torch.nn.Module):
    """A head whose answer depends on a number that it reads out of the tensor, which no graph can hold."""

    def forward(self, features):
        return features[:, :5] if features.sum().item() > 0 else features[:, 5:10]


def test_what_torch_can_not_export_is_one_line_and_leaves_nothing(tmp_path: Path):
    model = zoo.vit(num_hidden_layers=1)
    model.classifier = Answers()

    with pytest.raises(ArtifactError, match="can't export") as raised:
        export_onnx(model, tmp_path / "model.onnx", spec=zoo.SPEC)

    assert "\n" not in str(raised.value)
    assert list(tmp_path.iterdir()) == []


class Sensitive(torch.nn.Module):
    """A head that has a trace say something else than the module does outside of one."""

    def forward(self, features):
        return features[:, :5] * (1.01 if torch.compiler.is_exporting() else 1.0)


def test_logits_that_differ_are_refused_and_leave_nothing(tmp_path: Path):
    model = zoo.vit(num_hidden_layers=1)
    model.classifier = Sensitive()

    with pytest.raises(ArtifactError, match=r"0\.01.* from torch's"):
        export_onnx(model, tmp_path / "model.onnx", spec=zoo.SPEC)

    assert list(tmp_path.iterdir()) == []
