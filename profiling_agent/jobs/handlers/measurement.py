"""Handlers of measurements: evaluation, timing, memory. Torch is imported only for its own runtimes."""

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path

from profiling_agent.data.images import SplitImages
from profiling_agent.data.prepared import PreparedImages
from profiling_agent.errors import RequestError
from profiling_agent.jobs import tasks
from profiling_agent.jobs.tasks import (
    JobContext,
)
from profiling_agent.lib.logs import Progress
from profiling_agent.lib.machine import available_threads
from profiling_agent.measure import race as races
from profiling_agent.measure.predictions import Answers, answers_of, concatenate, note_opening, write_predictions
from profiling_agent.measure.worker import measure_headline
from profiling_agent.processes.child import inherited
from profiling_agent.runtimes.artifact import ParentCounts, Recipe, check_golden, model_bytes, open_folder, open_session
from profiling_agent.runtimes.artifact import layer_times as times_by_layer
from profiling_agent.runtimes.registry import ModelSession
from profiling_agent.schemas import Deployment, Footprint, Headline, MemoryUse, Opening, Predictions, Race


def headline(task: tasks.HeadlineTask, job: JobContext) -> Headline:
    """Time the model and its memory."""
    path = job.path(task.model)
    session = open_session(path, device=task.device, num_threads=available_threads())
    return measure_headline(session, open_folder(path, verify=False).input, batch_size=task.batch_size)


def race(task: tasks.RaceTask, job: JobContext) -> Race:
    """Let the models take turns."""
    return races.race_once(task.entries, _conditions(task, job), progress=job.progress)


def session(task: tasks.SessionTask, job: JobContext) -> Race:
    """Hold one session of an estimate."""
    conditions = _conditions(task, job, reads_memory=task.reads_memory)
    return races.run_one_session(task.entries, conditions, task.number, progress=job.progress)


def _conditions(task: tasks.RaceTask, job: JobContext, *, reads_memory: bool = False) -> races.Conditions:
    return races.Conditions(
        root=job.root,
        batch_size=task.batch_size,
        device=task.device,
        seed=task.seed,
        pass_s=task.pass_s,
        server=None if reads_memory else inherited(),
    )


def memory(task: tasks.MemoryTask, job: JobContext) -> MemoryUse:
    """Read what a process holds at most that only loads and runs the model."""
    return races.memory_use(task.model, root=job.root, batch_size=task.batch_size, device=task.device)


def layer_times(task: tasks.LayerTimesTask, job: JobContext) -> tasks.LayerTimes:
    """Ask the model's runtime what the parts of a pass take."""
    exported = job.path(task.onnx) if task.onnx else None
    times = times_by_layer(job.path(task.model), exported, batch_size=task.batch_size, num_threads=available_threads())
    return tasks.LayerTimes(layers=times)


def open_heldout(task: tasks.OpenHeldoutTask, job: JobContext) -> Opening:
    """Note in the user's ledger that a candidate is tested."""
    baseline = open_folder(job.path(task.baseline), verify=False)
    weights = baseline.files[baseline.model_files[0]]
    images = SplitImages(job.path(task.heldout.file))
    encoded = (images.encoded(row) for row in range(len(images)))
    return note_opening(weights, task.candidate.sha256, encoded, task.fresh)


@dataclass
class _OpenedModel:
    """An opened model, its recipe and footprint, and whether it was compared with its golden logits."""

    session: ModelSession
    recipe: Recipe
    footprint: Footprint
    is_checked: bool = False


def evaluate(task: tasks.EvaluateTask, job: JobContext) -> tasks.Evaluated:
    """Run the model over the shard; count what it takes. The next shard of the same model finds it opened."""
    images, path = job.images("images"), job.path(task.model)
    name = f"{task.model.path} {task.model.sha256} {task.device}"
    if job.kept.keys() != {name}:
        # Free the previous model first: memory may not hold two large ones.
        job.kept.clear()
        job.kept[name] = _open_model(task, path)
    opened: _OpenedModel = job.kept[name]
    with _quick_products() if opened.recipe.deployment.runtime == "eager" else nullcontext():
        answers = answer(opened.session, images, task.batch_size, job.progress)
    if not opened.is_checked:
        # After the images: a runtime that compiles for each batch size then has a larger one for the two golden images.
        check_golden(opened.session.run, path, opened.recipe)
        opened.is_checked = True
    out = job.folder / "predictions.safetensors"
    write_predictions(out, answers)
    predictions = Predictions(
        split=task.split.name,
        num_images=len(answers.true),
        num_correct=int(answers.right.sum()),
        files=(job.ref(out, "predictions"),),
    )
    return tasks.Evaluated(footprint=opened.footprint, predictions=predictions)


def _quick_products() -> AbstractContextManager[None]:
    from profiling_agent.lib.inference import quick_products

    return quick_products()


def _open_model(task: tasks.EvaluateTask, path: Path) -> _OpenedModel:
    recipe = open_folder(path, verify=True)
    session = open_session(path, device=task.device, num_threads=available_threads())
    if recipe.deployment == Deployment() and task.device == "cpu":
        from profiling_agent.lib.inference import fuse_norms_
        from profiling_agent.lib.modules import random_batch
        from profiling_agent.runtimes.torch_session import TorchSession

        assert isinstance(session, TorchSession), "eager float32 is torch's"
        fuse_norms_(session.module, random_batch(recipe.input, 2))
    counts = recipe.counts or _count(path)
    return _OpenedModel(session, recipe, Footprint(**counts.model_dump(), size_bytes=model_bytes(path)))


def answer(session: ModelSession, images: PreparedImages, batch_size: int, progress: Progress) -> Answers:
    """Return a session's answers for all images; RequestError if there are none."""
    answers, done = list[Answers](), 0
    for pixel_values, true in images.batches(batch_size):
        answers.append(answers_of(session.run(pixel_values), true))
        done += len(true)
        progress("evaluating", done, len(images))
    if not answers:
        raise RequestError("there are 0 images to evaluate on: raise num_samples")
    return concatenate(answers)


def _count(path: Path) -> ParentCounts:
    from profiling_agent.jobs.handlers.models import complexity_of
    from profiling_agent.quantization.kinds import parameter_bytes
    from profiling_agent.runtimes.torch_artifact import load_module

    params, macs = complexity_of(path)
    return ParentCounts(params=params, macs=macs, parameter_bytes=parameter_bytes(load_module(path, verify=False)))
