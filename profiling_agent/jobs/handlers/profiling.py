"""Profile of a saved model: cost of each layer, and the evidence on its units."""

from functools import partial
from pathlib import Path

from profiling_agent.acquisition.prepared import iter_batches
from profiling_agent.artifacts.folder import model_bytes, processor_text
from profiling_agent.artifacts.load import load_module, load_recipe, load_skeleton
from profiling_agent.benchmarking.latency_table import LatencyTable, read_table, time_units, write_table
from profiling_agent.cache import kept_folder
from profiling_agent.documents import DocumentError, read_record
from profiling_agent.errors import ArtifactError, PruningError
from profiling_agent.files import write_text
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.tasks import EvidenceTask, Profiled, ProfileTask
from profiling_agent.modules.inference import on_device, random_batch
from profiling_agent.modules.products import quick_products
from profiling_agent.profiling.kept_evidence import evidence_path, keep_evidence, read_evidence
from profiling_agent.profiling.profile import profile_model
from profiling_agent.profiling.sensitivity import measure_sensitivity, timed
from profiling_agent.records import Evidence, ModelProfile
from profiling_agent.reproducibility import environment

PROFILE, WIDTHS = "profile.json", "widths.json"


def profile(task: ProfileTask, job: JobContext) -> Profiled:
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
        write_table(job.folder / WIDTHS, time_units(model, measured.units, batch, progress=job.progress))
    return _kept_profile(measured.model_copy(update={"trace": job.ref(trace, "trace")}), job)


def add_evidence(task: EvidenceTask, job: JobContext) -> Profiled:
    """Write the profile again, with the evidence on the model's units, or why there is none."""
    (folder,) = job.folders("profile")
    try:
        profiled = read_record(ModelProfile, folder / PROFILE)
    except (OSError, DocumentError) as error:
        raise ArtifactError(f"{str(folder / PROFILE)!r} is no profile ({error}): run again") from error
    evidence, note = _evidence(task, job, profiled, read_table(folder / WIDTHS))
    return _kept_profile(profiled.model_copy(update={"evidence": evidence, "evidence_note": note}), job)


def _kept_profile(profiled: ModelProfile, job: JobContext) -> Profiled:
    out = job.folder / PROFILE
    write_text(out, profiled.model_dump_json(indent=1))
    return Profiled(
        profile=job.ref(out, "profile"),
        params=profiled.params,
        macs=profiled.macs,
        latency_ms=profiled.headline.latency.median_ms,
        peak_memory_bytes=profiled.headline.peak_memory_bytes,
        forward_passes=profiled.forward_passes,
    )


def _evidence(
    task: EvidenceTask, job: JobContext, profiled: ModelProfile, table: LatencyTable
) -> tuple[Evidence | None, str | None]:
    """Return the evidence on the model's units, or why there is none."""
    path = job.path(task.model)
    kept = _kept(task, path) if task.cache else None
    if kept is not None and (known := read_evidence(kept, profiled.units)) is not None:
        job.progress("evidence of an earlier run is used", 0, 0)
        # Its KLs; what units take was timed anew, and a machine that is never quiet keeps evidence too.
        return timed(known, profiled.units, table), None
    model = on_device(load_module(path), task.device)
    read = partial(iter_batches, job.images("calibration"), batch_size=task.batch_size)
    try:
        with quick_products():
            evidence = measure_sensitivity(
                model,
                profiled.units,
                read,
                criterion=task.criterion,
                table=table,
                seed=task.seed,
                progress=job.progress,
            )
    except PruningError as error:
        return None, str(error)
    if kept is not None:
        keep_evidence(kept, evidence)
    return evidence, None


def _kept(task: EvidenceTask, model: Path) -> Path | None:
    """Return where evidence is kept that depends on the same: model, images, what was asked for, code and machine; None without a cache folder."""
    if (folder := kept_folder("evidence")) is None:
        return None
    images = task.calibration
    depends_on = {
        "model": task.model.sha256,
        "images": [images.file.sha256, images.num_images, processor_text(model)],
        "asked": [task.batch_size, task.device, task.criterion, task.seed],
        "environment": environment(task.device).model_dump(mode="json", exclude={"runtimes"}),
    }
    return evidence_path(folder, depends_on)
