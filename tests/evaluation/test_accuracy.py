import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import zoo

from profiling_agent.errors import ArtifactError, RequestError
from profiling_agent.evaluation.accuracy import predict
from profiling_agent.evaluation.predictions import read_predictions, write_predictions
from profiling_agent.runtimes.eager import random_batch


def batches(sizes: list[int]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    return [(random_batch(zoo.SPEC, size, seed=size), torch.arange(size)) for size in sizes]


def test_every_image_gets_the_class_with_the_largest_logit():
    model = zoo.vit()

    predicted, true = predict(model, batches([4, 3]))

    with torch.inference_mode():
        expected = torch.cat([model(pixel_values=pixels).logits.argmax(-1) for pixels, _ in batches([4, 3])])
    assert predicted.tolist() == expected.tolist()
    assert true.tolist() == [0, 1, 2, 3, 0, 1, 2]
    assert predicted.dtype == true.dtype == np.int64


def test_progress_is_told_in_images():
    seen = []

    predict(zoo.vit(), batches([4, 3]), progress=lambda *said: seen.append(said), num_images=7)

    assert [said[1:] for said in seen] == [(4, 7), (7, 7)]


def test_the_mode_of_the_model_is_left_as_found():
    model = zoo.vit().train()

    predict(model, batches([2]))

    assert model.training


def test_no_images_is_a_clear_error():
    with pytest.raises(RequestError, match="num_samples"):
        predict(zoo.vit(), [])


def test_predictions_come_back_from_disk(tmp_path: Path):
    write_predictions(tmp_path / "p.safetensors", np.array([1, 2]), np.array([1, 3]))

    predicted, true = read_predictions(tmp_path / "p.safetensors")

    assert (predicted.tolist(), true.tolist()) == ([1, 2], [1, 3])


def test_as_many_predictions_as_labels_are_needed(tmp_path: Path):
    with pytest.raises(ValueError, match="labels"):
        write_predictions(tmp_path / "p.safetensors", np.array([1, 2]), np.array([1]))


@pytest.mark.parametrize("content", [b"", b"\x80\x04}."])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes):
    (tmp_path / "p.safetensors").write_bytes(content)

    with pytest.raises(ArtifactError, match=r"p\.safetensors"):
        read_predictions(tmp_path / "p.safetensors")


def test_reading_and_comparing_needs_no_torch():
    code = """
import sys
import profiling_agent.evaluation.intervals, profiling_agent.evaluation.predictions, profiling_agent.evaluation.race
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)

    assert done.returncode == 0, done.stderr
