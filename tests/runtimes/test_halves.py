"""Models in half precision as a whole, as they are deployed on CUDA: what is saved there opens, answers and is counted anywhere."""

from pathlib import Path

import pytest
import torch
from pruning.families import FAMILIES, TIMM_FAMILIES, processor_of, spec_of

from profiling_agent.modules.complexity import count_complexity
from profiling_agent.modules.inference import floating_dtype, logits_of, random_batch
from profiling_agent.runtimes.torch_artifact import load_module, load_skeleton, save_model

# One that casts its images by itself, one that doesn't, and one with a table of coordinates that isn't saved.
QUICK = ("vit", "resnet", "swinv2")
# Eight significant bits, through all layers of a network of random weights.
BOUND = 0.1


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in QUICK else pytest.mark.slow)
        for family in FAMILIES
        if family not in TIMM_FAMILIES
    ],
)
def test_a_model_in_half_precision_as_a_whole_opens_answers_and_is_counted(family: str, tmp_path: Path):
    model = FAMILIES[family]()
    spec = spec_of(model)
    images = random_batch(spec, 2)
    expected = logits_of(model, images)
    macs = {name: row.macs for name, row in count_complexity(model, spec).items()}

    # What a model in eval mode keeps of float32 (LeViT its attention biases), training mode lets go.
    half = model.to(torch.bfloat16).train().eval()
    save_model(half, tmp_path / "model", spec=spec, processor=processor_of(spec), base_model="tiny")
    loaded = load_module(tmp_path / "model")

    assert floating_dtype(loaded) is torch.bfloat16
    found = logits_of(loaded, images)
    assert found.dtype is torch.float32
    assert float((found - expected).norm() / expected.norm()) < BOUND
    skeleton = load_skeleton(tmp_path / "model")
    assert floating_dtype(skeleton) is torch.float32
    assert {name: row.macs for name, row in count_complexity(skeleton, spec).items()} == macs
