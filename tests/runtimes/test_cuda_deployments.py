"""Deployments on a CUDA device: golden logits, batch sizes, answers that aren't overwritten, and how long a pass takes."""

from pathlib import Path
from typing import Any

import deployments
import numpy as np
import pytest
import torch
import zoo
from torch import nn
from transformers.modeling_outputs import ImageClassifierOutput

from profiling_agent.errors import ArtifactError
from profiling_agent.runtimes.artifact import check_golden, open_session
from profiling_agent.runtimes.registry import Source, noise_batch
from profiling_agent.runtimes.torch_artifact import read_source, save_deployed, save_model
from profiling_agent.runtimes.torch_session import CudaGraphs

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
# Of logits on noise by a model with random weights; tests/jobs/test_cuda.py has float32's.
DISTANCES = {"float32": 1e-3, "tf32": 2e-2, "bfloat16": 0.1, "float16": 0.05, "dynamic": 0.2, "float8": 0.3}


def source_of(model: nn.Module, folder: Path) -> Source:
    save_model(model, folder, spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    return read_source(folder, noise_batch(zoo.SPEC, 8), batch_size=8, device="cuda")


def opened(source: Source, name: str, folder: Path) -> Any:
    save_deployed(source, deployments.deployment(name), folder)
    return open_session(folder, device="cuda")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return source_of(zoo.vit(), tmp_path_factory.mktemp("vit") / "model")


@pytest.mark.parametrize("name", [each.name for each in deployments.all_deployments("cuda")])
def test_a_saved_model_opens_with_its_logits_in_any_batch_size(source: Source, tmp_path: Path, name: str):
    deployment, folder = deployments.deployment(name), tmp_path / "model"
    recipe = save_deployed(source, deployment, folder)

    session: Any = open_session(folder, device="cuda")

    assert next(session.module.parameters()).is_cuda
    if deployment.runtime != "inductor":
        check_golden(session.run, folder, recipe)
        check_golden(open_session(folder, device="cpu").run, folder, recipe)
    batches = [noise_batch(zoo.SPEC, size, seed=size) for size in (8, 1, 8, 3)]
    found = [session.run(images) for images in batches]
    for images, logits in zip(batches, found, strict=True):
        assert logits.shape == (len(images), len(zoo.LABELS))
        expected = deployments.float_logits(source, images)
        assert deployments.distance(logits, expected) < DISTANCES[deployment.scheme]
    # A later pass doesn't write into the answers of an earlier one.
    before = found[0].copy()
    session.run(noise_batch(zoo.SPEC, 8, seed=99))
    np.testing.assert_array_equal(found[0], before)
    np.testing.assert_allclose(session.run(batches[0]), before, rtol=1e-2, atol=1e-2)
    assert session.bound(batches[0])() > 0
    assert session.enqueued(batches[0], 10) > 0
    assert session.peak_bytes() > 0


def test_replayed_tensors_are_not_aliased():
    call = CudaGraphs(zoo.vit().cuda())
    images = [torch.from_numpy(noise_batch(zoo.SPEC, 4, seed=seed)).cuda() for seed in (1, 2)]
    with torch.inference_mode():
        first, second = map(call, images)
        kept = first.clone()
        third = call(images[1])
    assert torch.equal(first, kept)
    assert torch.equal(second, third)
    assert not torch.equal(first, second)


def test_two_sessions_keep_their_own_precision(source: Source, tmp_path: Path):
    images = noise_batch(zoo.SPEC, 8)
    exact, rounded = (opened(source, name, tmp_path / name) for name in ("eager float32", "eager tf32"))

    first = exact.run(images)
    rounded.run(images)

    assert not torch.backends.cuda.matmul.allow_tf32
    np.testing.assert_array_equal(exact.run(images), first)


class Waiting(nn.Module):
    """A model that looks at a number of the device amid its pass."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, 5)

    def forward(self, pixel_values: torch.Tensor) -> ImageClassifierOutput:
        logits = self.layer(pixel_values.flatten(1))
        return ImageClassifierOutput(logits=logits * float(logits.abs().max().item()))


def test_what_can_not_be_captured_is_refused_and_breaks_nothing():
    images, model = torch.from_numpy(noise_batch(zoo.SPEC, 4)), zoo.vit()
    with torch.inference_mode():
        expected = model(pixel_values=images).logits

        with pytest.raises(ArtifactError, match="can't be captured in a CUDA graph"):
            CudaGraphs(Waiting().eval().cuda())(images.cuda())

        found = CudaGraphs(model.cuda())(images.cuda()).cpu()
    assert deployments.distance(found.numpy(), expected.numpy()) < 1e-3


def test_convolutions_are_channels_last(tmp_path: Path):
    source, images = source_of(zoo.resnet(), tmp_path / "source"), noise_batch(zoo.SPEC, 4)

    session = opened(source, "eager bfloat16", tmp_path / "model")

    assert session.to_device(images).is_contiguous(memory_format=torch.channels_last)
    assert deployments.distance(session.run(images), deployments.float_logits(source, images)) < 0.1
