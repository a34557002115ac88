"""Evaluation in shards, by real jobs on a model small enough to run over a thousand images: what is done how often."""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import in_process
import numpy as np
import pytest
import sample_records
import torch
import zoo

from profiling_agent.data.images import PIXELS, PreparedImages
from profiling_agent.jobs.base import PrepareTask
from profiling_agent.jobs.runner import Jobs, job_key
from profiling_agent.jobs.tasks import Evaluated, EvaluateTask
from profiling_agent.lib.inference import quick_products
from profiling_agent.lib.io import file_sha256
from profiling_agent.measure.intervals import Answers, answers_of, concatenate, read_predictions
from profiling_agent.runtimes.torch_artifact import load_module
from profiling_agent.schemas import SHARD, ArtifactRef, SplitInfo

NUM_IMAGES, BATCH_SIZE = 2 * SHARD + 40, 48


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run folder after acquisition: three models, and images."""
    root = tmp_path_factory.mktemp("run")
    (root / "jobs").mkdir()
    brighter = zoo.processor().__class__(image_mean=[0.4] * 3, size={"height": 32, "width": 32})
    in_process.saved(root, "baseline", zoo.vit())
    in_process.saved(root, "other", zoo.vit(hidden_size=32))
    in_process.saved(root, "brighter", zoo.vit(), processor=brighter)
    in_process.drawn(root, "search", NUM_IMAGES, seed=1, side=16)
    return root


def ref(root: Path, name: str) -> ArtifactRef:
    return ArtifactRef(path=name, sha256=file_sha256(root / name / "recipe.json"), size_bytes=1, kind="model")


def info(root: Path, name: Any, num_images: int) -> SplitInfo:
    path = root / f"{name}.arrow"
    file = ArtifactRef(path=path.name, sha256=file_sha256(path), size_bytes=path.stat().st_size, kind="split")
    return SplitInfo(name=name, source_split="test", num_images=num_images, file=file)


@pytest.fixture(scope="module")
def jobs(root: Path) -> Iterator[Jobs]:
    with in_process.opened(root) as jobs:
        yield jobs


def done(root: Path) -> Counter[str]:
    """Return how many jobs of each kind there are."""
    return Counter(name.rpartition("-")[0] for name in times(root))


def changed(root: Path, before: dict[str, int]) -> Counter[str]:
    """Return how many jobs of each kind were done since, for the first time or again."""
    return Counter(name.rpartition("-")[0] for name, time in times(root).items() if before.get(name) != time)


def times(root: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in root.glob("jobs/*/result.json")}


def evaluation(root: Path, model: str, shard: int) -> EvaluateTask:
    split = info(root, "search", NUM_IMAGES)
    return EvaluateTask(model=ref(root, model), split=split, shard=shard, batch_size=BATCH_SIZE, device="cpu")


def evaluated(jobs: Jobs, root: Path, model: str, shards: Iterable[int] = range(3)) -> list[Evaluated]:
    return jobs.run_each([evaluation(root, model, shard) for shard in shards])


def test_shards_are_512_images_and_what_is_left():
    def of(num_images: int) -> SplitInfo:
        return SplitInfo(
            name="search", source_split="test", num_images=num_images, file=sample_records.ref("s", "split")
        )

    assert [of(1100).rows(shard) for shard in of(1100).shards()] == [range(512), range(512, 1024), range(1024, 1100)]
    assert [len(of(number).shards()) for number in (0, 1, 512, 513)] == [0, 1, 1, 2]
    assert of(1100).shards(range(512, 1024)) == range(1, 2)
    assert of(1100).shards(range(1024, 1100)) == of(1100).shards(range(1024, 9999)) == range(2, 3)
    assert of(100).shards(range(512)) == range(1)


def test_no_image_is_decoded_or_evaluated_twice(jobs: Jobs, root: Path):
    sample = evaluated(jobs, root, "baseline", [0])
    assert done(root) == {"prepare": 1, "evaluate": 1}
    whole = evaluated(jobs, root, "baseline")
    assert done(root) == {"prepare": 3, "evaluate": 3}
    assert [each.predictions.num_images for each in whole] == [SHARD, SHARD, NUM_IMAGES - 2 * SHARD]
    assert whole[0] == sample[0]

    evaluated(jobs, root, "other")
    assert done(root) == {"prepare": 3, "evaluate": 6}, "a model with the same processor reads the same images"
    evaluated(jobs, root, "brighter", [0])
    assert done(root) == {"prepare": 4, "evaluate": 7}, "another processor makes something else of them"

    before = times(root)
    assert evaluated(jobs, root, "baseline") == whole
    assert times(root) == before


def test_the_answers_are_those_of_all_images_at_once_whichever_shard_is_first(jobs: Jobs, root: Path):
    predictions = [each.predictions for each in reversed(evaluated(jobs, root, "baseline", (2, 1, 0)))]

    text, images = (root / "baseline" / "preprocessor_config.json").read_text(), info(root, "search", NUM_IMAGES)
    tasks = [PrepareTask(split=images, shard=shard, processor=text) for shard in images.shards()]
    model, expected = load_module(root / "baseline"), list[Answers]()
    with torch.inference_mode(), quick_products():
        for task in tasks:
            shard_images = PreparedImages([root / "jobs" / job_key(task)])
            for pixel_values, labels in shard_images.batches(BATCH_SIZE):
                expected.append(answers_of(model(pixel_values=torch.from_numpy(pixel_values)).logits.numpy(), labels))
    found = concatenate([read_predictions(root / each.files[0].path) for each in predictions])
    for name in ("predicted", "true"):
        assert np.array_equal(getattr(found, name), getattr(concatenate(expected), name)), name
    assert sum(each.num_correct for each in predictions) == int(concatenate(expected).right.sum())


def test_images_that_were_forgotten_are_prepared_again_and_what_was_prepared_stays_told(jobs: Jobs, root: Path):
    jobs.run(evaluation(root, "baseline", 2))
    before = times(root)
    jobs.forget_images()

    assert list(root.glob(f"jobs/*/{PIXELS}")) == []
    assert times(root) == before
    jobs.run(evaluation(root, "baseline", 2).model_copy(update={"batch_size": 7}))
    assert changed(root, before) == {"prepare": 1, "evaluate": 1}
    (pixels,) = root.glob(f"jobs/*/{PIXELS}")
    assert np.load(pixels).shape == (NUM_IMAGES - 2 * SHARD, 3, 32, 32)
    jobs.forget_images()
    jobs.forget_images()


def test_whoever_evaluates_imports_no_torch_for_a_runtime_that_has_none():
    code = "import sys, profiling_agent.jobs.measuring; print({'torch', 'transformers'} & sys.modules.keys())"

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said.strip() == "set()"
