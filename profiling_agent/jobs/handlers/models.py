"""Handlers that make models: acquisition, images, reference logits, profiles, pruning, recovery, tuning, export, deployment."""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor, nn

from profiling_agent.data.dataset import DataQuery
from profiling_agent.data.images import SplitImages, relabel_split
from profiling_agent.data.labels import choose_matching
from profiling_agent.data.models import LoadedModel, device_note, load_model, resolve_device
from profiling_agent.data.prepared import iter_batches, processed_batches, shuffled_batches, write_prepared
from profiling_agent.data.shape import check_processor, resolve_input_shape, survey, verify
from profiling_agent.data.splits import DrawnSplit, DrawnSplits, draw_splits, look_up_labels
from profiling_agent.errors import AcquisitionError, PruningError, QuantizationError, RequestError
from profiling_agent.jobs import tasks
from profiling_agent.jobs.tasks import (
    JobContext,
)
from profiling_agent.lib.costs import count_complexity
from profiling_agent.lib.inference import fuse_norms_, quick_products
from profiling_agent.lib.io import cache_subfolder, read_record, write_bytes, write_text
from profiling_agent.lib.machine import available_threads, environment
from profiling_agent.lib.modules import device_of, logits_of, mean_kl, on_device, random_batch, relative_distance
from profiling_agent.measure.latency_table import LatencyTable, time_units
from profiling_agent.measure.predictions import answers_of
from profiling_agent.profiling.evidence import (
    evidence_path,
    measure_sensitivity,
    read_evidence,
    store_evidence,
    with_latencies,
)
from profiling_agent.profiling.profile import profile_model
from profiling_agent.pruning import compensation
from profiling_agent.pruning.compensation import Calibration, compensate
from profiling_agent.pruning.prune import NUM_GATE_IMAGES, prune_model
from profiling_agent.quantization import sensitivity
from profiling_agent.runtimes.artifact import PROCESSOR, check_golden, model_bytes, open_session, processor_text
from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.runtimes.registry import Batch, ModelSession, Source
from profiling_agent.runtimes.torch_artifact import (
    load_module,
    load_processor,
    load_recipe,
    load_skeleton,
    read_source,
    save_deployed,
    save_derived,
    save_model,
)
from profiling_agent.schemas import (
    Acquired,
    ArtifactRef,
    Cut,
    DeployedModel,
    Evidence,
    ModelProfile,
    ModelSource,
    PrunedModel,
    RecoveredModel,
    ShapeFacts,
    SplitInfo,
    Tuned,
)

LOGITS_FILE, LOGITS = "logits.safetensors", "logits"


def compute_logits(task: tasks.LogitsTask, job: JobContext) -> tasks.SavedLogits:
    """Run the model over the images and write down its logits."""
    model = on_device(load_module(job.path(task.model)), task.device)
    read_batches = partial(iter_batches, job.images("images"), batch_size=task.batch_size, limit=task.num_images)
    images = Calibration(batches=read_batches, device=device_of(model), dtype=next(model.parameters()).dtype)
    if task.device == "cpu":
        fuse_norms_(model.eval(), next(images.every())[:2])
    with quick_products():
        logits = [logits_of(model, batch).float() for batch in (images.judged() if task.judged else images.every())]
    # Fewer than 32 images hold none that judge; the comparison then uses all.
    if not logits and not task.judged:
        raise RequestError("there are 0 images to ask a model about: raise num_samples")
    stacked = torch.cat(logits).cpu() if logits else torch.empty(0, 0)
    write_bytes(job.folder / LOGITS_FILE, save({LOGITS: stacked}))
    return tasks.SavedLogits(num_images=len(stacked))


def given_logits(job: JobContext) -> Tensor | None:
    """Return the reference logits, float32 (images, classes), that a job's task needs; None if it needs none."""
    folders: list[Path] = job.folders("logits")
    return load_file(folders[0] / LOGITS_FILE)[LOGITS] if folders else None


def acquire(task: tasks.AcquireTask, job: JobContext) -> Acquired:
    """Check the model, draw the images."""
    device, note = resolve_device(task.device), device_note(task.device, has_cuda=torch.cuda.is_available())
    if note:
        job.progress(note, 0, 0)
    loaded = load_model(task.model, revision=task.revision, device=device, progress=job.progress)
    check_processor(loaded.model, loaded.processor)
    query = task.model_dump(include=set(DataQuery.model_fields))
    config: Any = loaded.model.config
    drawn = draw_splits(DataQuery(**query), id2label=config.id2label, folder=job.folder, progress=job.progress)
    drawn = _choose_labels(drawn, loaded, job)
    if len(classes := np.unique(SplitImages(drawn.search.path).labels)) < 2:
        raise AcquisitionError(
            f"all {drawn.search.num_images} images to search on are of one class ({config.id2label[int(classes[0])]!r}), so that no loss of "
            "accuracy would show: give a split of several classes; in folders of images, each class has its own"
        )
    notes = (*drawn.notes, *([loaded.note] if loaded.note else []))
    for text in notes:
        job.progress(text, 0, 0)

    def split_info(name: Any, split: DrawnSplit) -> SplitInfo:
        return SplitInfo(
            name=name,
            source_split=split.source_split,
            num_images=split.num_images,
            num_skipped=split.num_skipped,
            file=job.ref(split.path, "split"),
        )

    return Acquired(
        source=ModelSource(
            name=loaded.source,
            revision=loaded.revision,
            architecture=loaded.architecture,
            device=device,
        ),
        calibration=split_info("calibration", drawn.calibration),
        search=split_info("search", drawn.search),
        heldout=split_info("heldout", drawn.heldout),
        recovery=split_info("recovery", drawn.recovery) if drawn.recovery else None,
        labels=drawn.labels,
        notes=(*notes, *([note] if note else [])),
    )


def _choose_labels(drawn: DrawnSplits, loaded: LoadedModel, job: JobContext) -> DrawnSplits:
    """Label the images by the matching that fits the model's predictions on the calibration images.

    Raises:
        AcquisitionError: the predictions don't decide between matchings.
    """
    if len(drawn.matchings) == 1:
        return drawn
    job.progress(f"labels fit in {len(drawn.matchings)} ways, of which the model's answers choose one", 0, 0)
    split = SplitImages(drawn.calibration.path)
    device = next(loaded.model.parameters()).device
    with torch.inference_mode():
        logits = [
            loaded.model(pixel_values=torch.from_numpy(pixels).to(device)).logits.cpu().numpy()
            for pixels in processed_batches(split, range(len(split)), loaded.processor)
        ]
    predicted = answers_of(np.concatenate(logits), split.labels).predicted
    chosen, note = choose_matching(drawn.matchings, predicted, split.labels)
    if chosen != drawn.matchings[0]:
        for part in filter(None, (drawn.calibration, drawn.search, drawn.heldout, drawn.recovery)):
            relabel_split(part.path, drawn.matchings[0].becomes(chosen))
    return replace(drawn, matchings=(chosen,), notes=(note, *drawn.notes))


def match_labels(task: tasks.MatchLabelsTask, job: JobContext) -> tasks.MatchedLabels:
    """Open the model and the data set, and match their classes."""
    loaded = load_model(task.model, revision=task.revision, device="cpu", progress=job.progress)
    check_processor(loaded.model, loaded.processor)
    query = task.model_dump(include=set(DataQuery.model_fields))
    config: Any = loaded.model.config
    split, matches = look_up_labels(DataQuery(**query), id2label=config.id2label, progress=job.progress)
    return tasks.MatchedLabels(split=split, labels=matches, num_classes=len(config.id2label))


def survey_shape(task: tasks.SurveyShapeTask, job: JobContext) -> ShapeFacts:
    """Gather what is known of the input shape."""
    device = resolve_device(task.device)
    loaded = load_model(task.model, revision=task.revision, device=device, progress=job.progress)
    return survey(loaded.model, loaded.processor)


def resolve_shape(task: tasks.ResolveShapeTask, job: JobContext) -> tasks.ResolvedShape:
    """Find the input shape; save the baseline with it."""
    device = resolve_device(task.device)
    loaded = load_model(task.model, revision=task.revision, device=device, progress=job.progress)
    spec = task.stated or resolve_input_shape(loaded.model, loaded.processor)
    if task.stated is not None:
        verify(loaded.model, spec)
    folder = job.folder / "model"
    save_model(
        loaded.model.cpu(),
        folder,
        spec=spec,
        processor=loaded.processor,
        base_model=task.model,
        base_revision=loaded.revision,
    )
    return tasks.ResolvedShape(input=spec, baseline=job.ref(folder, "model"), device=device)


PROFILE, WIDTHS = "profile.json", "widths.json"


def profile(task: tasks.ProfileTask, job: JobContext) -> tasks.Profiled:
    """Profile the model; write profile.json and the chrome trace, and the latency table where it is asked for."""
    path = job.path(task.model)
    model, recipe = on_device(load_module(path), task.device), load_recipe(path)
    trace = job.folder / "trace.json.gz"
    measured = profile_model(
        model,
        recipe.input,
        batch_size=task.batch_size,
        device=task.device,
        headline=task.headline,
        size_bytes=model_bytes(path),
        architecture=recipe.architecture,
        skeleton=load_skeleton(path),
        trace_path=trace,
        progress=job.progress,
    )
    if task.times_widths:
        batch = random_batch(measured.input, task.batch_size).to(task.device)
        table = time_units(model, measured.units, batch, progress=job.progress)
        write_text(job.folder / WIDTHS, table.model_dump_json())
    return _save_profile(measured.model_copy(update={"trace": job.ref(trace, "trace")}), job)


def add_evidence(task: tasks.EvidenceTask, job: JobContext) -> tasks.Profiled:
    """Write the profile again, with the evidence on the model's units, or why there is none."""
    (folder,) = job.folders("profile")
    profiled = read_record(ModelProfile, folder / PROFILE)
    evidence, note = _measure_evidence(task, job, profiled, read_record(LatencyTable, folder / WIDTHS))
    return _save_profile(profiled.model_copy(update={"evidence": evidence, "evidence_note": note}), job)


def _save_profile(profiled: ModelProfile, job: JobContext) -> tasks.Profiled:
    out = job.folder / PROFILE
    write_text(out, profiled.model_dump_json(indent=1))
    return tasks.Profiled(
        profile=job.ref(out, "profile"),
        params=profiled.params,
        macs=profiled.macs,
        latency_ms=profiled.headline.latency.median_ms,
        peak_memory_bytes=profiled.headline.peak_memory_bytes,
        forward_passes=profiled.forward_passes,
    )


def _measure_evidence(
    task: tasks.EvidenceTask, job: JobContext, profiled: ModelProfile, table: LatencyTable
) -> tuple[Evidence | None, str | None]:
    """Return the evidence on the model's units, or None and the reason."""
    path = job.path(task.model)
    cache_path = _evidence_cache_path(task, path) if task.cache else None
    if cache_path is not None and (cached := read_evidence(cache_path)) is not None:
        job.progress("evidence of an earlier run is used", 0, 0)
        # Only its KLs: units were timed again, so that evidence from a busy machine can be cached too.
        return with_latencies(cached, profiled.units, table), None
    model = on_device(load_module(path), task.device)
    read_batches = partial(iter_batches, job.images("calibration"), batch_size=task.batch_size)
    try:
        with quick_products():
            evidence = measure_sensitivity(
                model,
                profiled.units,
                read_batches,
                table=table,
                seed=task.seed,
                progress=job.progress,
            )
    except PruningError as error:
        return None, str(error)
    if cache_path is not None:
        store_evidence(cache_path, evidence)
    return evidence, None


def _evidence_cache_path(task: tasks.EvidenceTask, model: Path) -> Path | None:
    """Return the cache path for this model, images, request, code and machine; None without a cache folder."""
    if (folder := cache_subfolder("evidence")) is None:
        return None
    images = task.calibration
    depends_on = {
        "model": task.model.sha256,
        "images": [images.file.sha256, images.num_images, processor_text(model)],
        "asked": [task.batch_size, task.device, task.seed],
        "environment": environment(task.device).model_dump(mode="json", exclude={"runtimes"}),
    }
    return evidence_path(folder, depends_on)


def prune(task: tasks.PruneTask, job: JobContext) -> PrunedModel:
    """Cut the units, pass the gates, compensate, save the candidate."""
    path = job.path(task.baseline)
    model, recipe = on_device(load_module(path), task.device), load_recipe(path)
    read_batches = partial(iter_batches, job.images("calibration"), batch_size=task.batch_size)
    images, _ = next(read_batches(batch_size=NUM_GATE_IMAGES))
    keep = {name: list(indices) for name, indices in task.keep.items()}
    pruned = prune_model(model, task.cuts, spec=recipe.input, seed=task.seed, images=images, keep=keep or None)
    compensated = None
    if task.compensate:
        expected = given_logits(job)
        with quick_products():
            compensated = compensate(
                model, pruned.model, task.cuts, pruned.keep, read_batches, expected=expected, progress=job.progress
            )
    return PrunedModel(
        model=save_and_reload(
            (compensated.model if compensated else pruned.model).cpu(), task.baseline, job, cuts=task.cuts
        ),
        cuts=task.cuts,
        mask_error=pruned.mask_error,
        kl=compensated.kl_after if compensated else None,
        kl_uncompensated=compensated.kl_before if compensated else None,
        compensation=compensated.steps if compensated else (),
        compensation_note=compensated.note if compensated else None,
    )


def recover(task: tasks.RecoverTask, job: JobContext) -> RecoveredModel:
    """Recover, judged on the images that compensation wasn't fitted to; save what was recovered."""
    dense, pruned = (on_device(load_module(job.path(ref)), task.device) for ref in (task.baseline, task.model))
    calibration = Calibration(
        batches=partial(iter_batches, job.images("calibration"), batch_size=task.batch_size),
        device=device_of(dense),
        dtype=next(dense.parameters()).dtype,
    )
    with quick_products():
        recovered = compensation.recover(
            dense,
            pruned,
            shuffled_batches(job.images("recovery"), batch_size=task.batch_size, seed=task.seed),
            calibration.judged,
            epochs=task.epochs,
            expected=given_logits(job),
            progress=job.progress,
        )
    model = task.model if recovered.model is pruned else save_and_reload(recovered.model.cpu(), task.model, job)
    return RecoveredModel(
        model=model,
        epochs_run=recovered.epochs_run,
        kl_before=recovered.kl_before,
        kl_after=recovered.kl_after,
        stopped=recovered.stopped,
    )


def save_and_reload(
    model: nn.Module, source: ArtifactRef, job: JobContext, *, cuts: Sequence[Cut] | None = None
) -> ArtifactRef:
    """Save `model`, derived from the saved model `source`, and return its reference; `cuts` default to the source's.

    It is reloaded once: a model that doesn't load as it was saved is never returned.

    Raises:
        ArtifactError: it doesn't load as saved, or `source` is damaged.
    """
    folder = job.folder / "model"
    save_derived(model, job.path(source), folder, cuts=cuts)
    load_module(folder)
    return job.ref(folder, "model")


# Images: activation ranges and NNCF's statistics settle well before; more only take longer.
MAX_CALIBRATION = 128


def tune(task: tasks.TuneTask, job: JobContext) -> Tuned:
    """Measure what int8 costs the model, and each of its layers."""
    started = time.perf_counter()
    model = load_module(job.path(task.model))
    images = (pixel_values for pixel_values, _ in iter_batches(job.images("calibration"), batch_size=task.batch_size))
    with quick_products():
        kl, layers, num_images = sensitivity.measure_costs(
            model, images, task.scheme, task.latency_shares, progress=job.progress
        )
    return Tuned(layers=layers, kl=kl, num_images=num_images, seconds=time.perf_counter() - started)


def export(task: tasks.ExportTask, job: JobContext) -> tasks.Exported:
    """Write a float32 model as ONNX."""
    source, path = job.path(task.model), job.folder / "model.onnx"
    distance = export_onnx(load_module(source), path, spec=load_recipe(source).input)
    return tasks.Exported(onnx=job.ref(path, "onnx"), distance=distance)


def deploy(task: tasks.DeployTask, job: JobContext) -> DeployedModel:
    """Bring a float32 model into a deployment, save it, open it again, and see how far it is from its parent."""
    calibration = job.images("calibration").batches(task.batch_size, limit=MAX_CALIBRATION)
    images = [pixel_values for pixel_values, _ in calibration]
    if not images:
        raise QuantizationError("there are 0 calibration images: raise num_samples")
    onnx = job.path(task.onnx) if task.onnx else None
    source = read_source(
        job.path(task.model), np.concatenate(images), batch_size=task.batch_size, onnx=onnx, device=task.device
    )
    folder, expected = job.folder / "model", given_logits(job)
    assert expected is not None, "where there are calibration images, the float32 model was asked about them"
    num_threads = available_threads()
    job.progress(f"converting to {task.deployment.name}", 0, 0)
    started = time.perf_counter()
    complexity = complexity_of(job.path(task.model))
    recipe = save_deployed(source, task.deployment, folder, complexity=complexity, num_threads=num_threads)
    seconds = time.perf_counter() - started
    session = open_session(folder, device=task.device, num_threads=num_threads)
    distance, kl = _compare(session, source, expected)
    check_golden(session.run, folder, recipe)
    return DeployedModel(
        model=job.ref(folder, "model"),
        deployment=task.deployment,
        layers=tuple(layer.name for layer in recipe.quantized),
        distance=distance,
        kl=kl,
        seconds=seconds,
    )


def complexity_of(path: Path) -> tuple[int, int]:
    """Return params and MACs of one image, counted on a saved model that torch can read."""
    rows = count_complexity(load_skeleton(path), load_recipe(path).input).values()
    return sum(row.params for row in rows), sum(row.macs for row in rows)


def _compare(session: ModelSession, source: Source, expected: Tensor) -> tuple[float, float]:
    """Return the relative distance and the KL divergence, nats, to `expected`: float32 logits of the first calibration images."""
    compared: Batch = source.calibration[: len(expected)]
    batches = [
        torch.from_numpy(session.run(compared[index : index + source.batch_size]))
        for index in range(0, len(compared), source.batch_size)
    ]
    logits, reference = torch.cat(batches).double(), expected.double()
    if not logits.isfinite().all():
        raise QuantizationError("on calibration images the logits aren't finite in this deployment: leave it out")
    # Rounding makes it slightly negative if both are equal.
    return relative_distance(logits, reference), max(0.0, mean_kl(reference, logits))


def prepare(task: tasks.PrepareTask, job: JobContext) -> tasks.Prepared:
    """Write what the processor makes of the shard's images, and the processor beside it."""
    split, rows = SplitImages(job.path(task.split.file)), task.split.rows(task.shard)
    write_text(job.folder / PROCESSOR, task.processor)
    shape, dtype = write_prepared(job.folder, split, rows, load_processor(job.folder), progress=job.progress)
    return tasks.Prepared(shape=shape, dtype=dtype)
