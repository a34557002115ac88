"""Evaluation in shards, by real jobs on a model small enough to run over a thousand images: what is done how often."""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import in_process
import numpy as np
import pytest
import torch
import zoo

from profiling_agent.data.images import PIXELS, PreparedImages
from profiling_agent.jobs.runner import Jobs, job_key
from profiling_agent.jobs.tasks import Evaluated, EvaluateTask
from profiling_agent.lib.inference import quick_products
from profiling_agent.measure.intervals import answers_of, concatenate, read_predictions
from profiling_agent.runtimes.torch_artifact import load_module
from profiling_agent.schemas import SHARD, SplitInfo

NUM_IMAGES, BATCH_SIZE = 2 * SHARD + 40, 48
Evaluation = Callable[[str, int], EvaluateTask]


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def evaluation(root: Path) -> Evaluation:
    """Return a function that gives the evaluation of a model on a shard."""
    brighter = zoo.processor().__class__(image_mean=[0.4] * 3, size={"height": 32, "width": 32})
    models = {
        "baseline": in_process.saved(root, "baseline", zoo.vit()),
        "other": in_process.saved(root, "other", zoo.vit(hidden_size=32)),
        "brighter": in_process.saved(root, "brighter", zoo.vit(), processor=brighter),
    }
    shared: dict[str, Any] = {"split": in_process.drawn(root, "search", NUM_IMAGES, seed=1, side=16)}
    shared |= {"batch_size": BATCH_SIZE, "device": "cpu"}
    return lambda model, shard: EvaluateTask(model=models[model], shard=shard, **shared)


@pytest.fixture(scope="module")
def jobs(root: Path) -> Iterator[Jobs]:
    with in_process.opened(root) as jobs:
        yield jobs


def done(root: Path) -> Counter[str]:
    """Return how many jobs of each kind there are."""
    return Counter(name.rpartition("-")[0] for name in times(root))


def times(root: Path) -> dict[str, int]:
    return {path.parent.name: path.stat().st_mtime_ns for path in root.glob("jobs/*/result.json")}


def test_shards_are_512_images_and_what_is_left():
    def of(num_images: int) -> SplitInfo:
        return SplitInfo.model_construct(num_images=num_images)

    assert [of(1100).rows(shard) for shard in of(1100).shards()] == [range(512), range(512, 1024), range(1024, 1100)]
    assert [len(of(number).shards()) for number in (0, 1, 512, 513)] == [0, 1, 1, 2]
    assert of(1100).shards(range(512, 1024)) == range(1, 2)
    assert of(1100).shards(range(1024, 1100)) == of(1100).shards(range(1024, 9999)) == range(2, 3)
    assert of(100).shards(range(512)) == range(1)


def test_no_image_is_decoded_or_evaluated_twice(jobs: Jobs, root: Path, evaluation: Evaluation):
    def evaluated(model: str, shards: Iterable[int] = range(3)) -> list[Evaluated]:
        return jobs.run_each([evaluation(model, shard) for shard in shards])

    sample = evaluated("baseline", [0])
    assert done(root) == {"prepare": 1, "evaluate": 1}
    whole = evaluated("baseline")
    assert done(root) == {"prepare": 3, "evaluate": 3}
    assert [each.predictions.num_images for each in whole] == [SHARD, SHARD, NUM_IMAGES - 2 * SHARD]
    assert whole[0] == sample[0]

    evaluated("other")
    assert done(root) == {"prepare": 3, "evaluate": 6}, "a model with the same processor reads the same images"
    evaluated("brighter", [0])
    assert done(root) == {"prepare": 4, "evaluate": 7}, "another processor makes something else of them"

    before = times(root)
    assert evaluated("baseline", (2, 1, 0)) == whole[::-1]
    assert times(root) == before


def test_the_answers_are_those_of_all_images_at_once(jobs: Jobs, root: Path, evaluation: Evaluation):
    tasks = [evaluation("baseline", shard) for shard in range(3)]
    predictions = [each.predictions for each in jobs.run_each(tasks)]

    needs = [need for task in tasks for need in task.needs(lambda ref: root / ref.path)["images"]]
    images, model = PreparedImages([root / "jobs" / job_key(need) for need in needs]), load_module(root / "baseline")
    with torch.inference_mode(), quick_products():
        logits = [
            (model(pixel_values=torch.from_numpy(pixel_values)).logits.numpy(), labels)
            for pixel_values, labels in images.batches(BATCH_SIZE)
        ]
    expected = concatenate([answers_of(*each) for each in logits])
    found = concatenate([read_predictions(root / each.files[0].path) for each in predictions])
    assert np.array_equal(found.predicted, expected.predicted)
    assert np.array_equal(found.true, expected.true)
    assert sum(each.num_correct for each in predictions) == int(expected.right.sum())


def test_images_that_were_forgotten_are_prepared_again_and_what_was_prepared_stays_told(
    jobs: Jobs, root: Path, evaluation: Evaluation
):
    jobs.run(evaluation("baseline", 2))
    before = times(root)
    jobs.forget_images()

    assert list(root.glob(f"jobs/*/{PIXELS}")) == []
    assert times(root) == before
    jobs.run(evaluation("baseline", 2).model_copy(update={"batch_size": 7}))
    changed = [name.rpartition("-")[0] for name, time in times(root).items() if before.get(name) != time]
    assert sorted(changed) == ["evaluate", "prepare"]
    (pixels,) = root.glob(f"jobs/*/{PIXELS}")
    assert np.load(pixels).shape == (NUM_IMAGES - 2 * SHARD, 3, 32, 32)


def test_whoever_evaluates_imports_no_torch_for_a_runtime_that_has_none():
    code = "import sys, profiling_agent.jobs.measuring; print({'torch', 'transformers'} & sys.modules.keys())"

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said.strip() == "set()"
