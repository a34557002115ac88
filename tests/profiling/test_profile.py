import copy
import warnings
from typing import Any

import pytest
import torch
import zoo
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from profiling_agent.measure.throughput import measure_headline
from profiling_agent.profiling.profile import profile_model
from profiling_agent.quantization.kinds import parameter_bytes
from profiling_agent.runtimes.torch_session import TorchSession
from profiling_agent.schemas import ModelProfile

MAX_FORWARD_PASSES = 60


def profile(model, **changes):
    headline = measure_headline(TorchSession(copy.deepcopy(model).eval(), device="cpu"), zoo.SPEC, batch_size=2)
    given: dict[str, Any] = {
        "batch_size": 2,
        "headline": headline,
        "size_bytes": 1000,
        "architecture": "tiny",
        **changes,
    }
    return profile_model(model, zoo.SPEC, **given)


def quantized(model):
    with warnings.catch_warnings():
        # torch means to move its quantizer elsewhere; here it stands for any module that hides its weights.
        warnings.simplefilter("ignore")
        return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=torch.qint8)


def without_times(profile):
    return {
        **profile.model_dump(exclude={"headline", "layers", "operators"}),
        "layers": [row.model_dump(exclude={"latency_ms"}) for row in profile.layers],
        "operators": {(row.name, row.input_shapes, row.calls, row.memory_bytes) for row in profile.operators},
    }


@pytest.fixture(scope="module")
def vit_profile():
    return profile(zoo.vit())


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


def test_a_profile_survives_the_disk(vit_profile):
    assert ModelProfile.model_validate_json(vit_profile.model_dump_json()) == vit_profile


def test_the_same_model_twice_differs_in_times_alone(vit_profile):
    assert without_times(profile(zoo.vit())) == without_times(vit_profile)


def test_a_narrower_model_is_comparable_row_by_row(vit_profile):
    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=128,
        image_size=32,
        patch_size=8,
        id2label=zoo.LABELS,
    )
    narrow = profile(zoo.randomised(ViTForImageClassification(config)))

    assert [row.name for row in narrow.layers] == [row.name for row in vit_profile.layers]
    # Half of fc1's outputs with their biases, and half of fc2's inputs.
    assert vit_profile.macs - narrow.macs == 2 * 17 * 128 * (64 + 1 + 64)
    assert vit_profile.params - narrow.params == 2 * 128 * (64 + 1 + 64)


def test_a_quantized_model_is_counted_on_its_skeleton_and_timed_itself(vit_profile):
    result = profile(quantized(zoo.vit()), skeleton=zoo.vit())

    assert [row.name for row in result.layers] == [row.name for row in vit_profile.layers]
    assert (result.params, result.macs, result.units) == (vit_profile.params, vit_profile.macs, vit_profile.units)
    assert [row.macs for row in result.layers] == [row.macs for row in vit_profile.layers]
    assert [row.activation_bytes for row in result.layers] == [row.activation_bytes for row in vit_profile.layers]
    assert any(row.name.startswith("quantized::linear_dynamic") for row in result.operators)
    assert result.forward_passes <= MAX_FORWARD_PASSES


def test_the_model_is_left_as_it_was_found():
    model = zoo.resnet().train()
    model.resnet.embedder.eval()
    weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def state():
        return [
            (module.training, sorted(vars(module)), len(module._forward_hooks) + len(module._forward_pre_hooks))
            for module in model.modules()
        ]

    before = state()
    profile(model)

    assert state() == before
    assert all(torch.equal(tensor, weights[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None and parameter.requires_grad for parameter in model.parameters())


def test_the_trace_is_written_and_progress_reaches_its_end(tmp_path):
    steps = []
    profile(zoo.vit(), trace_path=tmp_path / "trace.json", progress=lambda *step: steps.append(step))

    assert (tmp_path / "trace.json").stat().st_size > 0
    assert [done for _, done, _ in steps] == [0, 1, 2, 3, 4]
    assert {total for _, _, total in steps} == {4}
