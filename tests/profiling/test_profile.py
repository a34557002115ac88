"""Profile: layers timed one by one, operators, and the sums of both."""

import copy
import gzip
import json
import warnings
from functools import partial
from typing import Any

import pytest
import torch
import zoo
from sample_records import unchanged
from torch import nn

from profiling_agent.lib.costs import Stopwatch, activation_bytes, layer_latency
from profiling_agent.lib.modules import random_batch
from profiling_agent.measure.throughput import measure_headline
from profiling_agent.profiling.profile import profile_model, profile_operators
from profiling_agent.quantization.kinds import parameter_bytes
from profiling_agent.runtimes.torch_session import TorchSession
from profiling_agent.schemas import ModelProfile

MAX_FORWARD_PASSES = 60


def profile(model, **changes):
    headline = measure_headline(TorchSession(copy.deepcopy(model).eval(), device="cpu"), zoo.SPEC, batch_size=2)
    given: dict[str, Any] = {"batch_size": 2, "headline": headline, "size_bytes": 1000, "architecture": "tiny"}
    return profile_model(model, zoo.SPEC, **(given | changes))


def without_times(profile):
    return {
        **profile.model_dump(exclude={"headline", "layers", "operators"}),
        "layers": [row.model_dump(exclude={"latency_ms"}) for row in profile.layers],
        "operators": {(row.name, row.input_shapes, row.calls, row.memory_bytes) for row in profile.operators},
    }


@pytest.fixture(scope="module")
def vit_profile():
    return profile(zoo.vit())


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_a_profile_takes_at_most_60_passes_and_says_how_many(family):
    model, passes = zoo.FAMILIES[family](), []
    model.register_forward_hook(lambda *_: passes.append(1))

    result = profile(model)

    assert result.forward_passes == len(passes) <= MAX_FORWARD_PASSES


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


def test_the_same_model_twice_differs_in_times_alone(vit_profile):
    assert without_times(profile(zoo.vit())) == without_times(vit_profile)


def test_a_narrower_model_is_comparable_row_by_row(vit_profile):
    narrow = profile(zoo.vit(intermediate_size=128))

    assert [row.name for row in narrow.layers] == [row.name for row in vit_profile.layers]
    # Half of fc1's outputs with their biases, and half of fc2's inputs.
    assert vit_profile.macs - narrow.macs == 2 * 17 * 128 * (64 + 1 + 64)
    assert vit_profile.params - narrow.params == 2 * 128 * (64 + 1 + 64)


def test_a_quantized_model_is_counted_on_its_skeleton_and_timed_itself(vit_profile):
    with warnings.catch_warnings():
        # torch means to move its quantizer elsewhere; here it stands for any module that hides its weights.
        warnings.simplefilter("ignore")
        quantized = torch.ao.quantization.quantize_dynamic(zoo.vit(), {nn.Linear}, dtype=torch.qint8)
    result = profile(quantized, skeleton=zoo.vit())

    assert [row.name for row in result.layers] == [row.name for row in vit_profile.layers]
    assert (result.params, result.macs, result.units) == (vit_profile.params, vit_profile.macs, vit_profile.units)
    for name in ("macs", "activation_bytes"):
        assert [getattr(row, name) for row in result.layers] == [getattr(row, name) for row in vit_profile.layers]
    assert any(row.name.startswith("quantized::linear_dynamic") for row in result.operators)
    assert result.forward_passes <= MAX_FORWARD_PASSES


def test_the_model_is_left_as_it_was_found():
    model = zoo.resnet().train()
    model.resnet.embedder.eval()
    with unchanged(model):
        profile(model)


def test_the_trace_is_written_and_progress_reaches_its_end(tmp_path):
    steps = []
    profile(zoo.vit(), trace_path=tmp_path / "trace.json", progress=lambda *step: steps.append(step))

    assert (tmp_path / "trace.json").stat().st_size > 0
    assert [done for _, done, _ in steps] == [0, 1, 2, 3, 4]
    assert {total for _, _, total in steps} == {4}


FLOAT = 4


def test_a_vits_activations_are_those_worked_out_by_hand():
    made = activation_bytes(zoo.vit(), random_batch(zoo.SPEC, 2))

    assert made["vit.embeddings.patch_embeddings.projection"] == 2 * 64 * 16 * FLOAT
    assert made["vit.layers.0.attention.q_proj"] == 2 * 17 * 64 * FLOAT
    assert made["vit.layers.0.mlp.fc1"] == made["vit.layers.0.mlp.activation_fn"] == 2 * 17 * 256 * FLOAT
    assert made["vit.layers.1"] == 2 * 17 * 64 * FLOAT
    assert made["classifier"] == 2 * 5 * FLOAT
    # What a child made isn't counted again.
    for passes_on in ("", "vit", "vit.layers.0.mlp", "vit.layers.0.attention", "vit.layers.0.dropout"):
        assert made[passes_on] == 0


class Splits(nn.Module):
    def forward(self, pixel_values):
        return {"halves": [pixel_values[:1] * 2, (pixel_values[1:] * 2,)], "same": pixel_values.double(), "count": 3}


class Repeats(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, pixel_values):
        return self.inner(self.inner(pixel_values))


def test_a_module_that_runs_twice_makes_twice_as_much():
    assert activation_bytes(Repeats(), torch.ones(1, 4)) == {"inner": 2 * 4 * FLOAT, "": 0}
    assert layer_latency(Repeats(), torch.ones(1, 4), passes=2).keys() == {"inner", ""}
    # Tensors are found in nested outputs.
    assert activation_bytes(Splits(), torch.ones(2, 3)) == {"": 2 * 3 * 4 + 2 * 3 * 8}


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_module_that_runs_has_a_time(family):
    model = zoo.FAMILIES[family]()
    ran = set()
    for name, module in model.named_modules():
        module.register_forward_hook(lambda *_, name=name: ran.add(name))
    times_ms = layer_latency(model, random_batch(zoo.SPEC, 2), passes=3)

    assert times_ms.keys() == ran
    assert all(time_ms >= 0 for time_ms in times_ms.values())


def test_hooks_are_gone_afterwards_even_if_the_model_fails():
    model = zoo.vit()
    with unchanged(model):
        layer_latency(model, random_batch(zoo.SPEC, 1), passes=1)
        activation_bytes(model, random_batch(zoo.SPEC, 1))
        for measure in (activation_bytes, partial(layer_latency, passes=1)):
            with pytest.raises(ValueError, match="doesn't match model"):
                measure(model, torch.ones(1, 3, 48, 48))


def test_own_times_are_those_between_marks_without_the_children():
    clock = iter([0, 1, 4, 6, 7, 10, 20, 30])
    watch = Stopwatch(lambda: next(clock))
    watch.enter("", None)
    watch.enter("block", None)
    for _ in range(2):
        watch.enter("block.fc", None)
        watch.leave("block.fc", None, None)
    watch.leave("block", None, None)
    watch.leave("", None, None)

    # The layer runs from 4 to 6 and 7 to 10, its block from 1 to 20, the model from 0 to 30.
    assert watch.own_ms(lambda begin, end: end - begin) == {"block.fc": 5, "block": 14, "": 11}


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


def test_the_trace_is_one_pass_that_a_browser_can_open(profiled):
    events = json.loads(gzip.decompress(profiled[1].read_bytes()))["traceEvents"]

    assert sum(event["name"] == "aten::gelu" for event in events) == 2
    assert profiled[1].stat().st_size < 200_000
