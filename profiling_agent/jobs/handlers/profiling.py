"""Profile of a saved model: cost of each layer, and the evidence on its units."""

from functools import partial
from pathlib import Path

from profiling_agent.acquisition.batches import iter_batches
from profiling_agent.artifacts.folder import folder_bytes, processor_text
from profiling_agent.artifacts.load import load_module, load_recipe, load_skeleton
from profiling_agent.benchmarking.latency_table import time_units
from profiling_agent.cache import cache_folder
from profiling_agent.errors import PruningError
from profiling_agent.files import write_text
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.tasks import Profiled, ProfileTask
from profiling_agent.modules.inference import on_device, random_batch
from profiling_agent.profiling.kept_evidence import evidence_path, keep_evidence, read_evidence
from profiling_agent.profiling.profile import profile_model
from profiling_agent.profiling.sensitivity import measure_sensitivity
from profiling_agent.records import Evidence, ModelProfile
from profiling_agent.reproducibility import environment


def profile(task: ProfileTask, job: JobContext) -> Profiled:
    """Profile the model; write profile.json and the chrome trace."""
    path = job.path(task.model)
    recipe = load_recipe(path)
    trace = job.folder / "trace.json.gz"
    measured = profile_model(
        on_device(load_module(path), task.device),
        recipe.input,
        batch_size=task.batch_size,
        device=task.device,
        headline=task.headline,
        size_bytes=folder_bytes(path),
        architecture=recipe.architecture,
        skeleton=load_skeleton(path),
        trace_path=trace,
        progress=job.progress,
    )
    evidence, note = _evidence(task, job, measured) if task.calibration else (None, None)
    complete = measured.model_copy(
        update={"trace": job.ref(trace, "trace"), "evidence": evidence, "evidence_note": note}
    )
    out = job.folder / "profile.json"
    write_text(out, complete.model_dump_json(indent=1))
    return Profiled(
        profile=job.ref(out, "profile"),
        params=complete.params,
        macs=complete.macs,
        latency_ms=complete.headline.latency.median_ms,
        peak_memory_bytes=complete.headline.peak_memory_bytes,
        forward_passes=complete.forward_passes,
    )


def _evidence(task: ProfileTask, job: JobContext, profiled: ModelProfile) -> tuple[Evidence | None, str | None]:
    """Return the evidence on the model's units, or why there is none."""
    assert task.calibration is not None, "evidence is gathered on calibration images"
    path = job.path(task.model)
    kept = _kept(task, path) if task.cache else None
    if kept is not None and (known := read_evidence(kept, profiled.units)) is not None:
        job.progress("evidence of an earlier run is used", 0, 0)
        return known, None
    model = on_device(load_module(path), task.device)
    read = partial(iter_batches, job.images("calibration"), batch_size=task.batch_size)
    batch = random_batch(profiled.input, task.batch_size).to(task.device)
    try:
        table = time_units(model, profiled.units, batch, progress=job.progress)
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


def _kept(task: ProfileTask, model: Path) -> Path:
    """Return where evidence is kept that depends on the same: model, images, what was asked for, code and machine."""
    assert task.calibration is not None, "evidence is gathered on calibration images"
    images = task.calibration
    depends_on = {
        "model": task.model.sha256,
        "images": [images.file.sha256, images.num_images, processor_text(model)],
        "asked": [task.batch_size, task.device, task.criterion, task.seed],
        "environment": environment(task.device).model_dump(mode="json", exclude={"runtimes"}),
    }
    return evidence_path(cache_folder() / "evidence", depends_on)
