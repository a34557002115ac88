"""What the job makes of one of the paper's baselines, on a model small enough to count by hand."""

import io
from pathlib import Path

import in_process
import numpy as np
import pytest
import torch
import zoo
from PIL import Image

from profiling_agent.acquisition.images import write_split
from profiling_agent.acquisition.prepared import iter_batches
from profiling_agent.artifacts.load import load_module
from profiling_agent.artifacts.save import save_model
from profiling_agent.errors import PruningError
from profiling_agent.evaluation.predictions import read_predictions
from profiling_agent.files import file_sha256
from profiling_agent.jobs.tasks import CompareTask, PaperBaseline
from profiling_agent.records import ArtifactRef, SplitInfo

NUM_IMAGES = 20


def png(rng: np.random.Generator) -> bytes:
    held = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(held, format="PNG")
    return held.getvalue()


@pytest.fixture
def task(tmp_path: Path) -> CompareTask:
    rng = np.random.default_rng(0)
    save_model(zoo.vit(), tmp_path / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    labels = [index % len(zoo.LABELS) for index in range(NUM_IMAGES)]
    write_split(tmp_path / "split.parquet", [png(rng) for _ in labels], labels)
    split_sha256 = file_sha256(tmp_path / "split.parquet")
    return CompareTask(
        model=ArtifactRef(
            path="model", sha256=file_sha256(tmp_path / "model" / "recipe.json"), size_bytes=1, kind="model"
        ),
        criterion="l1",
        ratio=0.1,
        split=SplitInfo(
            name="heldout",
            source_split="test",
            num_images=NUM_IMAGES,
            file=ArtifactRef(path="split.parquet", sha256=split_sha256, size_bytes=1, kind="split"),
        ),
        batch_size=8,
    )


def compared(task: CompareTask, root: Path, heard: list[tuple[str, int, int]] | None = None) -> PaperBaseline:
    told = heard if heard is not None else []
    name = f"compare-{len(list(root.glob('jobs/compare-*')))}"
    return in_process.run(task, root, name, lambda message, done, total: told.append((message, done, total)))


def test_a_tenth_of_each_hidden_width_is_cut_and_counted(task: CompareTask, tmp_path: Path):
    heard = list[tuple[str, int, int]]()

    done = compared(task, tmp_path, heard)

    # Two MLPs lose 25 of 256 channels, each a row and a column of 64 and a bias.
    assert done.params_before == sum(parameter.numel() for parameter in zoo.vit().parameters())
    assert done.params_before - done.params == 2 * 25 * (64 + 64 + 1)
    assert done.size_ratio == pytest.approx(done.params / done.params_before)
    assert done.speedup > 0
    assert heard == 2 * [("evaluating", seen, NUM_IMAGES) for seen in (8, 16, 20)]


def test_both_models_answer_every_image_of_the_split_as_they_do_alone(task: CompareTask, tmp_path: Path):
    done = compared(task, tmp_path)

    given = in_process.context(task, tmp_path, "reading").images("images")
    batches = iter_batches(given, batch_size=8)
    model = load_module(tmp_path / "model").eval()
    with torch.inference_mode():
        alone = torch.cat([model(pixel_values=images).logits.argmax(dim=-1) for images, _ in batches]).tolist()
    for made in (done.predictions_before, done.predictions):
        answers = read_predictions(tmp_path / made.files[0].path)
        assert answers.true.tolist() == [index % len(zoo.LABELS) for index in range(NUM_IMAGES)]
        assert (made.split, made.num_images) == ("heldout", NUM_IMAGES)
        assert made.num_correct == int(answers.right.sum())
    assert read_predictions(tmp_path / done.predictions_before.files[0].path).predicted.tolist() == alone


def test_what_is_random_is_drawn_from_the_seed(task: CompareTask, tmp_path: Path):
    drawn = [
        compared(task.model_copy(update={"criterion": "random", "ratio": 0.5, "seed": seed}), tmp_path)
        for seed in (1, 1, 2)
    ]

    answers = [one.predictions.files[0].sha256 for one in drawn]
    assert answers[0] == answers[1]
    assert len({one.params for one in drawn}) == 1


def test_a_ratio_that_cuts_no_channel_is_refused(task: CompareTask, tmp_path: Path):
    with pytest.raises(PruningError, match="cuts no channel"):
        compared(task.model_copy(update={"ratio": 0.001}), tmp_path)
