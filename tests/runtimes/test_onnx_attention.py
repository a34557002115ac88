"""Attention becomes one operator of ONNX Runtime's where that computes what was asked."""

from pathlib import Path

import deployed
import numpy as np
import onnx
import onnxruntime
import pytest
import torch
import zoo

from profiling_agent.runtimes.artifact import ONNX
from profiling_agent.runtimes.onnx_export import _attend, _mask, export_onnx
from profiling_agent.runtimes.onnx_runtime_conversion import DOMAIN, fuse_attention
from profiling_agent.runtimes.registry import noise_batch
from profiling_agent.runtimes.save import save_deployed
from profiling_agent.schemas import QuantizationRecommendation

IMAGES = noise_batch(zoo.SPEC, 3, seed=4)


def operators(model: onnx.ModelProto) -> list[str]:
    return [node.op_type for node in model.graph.node]


def logits(model: onnx.ModelProto) -> np.ndarray:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    found = session.run(None, {"pixel_values": IMAGES})[0]
    assert isinstance(found, np.ndarray)
    return found


def test_an_exported_vit_masks_nothing(tmp_path: Path):
    export_onnx(zoo.vit(), tmp_path / "model.onnx", spec=zoo.SPEC)

    assert not {"IsNaN", "Where"} & set(operators(onnx.load(tmp_path / "model.onnx")))


@pytest.mark.parametrize("family", ["vit", "swin"])
def test_each_block_becomes_one_node_that_computes_the_same(sources: deployed.Sources, family: str):
    exported = sources(family).onnx
    assert exported is not None
    model = onnx.load(exported)

    found, taken = fuse_attention(model, ())

    blocks = operators(model).count("Softmax")
    assert len(taken) == operators(found).count("Attention") == blocks > 0
    assert "Softmax" not in operators(found)
    assert all([name.rsplit(".", 1)[1] for name in names] == ["q_proj", "k_proj", "v_proj"] for names in taken.values())
    assert deployed.distance(logits(found), logits(model)) < 1e-6


def test_dynamic_int8_has_attention_in_int8_and_says_so(sources: deployed.Sources, tmp_path: Path):
    recipe = save_deployed(
        sources("vit"), deployed.deployment("onnxruntime dynamic"), tmp_path / "model", num_threads=1
    )

    saved = operators(onnx.load(tmp_path / "model" / ONNX))
    projections = [row.name for row in recipe.quantized if row.name.endswith(("q_proj", "k_proj", "v_proj"))]
    assert saved.count("QAttention") == len(projections) / 3 > 0
    assert "Attention" not in saved


def test_with_keys_left_in_float_nothing_is_fused(sources: deployed.Sources, tmp_path: Path):
    recommendation = QuantizationRecommendation(layer=r"q_proj|v_proj|fc1", quantization_type="dynamic", dtype="qint8")
    deployment = deployed.deployment("onnxruntime dynamic").model_copy(update={"recommendations": (recommendation,)})

    recipe = save_deployed(sources("vit"), deployment, tmp_path / "model", num_threads=1)

    assert not {"Attention", "QAttention"} & set(operators(onnx.load(tmp_path / "model" / ONNX)))
    assert recipe.quantized
    assert not any("k_proj" in row.name for row in recipe.quantized)


def test_int8_with_a_position_bias_is_not_fused(sources: deployed.Sources):
    exported = sources("swin").onnx
    assert exported is not None
    model = onnx.load(exported)
    every = [name for name, _ in sources("swin").module.named_modules()]

    found, taken = fuse_attention(model, every)

    assert found is model
    assert not taken
    assert not any(node.domain == DOMAIN for node in found.graph.node)


def test_a_mask_of_either_kind_does_what_torchs_attention_does_with_it():
    torch.manual_seed(0)
    query, key, value = (torch.randn(2, 3, 5, 4) for _ in range(3))
    hidden = torch.rand(2, 1, 5, 5) < 0.7
    hidden[..., 0] = True
    for mask in (None, hidden, torch.randn(2, 3, 5, 5)):
        found, _ = _attend(torch.nn.Identity(), query, key, value, mask)
        expected = torch.nn.functional.scaled_dot_product_attention(query, key, value, attn_mask=mask)
        assert torch.allclose(found, expected.transpose(1, 2), atol=1e-6)


def test_a_causal_mask_stays():
    from transformers.masking_utils import causal_mask_function

    mask = _mask(
        batch_size=1,
        q_length=3,
        kv_length=3,
        mask_function=causal_mask_function,
        allow_is_causal_skip=False,
        device="cpu",
    )

    assert mask is not None
    assert mask[0, 0].tolist() == [[True, False, False], [True, True, False], [True, True, True]]
