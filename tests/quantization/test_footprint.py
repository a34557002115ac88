from pathlib import Path

import pytest
import torch
import zoo
from torch import nn

from profiling_agent.errors import ArtifactError
from profiling_agent.quantization.kinds import parameter_bytes
from profiling_agent.quantization.layers import DynamicLinear
from profiling_agent.runtimes.artifact import model_bytes
from profiling_agent.runtimes.torch_artifact import save_model


def test_parameters_and_buffers_are_counted():
    # Weight and bias of 3 channels, running mean and variance, and an int64 counter.
    assert parameter_bytes(nn.BatchNorm2d(3)) == 4 * 3 * 4 + 8


def test_tied_parameters_are_counted_once():
    first, second = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
    second.weight = first.weight

    assert parameter_bytes(nn.Sequential(first, second)) == 4 * 4 * 4


def test_packed_weights_are_counted_as_what_they_are():
    model = nn.Sequential(nn.Linear(8, 4), DynamicLinear.from_linear(nn.Linear(8, 4), "qint8"))

    assert parameter_bytes(model) == 4 * (8 * 4 + 4) + (8 * 4 + 4 * 4 + 4 * 4)


def test_half_precision_parameters_take_two_bytes():
    assert parameter_bytes(nn.Linear(8, 4, bias=False, dtype=torch.float16)) == 2 * 8 * 4


def test_a_saved_model_weighs_what_its_weights_do(tmp_path: Path):
    model = zoo.vit(num_hidden_layers=1)
    save_model(model, tmp_path / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    weights = 4 * sum(parameter.numel() for parameter in model.parameters())

    # And the names of the tensors; labels, settings and what it said of two images are no part of it.
    assert weights < model_bytes(tmp_path / "model") < weights + 5_000
    assert model_bytes(tmp_path / "model") == (tmp_path / "model" / "weights.safetensors").stat().st_size


def test_a_folder_without_its_weights_can_not_be_weighed(tmp_path: Path):
    save_model(zoo.resnet(), tmp_path / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    (tmp_path / "model" / "weights.safetensors").unlink()

    with pytest.raises(ArtifactError, match="can't be weighed"):
        model_bytes(tmp_path / "model")
