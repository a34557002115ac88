"""Evaluation: what a model, or one of the paper's baselines, says of a split's images, and what it takes."""

import statistics
from pathlib import Path

import numpy as np

from profiling_agent.acquisition.batches import iter_batches, read_split
from profiling_agent.artifacts.folder import open_folder
from profiling_agent.artifacts.golden import check_golden
from profiling_agent.artifacts.load import load_module, load_processor, load_recipe
from profiling_agent.artifacts.recipe import WEIGHTS, Counts
from profiling_agent.deployment.protocol import Batch, ModelSession
from profiling_agent.deployment.registry import open_session
from profiling_agent.deployment.torch_session import TorchSession
from profiling_agent.errors import RequestError
from profiling_agent.evaluation.openings import note_opening
from profiling_agent.evaluation.predictions import Classes, write_predictions
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.handlers.deployment import complexity_of
from profiling_agent.jobs.tasks import CompareTask, Evaluated, EvaluateTask, OpenHeldoutTask, PaperBaseline
from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.rivals import paper_prune
from profiling_agent.quantization.footprint import folder_bytes, parameter_bytes
from profiling_agent.records import Footprint, Opening, Predictions
from profiling_agent.reproducibility import available_threads

NUM_REPEATS, NUM_WARM_UP = 15, 3


def evaluate(task: EvaluateTask, job: JobContext) -> Evaluated:
    """Run the model over the split, or a part of it; count what it takes."""
    path = job.path(task.model)
    recipe = open_folder(path, verify=True)
    session = open_session(path, device=task.device, num_threads=available_threads())
    predictions = _answers(session, task, job, first=task.first, limit=task.num_images)
    # Last, because a runtime that compiles for each size of batch then has a larger one to put the two images in.
    check_golden(session.run, path, recipe)
    counts = recipe.counts or _counts(path)
    return Evaluated(
        footprint=Footprint(**counts.model_dump(), size_bytes=folder_bytes(path)),
        predictions=predictions,
    )


def open_heldout(task: OpenHeldoutTask, job: JobContext) -> Opening:
    """Note in the user's ledger that a candidate is tested."""
    model = open_folder(job.path(task.baseline), verify=False).files[WEIGHTS]
    images = read_split(job.path(task.heldout.file)).encoded
    return note_opening(model, task.candidate.sha256, (image.as_py() for image in images), task.fresh)


def compare(task: CompareTask, job: JobContext) -> PaperBaseline:
    """Cut, ask both models about the split, and let them take turns."""
    path = job.path(task.model)
    model, spec = load_module(path).to(task.device).eval(), load_recipe(path).input
    cut = paper_prune(model, spec, task.ratio, task.criterion, seed=task.seed).model.to(task.device).eval()
    before, after = (TorchSession(module, device=task.device) for module in (model, cut))
    return PaperBaseline(
        predictions_before=_answers(before, task, job, name="predictions-before"),
        predictions=_answers(after, task, job, name="predictions-after"),
        params=sum(parameter.numel() for parameter in cut.parameters()),
        params_before=sum(parameter.numel() for parameter in model.parameters()),
        size_ratio=parameter_bytes(cut) / parameter_bytes(model),
        speedup=_speedup(before, after, random_batch(spec, task.batch_size).numpy()),
    )


def _speedup(before: TorchSession, after: TorchSession, images: Batch) -> float:
    """Return the median ratio of the repeats: both in one process, which one runtime allows."""
    turns = before.bound(images), after.bound(images)
    ratios: list[float] = []
    for number in range(NUM_WARM_UP + NUM_REPEATS):
        times = [turn() for turn in turns]
        ratios += [times[0] / times[1]] if number >= NUM_WARM_UP else []
    return statistics.median(ratios)


def _answers(
    session: ModelSession,
    task: EvaluateTask | CompareTask,
    job: JobContext,
    *,
    name: str = "predictions",
    first: int = 0,
    limit: int | None = None,
) -> Predictions:
    """Ask a session about each image of the task's split, prepared as the saved model wants them; write down what it says.

    Raises:
        RequestError: there are no images.
    """
    found, labels, done = list[Classes](), list[Classes](), 0
    num_images = min(task.split.num_images - first, limit or task.split.num_images)
    path, processor = job.path(task.split.file), load_processor(job.path(task.model))
    for images, true in iter_batches(path, processor, batch_size=task.batch_size, first=first, limit=limit):
        found.append(session.run(images.numpy()).argmax(axis=-1).astype(np.int64))
        labels.append(true.numpy())
        done += len(true)
        job.progress("evaluating", done, num_images)
    if not found:
        raise RequestError("there are 0 images to evaluate on: raise num_samples")
    predicted, expected = np.concatenate(found), np.concatenate(labels)
    out = job.folder / f"{name}.safetensors"
    write_predictions(out, predicted, expected)
    return Predictions(
        split=task.split.name,
        num_images=len(expected),
        num_correct=int((predicted == expected).sum()),
        files=(job.ref(out, "predictions"),),
    )


def _counts(path: Path) -> Counts:
    params, macs = complexity_of(path)
    return Counts(params=params, macs=macs, parameter_bytes=parameter_bytes(load_module(path, verify=False)))
