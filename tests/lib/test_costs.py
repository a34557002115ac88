"""Parameters and multiply-accumulates, those of attention included; time and activations of each module."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import zoo
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from profiling_agent.errors import RequestError
from profiling_agent.lib.costs import (
    Complexity,
    activation_bytes,
    count_complexity,
    counted_matmuls,
    layer_latency,
    matmul_macs,
    sdpa_macs,
)
from profiling_agent.lib.modules import random_batch
from profiling_agent.schemas import InputSpec

FLOAT = 4


def linear(tokens, inputs, outputs, *, bias=True):
    return tokens * (inputs * outputs + bias * outputs)


def total(rows, what):
    return sum(getattr(row, what) for row in rows.values())


def test_a_full_size_vit_has_86567656_params_and_17_58_gmacs():
    labels: dict[str, Any] = {"num_labels": 1000}
    with torch.device("meta"):
        model = ViTForImageClassification(ViTConfig(**labels))
    rows = count_complexity(model, InputSpec(channels=3, height=224, width=224, source="hand"))
    products = 2 * 12 * 197 * 197 * 64
    layer = 4 * linear(197, 768, 768) + products + linear(197, 768, 3072) + linear(197, 3072, 768)

    assert total(rows, "params") == 86_567_656
    assert total(rows, "macs") == linear(196, 3 * 16 * 16, 768) + 12 * layer + linear(1, 768, 1000) == 17_580_319_720
    assert rows["vit.layers.0.attention"].macs == products


def test_a_vits_rows_are_those_worked_out_by_hand():
    rows = count_complexity(zoo.vit(), zoo.SPEC)

    assert rows["vit.embeddings"] == Complexity(kind="ViTEmbeddings", params=64 + 17 * 64, macs=0)
    assert rows["vit.embeddings.patch_embeddings.projection"].macs == linear(16, 3 * 8 * 8, 64)
    assert rows["vit.layers.1.attention"] == Complexity(kind="ViTAttention", params=0, macs=2 * 4 * 17 * 17 * 16)
    assert rows["vit.layers.1.attention.q_proj"] == Complexity(kind="Linear", params=64 * 65, macs=linear(17, 64, 64))
    assert rows["vit.layers.1.mlp.fc2"].macs == linear(17, 256, 64)
    assert rows["vit.layernorm"] == Complexity(kind="LayerNorm", params=128, macs=0)
    assert rows["classifier"] == Complexity(kind="Linear", params=325, macs=325)
    assert "vit.layers.1.mlp" not in rows


def swin_block(tokens, dim):
    """Each token attends inside its window of 16."""
    mlp = linear(tokens, dim, 4 * dim) + linear(tokens, 4 * dim, dim)
    return 4 * linear(tokens, dim, dim) + 2 * tokens * 16 * dim + mlp


MACS = {
    "swin": (
        linear(256, 3 * 2 * 2, 32) + 2 * (swin_block(256, 32) + swin_block(64, 64)),
        linear(64, 4 * 32, 64, bias=False) + linear(1, 64, 5),
    ),
    "resnet": (
        16 * 16 * 7 * 7 * 3 * 32,
        64 * (32 * 128 + 32 * 32 + 9 * 32 * 32 + 32 * 128),
        64 * (128 * 32 + 9 * 32 * 32 + 32 * 128),
        16 * 128 * 256 + 64 * 128 * 64 + 16 * (9 * 64 * 64 + 64 * 256),
        16 * (256 * 64 + 9 * 64 * 64 + 64 * 256) + linear(1, 256, 5),
    ),
}


@pytest.mark.parametrize("family", MACS)
def test_macs_and_params_are_those_worked_out_by_hand(family):
    model = zoo.FAMILIES[family]()
    rows = count_complexity(model, zoo.SPEC)

    assert total(rows, "macs") == sum(MACS[family])
    assert total(rows, "params") == sum(parameter.numel() for parameter in model.parameters())
    tables = [row.params for name, row in rows.items() if name.endswith("relative_position_bias")]
    assert sum(tables) == (2 * 49 * (2 + 4) if family == "swin" else 0)


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_fused_attention_counts_what_the_eager_matmuls_count(family):
    fused, eager = zoo.FAMILIES[family](), zoo.FAMILIES[family]()
    eager.set_attn_implementation("eager")
    rows = count_complexity(fused, zoo.SPEC)

    assert rows == count_complexity(eager, zoo.SPEC)
    assert sum(row.macs > 0 for row in rows.values() if row.kind in ("ViTAttention", "SwinAttention")) >= 2


class Named(nn.Linear):
    pass


def test_tied_weights_are_counted_once_and_multiplied_twice_and_a_subclass_of_linear_is_one():
    model = zoo.vit()
    model.vit.layers[1].mlp.fc1.weight = model.vit.layers[0].mlp.fc1.weight
    model.classifier = Named(64, 5)
    rows = count_complexity(model, zoo.SPEC)

    assert rows["vit.layers.0.mlp.fc1"].params == 64 * 256 + 256
    assert rows["vit.layers.1.mlp.fc1"] == Complexity(kind="Linear", params=256, macs=linear(17, 64, 256))
    assert rows["classifier"] == Complexity(kind="Named", params=325, macs=325)
    assert total(rows, "params") == sum(p.numel() for p in model.parameters())


def test_counting_leaves_no_trace(capfd):
    with zoo.left_alone(model := zoo.swin().train()):
        count_complexity(model, zoo.SPEC)

    assert capfd.readouterr() == ("", "")


def test_a_model_that_can_not_run_is_named():
    with pytest.raises(RequestError, match="ptflops can't count 'ViTForImageClassification'"):
        count_complexity(zoo.vit(), InputSpec(channels=3, height=48, width=48, source="wrong"))


@pytest.mark.parametrize(
    ("first", "second", "macs"),
    [
        ((3, 4), (4, 5), 3 * 4 * 5),
        ((2, 3, 4), (4, 5), 2 * 3 * 4 * 5),
        ((2, 3, 4), (2, 4, 5), 2 * 3 * 4 * 5),
        ((6, 1, 3, 4), (2, 4, 5), 6 * 2 * 3 * 4 * 5),
        ((4,), (4, 5), 20),
        ((3, 4), (4,), 12),
        ((4,), (4,), 4),
    ],
)
def test_a_product_counts_every_multiplication(first, second, macs):
    left, right = torch.ones(first), torch.ones(second)
    assert matmul_macs(left @ right, left, right) == macs
    query, key, value = torch.ones(2, 3, 5, 8), torch.ones(2, 3, 7, 8), torch.ones(2, 3, 7, 4)
    assert sdpa_macs(None, query, key, value) == 2 * 3 * (5 * 7 * 8 + 5 * 7 * 4)


class Attends(nn.Module):
    def __init__(self, product):
        super().__init__()
        self.inner, self.product = nn.Identity(), product

    def forward(self, pixels):
        return self.product(self.inner(pixels), pixels.transpose(-2, -1))


@pytest.mark.parametrize(
    "product",
    [
        lambda first, second: first @ second,
        torch.matmul,
        lambda first, second: torch.bmm(input=first, mat2=second),
        lambda first, second: first.bmm(second),
        lambda first, second: F.scaled_dot_product_attention(first, first, first[..., :0]),
    ],
)
def test_a_product_belongs_to_the_module_that_calls_it(product):
    model = nn.Sequential(nn.Identity(), Attends(product))
    with counted_matmuls(model) as macs:
        model(torch.ones(2, 3, 4))
        # Products outside the model are not counted.
        _ = torch.ones(2, 2) @ torch.ones(2, 2)

    assert macs == {"1": 2 * 3 * 4 * 3}


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


class Block(nn.Module):
    """A layer that runs twice."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, pixel_values):
        return self.inner(self.inner(pixel_values))


class Splits(nn.Module):
    def forward(self, pixel_values):
        return {"halves": [pixel_values[:1] * 2, (pixel_values[1:] * 2,)], "same": pixel_values.double(), "count": 3}


def test_a_module_that_runs_twice_makes_twice_as_much_and_has_the_sum_of_its_times():
    marks = iter([0, 1, 4, 6, 10, 30])
    times_ms = layer_latency(Block(), torch.ones(1, 4), passes=1, clock=lambda: next(marks) * 1_000_000)

    # The layer runs from 1 to 4 and from 6 to 10, the model from 0 to 30.
    assert times_ms == {"inner": 3 + 4, "": 30 - 7}
    assert activation_bytes(Block(), torch.ones(1, 4)) == {"inner": 2 * 4 * FLOAT, "": 0}
    # Tensors are found in nested outputs.
    assert activation_bytes(Splits(), torch.ones(2, 3)) == {"": 2 * 3 * 4 + 2 * 3 * 8}
