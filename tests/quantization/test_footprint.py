from pathlib import Path

import torch
from torch import nn

from profiling_agent.artifacts.folder import folder_bytes
from profiling_agent.quantization.footprint import parameter_bytes
from profiling_agent.quantization.linear import DynamicLinear


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


def test_a_folder_weighs_what_its_files_do(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"12345")
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "b").write_bytes(b"123")
    (tmp_path / "link").symlink_to(tmp_path / "a")

    assert folder_bytes(tmp_path) == 8
