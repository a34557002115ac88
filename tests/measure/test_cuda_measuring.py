"""Measuring on an NVIDIA GPU: layers, operators, widths, races, clocks and energy."""

import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from profiling_agent.lib.costs import layer_latency
from profiling_agent.lib.io import file_sha256
from profiling_agent.lib.machine import find_gpu, nvml
from profiling_agent.lib.modules import on_device, random_batch
from profiling_agent.measure.race import Conditions, measure_saved, pool, run_one_session
from profiling_agent.measure.worker import energy_per_image, measure_headline, read_gpu_state
from profiling_agent.profiling.profile import profile_operators, time_units
from profiling_agent.pruning.units import find_units
from profiling_agent.runtimes.registry import noise_batch
from profiling_agent.runtimes.torch_artifact import save_model
from profiling_agent.runtimes.torch_session import TorchSession
from profiling_agent.schemas import ArtifactRef, InputSpec, UnitKind

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
SPEC = zoo.SPEC.model_copy(update={"height": 224, "width": 224})


def vit(hidden: int, heads: int, depth: int = 12) -> nn.Module:
    """Return a ViT/16 for images of 224 pixels, with random weights, on the GPU."""
    widths: dict[str, Any] = {"hidden_size": hidden, "num_attention_heads": heads, "intermediate_size": 4 * hidden}
    config = ViTConfig(**widths, num_hidden_layers=depth)
    torch.manual_seed(0)
    return on_device(ViTForImageClassification(config).eval(), "cuda")


def measured(model: nn.Module, batch_size: int, spec: InputSpec = SPEC) -> tuple[float, float, float]:
    """Return the milliseconds of a pass by the wall's clock, of its layers, and of its kernels."""
    headline = measure_headline(TorchSession(model, device="cuda"), spec, batch_size=batch_size)
    pass_ms = headline.latency.median_ms
    batch = random_batch(spec, batch_size).cuda()
    layers_ms = sum(layer_latency(model, batch, passes=5).values())
    rows, kernel_ms = profile_operators(model, batch, passes=3)
    assert kernel_ms is not None, "the profiler saw no kernel"
    assert [row.time_ms for row in rows] == sorted((row.time_ms for row in rows), reverse=True)
    assert all("::" in row.name for row in rows)
    assert sum(row.time_ms for row in rows) > 0
    return pass_ms, layers_ms, kernel_ms


def test_layers_and_kernels_of_a_large_batch_add_up_to_the_pass_and_a_small_one_is_launch_bound():
    pass_ms, layers_ms, kernel_ms = measured(vit(768, 12), 64)
    assert 0.9 < layers_ms / pass_ms < 1.1
    assert 0.85 < kernel_ms / pass_ms < 1.1

    pass_ms, _, kernel_ms = measured(vit(192, 3), 1)
    assert kernel_ms / pass_ms < 0.5


@pytest.mark.parametrize("batch_size", [1, 32])
def test_widths_are_told_apart_under_a_graph(recwarn: pytest.WarningsRecorder, batch_size: int):
    model = vit(768, 12, depth=1)
    units = [unit for unit in find_units(model, SPEC, {}).units if unit.kind is UnitKind.MLP]
    table = time_units(model, units, random_batch(SPEC, batch_size).cuda())
    (unit,) = units
    times, ruled_out = table.times[unit.name], table.ruled_out[unit.name]

    assert unit.width == 3072
    assert not [warning for warning in recwarn if "CUDA graph" in str(warning.message)]
    widths = sorted(times)
    assert all(times[narrow] <= times[wide] for narrow, wide in itertools.pairwise(widths))
    if batch_size == 32:
        assert times[unit.width // 2] < 0.75 * times[unit.width]
        assert len(ruled_out) < len(times) / 3


def saved(folder: Path, model: nn.Module, name: str) -> ArtifactRef:
    save_model(model.cpu(), folder / name, spec=SPEC, processor=zoo.processor(), base_model="zoo")
    return ArtifactRef(path=name, sha256=file_sha256(folder / name / "recipe.json"), size_bytes=1)


def test_equal_models_race_equal_and_a_slower_one_is_shown(tmp_path: Path):
    depths = {"one": 6, "same": 6, "longer": 7}
    models = [saved(tmp_path, vit(384, 6, depth=depth), name) for name, depth in depths.items()]
    track = Conditions(root=tmp_path, batch_size=32, device="cuda")
    race = pool([run_one_session(models, track, number) for number in range(2)])

    same, longer = race.results[1:]
    assert math.isclose(same.speedup, 1, abs_tol=0.04)
    # A seventh block more.
    assert 0.78 < longer.speedup < 0.94
    assert longer.speedup_high < 1


def test_throughput_leaves_out_the_launches(tmp_path: Path):
    saved(tmp_path, vit(192, 3), "tiny")
    (measured,) = measure_saved({"tiny": tmp_path / "tiny"}, batch_sizes=(1, 32), device="cuda")

    one, many = measured.throughput
    assert many.images_per_s > 3 * one.images_per_s


def test_the_gpu_is_named_as_torch_names_it():
    gpu = find_gpu()
    assert gpu is not None
    there = torch.cuda.get_device_properties(0)
    assert gpu.name == there.name
    assert gpu.compute_capability == f"{there.major}.{there.minor}"
    assert abs(gpu.memory_bytes - there.total_memory) < 3 * 2**30
    assert gpu.cuda == torch.version.cuda


@pytest.mark.skipif(nvml() is None, reason="there is no NVML")
def test_the_state_and_the_energy_of_the_gpu_are_read():
    session = TorchSession(vit(768, 12), device="cuda")
    images = noise_batch(SPEC, 32)
    session.run(images)
    energy = energy_per_image(session, images)

    assert read_gpu_state() is not None
    assert energy is not None
    assert 0 < energy.joules_per_image < math.inf
    assert energy.idle_watts is None or energy.watts > energy.idle_watts
