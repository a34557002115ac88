"""Pruning and recovery: cut units, make up for it, train, and keep the model that was made."""

import contextlib
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from torch import nn

from profiling_agent.acquisition.prepared import iter_batches, shuffled_batches
from profiling_agent.artifacts.load import load_module, load_recipe
from profiling_agent.artifacts.save import save_derived
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.handlers.logits import given_logits
from profiling_agent.jobs.tasks import PruneTask, RecoverTask
from profiling_agent.modules.inference import device_of, on_device
from profiling_agent.modules.products import quick_products
from profiling_agent.pruning import recovery
from profiling_agent.pruning.compensation import Calibration, compensate
from profiling_agent.pruning.prune import NUM_GATE_IMAGES, prune_model
from profiling_agent.records import ArtifactRef, Cut, PrunedModel, RecoveredModel


def prune(task: PruneTask, job: JobContext) -> PrunedModel:
    """Cut the units, pass the gates, compensate, save the candidate."""
    path = job.path(task.baseline)
    model, recipe = on_device(load_module(path), task.device), load_recipe(path)
    read = partial(iter_batches, job.images("calibration"), batch_size=task.batch_size)
    images, _ = next(read(batch_size=NUM_GATE_IMAGES))
    keep = {name: list(kept) for name, kept in task.keep.items()}
    pruned = prune_model(model, task.cuts, spec=recipe.input, seed=task.seed, images=images, keep=keep or None)
    made = None
    if task.compensate:
        expected = given_logits(job)
        with quick_products():
            made = compensate(
                model, pruned.model, task.cuts, pruned.keep, read, expected=expected, progress=job.progress
            )
    return PrunedModel(
        model=keep_model((made.model if made else pruned.model).cpu(), task.baseline, job, cuts=task.cuts),
        cuts=task.cuts,
        mask_error=pruned.mask_error,
        kl=made.kl_after if made else None,
        kl_uncompensated=made.kl_before if made else None,
        compensation=made.steps if made else (),
        compensation_note=made.note if made else None,
    )


def recover(task: RecoverTask, job: JobContext) -> RecoveredModel:
    """Recover, judged on the images that compensation wasn't fitted to; save what was recovered.

    Each epoch is kept in `recovery/<job key>` of the run folder, because a job's own folder goes when the job is cut.
    """
    folder = job.root / "recovery" / Path(job.final).name
    dense, pruned = (on_device(load_module(job.path(ref)), task.device) for ref in (task.baseline, task.model))
    calibration = Calibration(
        batches=partial(iter_batches, job.images("calibration"), batch_size=task.batch_size),
        device=device_of(dense),
        dtype=next(dense.parameters()).dtype,
    )
    with quick_products():
        recovered = recovery.recover(
            dense,
            pruned,
            shuffled_batches(job.images("recovery"), batch_size=task.batch_size, seed=task.seed),
            calibration.judged,
            epochs=task.epochs,
            folder=folder,
            seed=task.seed,
            expected=given_logits(job),
            progress=job.progress,
        )
    model = task.model if recovered.model is pruned else keep_model(recovered.model.cpu(), task.model, job)
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):
        # Empty unless another attempt's recovery was cut.
        folder.parent.rmdir()
    return RecoveredModel(
        model=model,
        epochs_run=recovered.epochs_run,
        kl_before=recovered.kl_before,
        kl_after=recovered.kl_after,
        stopped=recovered.stopped,
        note=recovered.note,
    )


def keep_model(
    model: nn.Module, source: ArtifactRef, job: JobContext, *, cuts: Sequence[Cut] | None = None
) -> ArtifactRef:
    """Save `model`, made of the saved model `source`, with its source's cuts where none are given; return the reference.

    It is loaded once, which is the reload gate: a model that doesn't come back as it was saved is never handed on.

    Raises:
        ArtifactError: it doesn't come back, or `source` is damaged.
    """
    folder = job.folder / "model"
    save_derived(model, job.path(source), folder, cuts=cuts)
    load_module(folder)
    return job.ref(folder, "model")
