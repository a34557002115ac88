"""Deployments on a CUDA device: golden logits, batch sizes, answers that aren't overwritten, and how long a pass takes."""

from pathlib import Path

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
from profiling_agent.runtimes.torch_session import GraphedSession, TorchSession
from profiling_agent.schemas import Deployment

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
NAMES = [each.name for each in deployments.all_deployments("cuda") if each.runtime != "inductor"]
# Of logits on noise by a model with random weights; tests/jobs/test_cuda.py has float32's.
DISTANCES = {"float32": 1e-3, "tf32": 2e-2, "bfloat16": 0.1, "float16": 0.05, "dynamic": 0.2, "float8": 0.3}


def source_of(model: nn.Module, folder: Path) -> Source:
    save_model(model, folder, spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    return read_source(folder, noise_batch(zoo.SPEC, 8), batch_size=8, device="cuda")


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Source:
    return source_of(zoo.vit(), tmp_path_factory.mktemp("vit") / "model")


@pytest.mark.parametrize("name", NAMES)
def test_a_saved_model_opens_with_its_logits_in_any_batch_size(source: Source, tmp_path: Path, name: str):
    deployment, folder = deployments.deployment(name), tmp_path / "model"
    recipe = save_deployed(source, deployment, folder)

    session = open_session(folder, device="cuda")

    assert isinstance(session, TorchSession)
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
    took = session.bound(batches[0])
    per_pass = session.enqueued(batches[0], 10)
    assert took() > 0
    assert per_pass is not None
    assert per_pass > 0
    assert (session.peak_bytes() or 0) > 0


def test_replayed_tensors_are_not_aliased():
    session = GraphedSession(zoo.vit().cuda())
    images = [session.to_device(noise_batch(zoo.SPEC, 4, seed=seed)) for seed in (1, 2)]
    with torch.inference_mode():
        first, second = (session._call(batch) for batch in images)
        kept = first.clone()
        third = session._call(images[1])
    assert torch.equal(first, kept)
    assert torch.equal(second, third)
    assert not torch.equal(first, second)


def test_two_sessions_keep_their_own_precision(source: Source, tmp_path: Path):
    for name in ("eager float32", "eager tf32"):
        save_deployed(source, deployments.deployment(name), tmp_path / name)
    images = noise_batch(zoo.SPEC, 8)
    exact, rounded = (open_session(tmp_path / name, device="cuda") for name in ("eager float32", "eager tf32"))

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
    images = noise_batch(zoo.SPEC, 4)

    with pytest.raises(ArtifactError, match="can't be captured in a CUDA graph"):
        GraphedSession(Waiting().eval().cuda()).run(images)

    model = zoo.vit()
    with torch.inference_mode():
        expected = model(pixel_values=torch.from_numpy(images)).logits.numpy()
    assert deployments.distance(GraphedSession(model.cuda()).run(images), expected) < 1e-3


def test_convolutions_are_channels_last(tmp_path: Path):
    source = source_of(zoo.resnet(), tmp_path / "source")
    save_deployed(source, Deployment(scheme="bfloat16"), tmp_path / "model")

    session = open_session(tmp_path / "model", device="cuda")

    assert isinstance(session, TorchSession)
    images = noise_batch(zoo.SPEC, 4)
    assert session.to_device(images).is_contiguous(memory_format=torch.channels_last)
    assert deployments.distance(session.run(images), deployments.float_logits(source, images)) < 0.1
