"""Profile: layers timed one by one, operators, and the sums of both."""

import copy
import gzip
import json
from typing import Any

import pytest
import zoo
from quantization.asked import asked
from zoo import left_alone

from profiling_agent.lib.modules import random_batch
from profiling_agent.measure.worker import measure_headline
from profiling_agent.profiling.profile import profile_model, profile_operators
from profiling_agent.quantization.layers import parameter_bytes
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.runtimes.torch_session import TorchSession
from profiling_agent.schemas import ModelProfile


def profile(model, **changes):
    headline = measure_headline(TorchSession(copy.deepcopy(model).eval(), device="cpu"), zoo.SPEC, batch_size=2)
    given: dict[str, Any] = {"batch_size": 2, "headline": headline, "size_bytes": 1000, "architecture": "tiny"}
    return profile_model(model, zoo.SPEC, **(given | changes))


@pytest.fixture(scope="module")
def vit_profile():
    return profile(zoo.vit())


def test_a_profile_is_whole(vit_profile):
    model = zoo.vit()

    assert (vit_profile.params, vit_profile.macs) == (113_925, 1_962_693)
    assert vit_profile.parameter_bytes == parameter_bytes(model)
    assert {unit.consumer for unit in vit_profile.units} >= {f"vit.layers.{layer}.mlp.fc2" for layer in (0, 1)}
    assert vit_profile.operators
    assert vit_profile.trace is None
    rows = {row.name: row for row in vit_profile.layers}
    assert rows["vit.layers.0.mlp.activation_fn"].activation_bytes == 2 * 17 * 256 * 4
    assert rows["vit.embeddings"].params == 64 + 17 * 64
    assert rows.keys() <= {name for name, _ in model.named_modules()}
    assert ModelProfile.model_validate_json(vit_profile.model_dump_json()) == vit_profile


def test_a_quantized_model_is_counted_on_its_skeleton_and_timed_itself(vit_profile):
    result = profile(quantize_model(zoo.vit(), asked("all", "dynamic")).model, skeleton=zoo.vit())

    assert [row.name for row in result.layers] == [row.name for row in vit_profile.layers]
    assert (result.params, result.macs, result.units) == (vit_profile.params, vit_profile.macs, vit_profile.units)
    for name in ("macs", "activation_bytes"):
        assert [getattr(row, name) for row in result.layers] == [getattr(row, name) for row in vit_profile.layers]
    assert any(row.name.startswith("quantized::linear_dynamic") for row in result.operators)


def test_the_model_is_left_as_it_was_found_and_the_trace_is_written(tmp_path):
    model, steps = zoo.resnet().train(), []
    model.resnet.embedder.eval()
    with left_alone(model):
        profile(model, trace_path=tmp_path / "trace.json", progress=lambda *step: steps.append(step))

    assert (tmp_path / "trace.json").stat().st_size > 0
    assert [done for _, done, _ in steps] == [0, 1, 2, 3, 4]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory):
    trace = tmp_path_factory.mktemp("trace") / "trace.json.gz"
    rows, kernel_ms = profile_operators(zoo.vit(), random_batch(zoo.SPEC, 2), passes=3, trace_path=trace)
    assert kernel_ms is None
    return rows, trace


def test_calls_and_memory_are_those_of_one_pass(profiled):
    rows, _ = profiled
    times_ms = [row.cpu_time_ms for row in rows]
    assert times_ms == sorted(times_ms, reverse=True)
    assert all(row.cuda_time_ms is None for row in rows)
    calls = {(row.name, row.input_shapes): row.calls for row in rows}

    assert calls["aten::linear", "[[2, 17, 64], [64, 64], [64]]"] == 2 * 4
    assert calls["aten::linear", "[[2, 17, 64], [256, 64], [256]]"] == 2
    assert sum(row.calls for row in rows if row.name == "aten::scaled_dot_product_attention") == 2
    (gelu,) = [row for row in rows if row.name == "aten::gelu"]
    assert gelu.memory_bytes == 2 * (2 * 17 * 256 * 4)


def test_the_trace_has_the_passes_and_a_browser_can_open_it(profiled):
    events = json.loads(gzip.decompress(profiled[1].read_bytes()))["traceEvents"]

    assert sum(event["name"] == "aten::gelu" for event in events) == 3 * 2
    assert profiled[1].stat().st_size < 200_000
