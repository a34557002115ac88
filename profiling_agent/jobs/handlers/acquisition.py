"""How each job turns artifact references into one stage call and the result back into artifacts.

Imported by the warm worker only: this is where torch and the stages come in.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

from profiling_agent.acquisition.batches import iter_batches
from profiling_agent.acquisition.data import DataQuery
from profiling_agent.acquisition.hub import is_local, local_folder
from profiling_agent.acquisition.models import load_model, resolve_device
from profiling_agent.acquisition.splits import DrawnSplit, draw_splits
from profiling_agent.artifacts.load import load_module, load_processor, load_recipe, load_skeleton
from profiling_agent.artifacts.save import save_model
from profiling_agent.benchmarking.latency_table import time_units
from profiling_agent.errors import PruningError
from profiling_agent.jobs import comparing, tasks
from profiling_agent.jobs.context import Desk
from profiling_agent.jobs.handlers.deployment import deploy_job, evaluate_job, export_job
from profiling_agent.jobs.handlers.evaluation import compare_job
from profiling_agent.jobs.handlers.pruning import recover_job
from profiling_agent.jobs.keeping import keep_model
from profiling_agent.jobs.tune_job import tune_job
from profiling_agent.modules.inference import random_batch
from profiling_agent.profiling.profile import profile_model
from profiling_agent.profiling.sensitivity import measure_sensitivity
from profiling_agent.pruning.compensation import compensate
from profiling_agent.pruning.prune import prune_model
from profiling_agent.quantization.footprint import folder_bytes
from profiling_agent.records import (
    Acquired,
    Evidence,
    ModelProfile,
    ModelSource,
    PrunedModel,
    Record,
    ShapeFacts,
    SplitInfo,
)
from profiling_agent.shapes.resolve import resolve_input_shape
from profiling_agent.shapes.survey import survey
from profiling_agent.shapes.verify import verify

NUM_GATE_IMAGES = 4


def acquire(task: tasks.AcquireTask, desk: Desk) -> Acquired:
    """Check the model, draw the images."""
    device = resolve_device(task.device)
    loaded = load_model(task.model, revision=task.revision, device=device, progress=desk.progress)
    shared = task.model_dump(include=set(DataQuery.model_fields))
    config: Any = loaded.model.config
    drawn = draw_splits(DataQuery(**shared), id2label=config.id2label, folder=desk.folder, progress=desk.progress)

    def info(name: Any, split: DrawnSplit) -> SplitInfo:
        return SplitInfo(
            name=name,
            source_split=split.source_split,
            num_images=split.num_images,
            num_skipped=split.num_skipped,
            file=desk.ref(split.path, "split"),
        )

    return Acquired(
        source=ModelSource(
            # A path is made absolute, so that a run resumes from any working folder.
            name=str(local_folder(task.model, "model")) if is_local(task.model) else task.model,
            revision=loaded.revision,
            architecture=loaded.architecture,
            device=device,
        ),
        calibration=info("calibration", drawn.calibration),
        search=info("search", drawn.search),
        heldout=info("heldout", drawn.heldout),
        recovery=info("recovery", drawn.recovery) if drawn.recovery else None,
        labels=drawn.labels,
        notes=drawn.notes,
    )


def survey_shape(task: tasks.SurveyShapeTask, desk: Desk) -> ShapeFacts:
    """Gather what is known of the input shape."""
    device = resolve_device(task.device)
    loaded = load_model(task.model, revision=task.revision, device=device, progress=desk.progress)
    return survey(loaded.model, loaded.processor)


def resolve_shape(task: tasks.ResolveShapeTask, desk: Desk) -> tasks.ResolvedShape:
    """Find the input shape; save the baseline with it."""
    device = resolve_device(task.device)
    loaded = load_model(task.model, revision=task.revision, device=device, progress=desk.progress)
    spec = task.stated or resolve_input_shape(loaded.model, loaded.processor)
    if task.stated is not None:
        verify(loaded.model, spec)
    folder = desk.folder / "model"
    save_model(
        loaded.model.cpu(),
        folder,
        spec=spec,
        processor=loaded.processor,
        base_model=task.model,
        base_revision=loaded.revision,
    )
    return tasks.ResolvedShape(input=spec, baseline=desk.ref(folder, "model"), device=device)


def profile(task: tasks.ProfileTask, desk: Desk) -> tasks.Profiled:
    """Profile the model; write profile.json and the chrome trace."""
    path = desk.path(task.model)
    recipe = load_recipe(path)
    trace = desk.folder / "trace.json.gz"
    measured = profile_model(
        load_module(path).to(task.device),
        recipe.input,
        batch_size=task.batch_size,
        device=task.device,
        headline=task.headline,
        size_bytes=folder_bytes(path),
        architecture=recipe.architecture,
        skeleton=load_skeleton(path),
        trace_path=trace,
        progress=desk.progress,
    )
    evidence, note = _evidence(task, desk, measured) if task.calibration else (None, None)
    complete = measured.model_copy(
        update={"trace": desk.ref(trace, "trace"), "evidence": evidence, "evidence_note": note}
    )
    out = desk.folder / "profile.json"
    out.write_text(complete.model_dump_json(indent=1), encoding="utf-8")
    return tasks.Profiled(
        profile=desk.ref(out, "profile"),
        params=complete.params,
        macs=complete.macs,
        latency_ms=complete.headline.latency.median_ms,
        peak_memory_bytes=complete.headline.peak_memory_bytes,
        forward_passes=complete.forward_passes,
    )


def _evidence(task: tasks.ProfileTask, desk: Desk, profiled: ModelProfile) -> tuple[Evidence | None, str | None]:
    """Return the evidence on the model's units, or why there is none."""
    assert task.calibration is not None, "evidence is gathered on calibration images"
    path = desk.path(task.model)
    model = load_module(path).to(task.device)
    read = partial(iter_batches, desk.path(task.calibration.file), load_processor(path), batch_size=task.batch_size)
    batch = random_batch(profiled.input, task.batch_size).to(task.device)
    try:
        table = time_units(model, profiled.units, batch, progress=desk.progress)
        evidence = measure_sensitivity(
            model,
            profiled.units,
            read,
            criterion=task.criterion,
            table=table,
            seed=task.seed,
            progress=desk.progress,
        )
    except PruningError as error:
        return None, str(error)
    return evidence, None


def prune(task: tasks.PruneTask, desk: Desk) -> PrunedModel:
    """Cut the units, pass the gates, compensate, save the candidate."""
    path = desk.path(task.baseline)
    model, recipe, processor = load_module(path), load_recipe(path), load_processor(path)
    read = partial(iter_batches, desk.path(task.calibration.file), processor, batch_size=task.batch_size)
    images, _ = next(read(batch_size=NUM_GATE_IMAGES))
    keep = {name: list(kept) for name, kept in task.keep.items()}
    pruned = prune_model(model, task.cuts, spec=recipe.input, seed=task.seed, images=images, keep=keep or None)
    made = None
    if task.compensate:
        made = compensate(model, pruned.model, task.cuts, pruned.keep, read, progress=desk.progress)
    return PrunedModel(
        model=keep_model(made.model if made else pruned.model, task.baseline, desk, cuts=task.cuts),
        cuts=task.cuts,
        mask_error=pruned.mask_error,
        kl=made.kl_after if made else None,
        kl_uncompensated=made.kl_before if made else None,
        compensation=made.steps if made else (),
        compensation_note=made.note if made else None,
    )


CATALOGUE: dict[type[tasks.Task[Any]], Callable[[Any, Desk], Record]] = {
    tasks.AcquireTask: acquire,
    tasks.SurveyShapeTask: survey_shape,
    tasks.ResolveShapeTask: resolve_shape,
    tasks.ProfileTask: profile,
    tasks.PruneTask: prune,
    tasks.RecoverTask: recover_job,
    tasks.TuneTask: tune_job,
    tasks.ExportTask: export_job,
    tasks.DeployTask: deploy_job,
    tasks.DeployApartTask: deploy_job,
    tasks.EvaluateTask: evaluate_job,
    tasks.EvaluateApartTask: evaluate_job,
    comparing.CompareTask: compare_job,
}
