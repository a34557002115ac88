"""Steps of the check of one model: load and prune it, deploy it, reopen the deployment; each in the caller's process."""

from collections import Counter
from pathlib import Path

import torch
from torch import nn

from profiling_agent.data.models import load_model
from profiling_agent.data.shape import check_processor, resolve_input_shape
from profiling_agent.errors import ArtifactError, PlanError, QuantizationError
from profiling_agent.jobs.tasks import CHECK_FOLDER, JobContext, LookTask, TryTask
from profiling_agent.lib.machine import available_threads
from profiling_agent.lib.modules import logits_of, relative_distance
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.artifact import check_golden, model_bytes, open_session, read_golden
from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.runtimes.registry import noise_batch
from profiling_agent.runtimes.torch_artifact import (
    load_module,
    load_recipe,
    read_source,
    save_deployed,
    save_derived,
    save_model,
)
from profiling_agent.schemas import Cut, Deployability, Deployment, Form, InputSpec, Prunable, by_cause

RATIO = 0.25
# Calibration images are noise: the check is whether a deployment can be made, not how accurate it is.
NUM_CALIBRATION, BATCH = 16, 8
WHOLE, PRUNED = "whole", "pruned"


def look(task: LookTask, job: JobContext) -> Prunable:
    """Read a model and lay it out; AcquisitionError and ShapeUnresolvedError where it can't be read."""
    loaded = load_model(task.model, revision=task.revision, progress=job.progress)
    check_processor(loaded.model, loaded.processor)
    spec = resolve_input_shape(loaded.model, loaded.processor)
    return lay_out(loaded.model, job.root / CHECK_FOLDER, spec=spec, processor=loaded.processor, name=task.model)


def try_deployment(task: TryTask, job: JobContext) -> Deployability:
    """Take one step towards a deployment; return how far it got, or why no further."""
    folder, row, threads = job.root / CHECK_FOLDER, task.row, available_threads()
    if task.step == "export":
        return row.model_copy(update={"refused": write_onnx(folder, row.form) or ""})
    if task.step == "make":
        return make(folder, row.form, row.deployment, num_threads=threads)
    return reopen(folder, row, num_threads=threads)


def lay_out(model: nn.Module, folder: Path, *, spec: InputSpec, processor: object, name: str) -> Prunable:
    """Save a classifier to `folder`/whole, and with a quarter cut off every unit to `folder`/pruned; return what can be cut.

    Without a unit there is no pruned one.
    """
    save_model(model, folder / WHOLE, spec=spec, processor=processor, base_model=name)
    result = find_units(model, spec, {})
    quartered = [Cut(unit=unit, keep=snap(unit, RATIO), requested_ratio=RATIO) for unit in result.units]
    cuts = [cut for cut in quartered if cut.keep < cut.unit.width]
    params = num_left = sum(parameter.numel() for parameter in model.parameters())
    if cuts:
        pruned = prune_model(model, cuts, spec=spec).model
        num_left = sum(parameter.numel() for parameter in pruned.parameters())
        save_derived(pruned, folder / WHOLE, folder / PRUNED, cuts=cuts)
    refusals = by_cause(result.refusals)
    return Prunable(
        architecture=type(model).__name__,
        input=spec,
        params=params,
        units=Counter(unit.kind.value for unit in result.units),
        refused={code: len(layers) for code, layers in refusals.items()},
        absent=result.absent,
        examples={code: layers[0] for code, layers in refusals.items()},
        cut_share=1 - num_left / params,
    )


def write_onnx(folder: Path, form: Form) -> str | None:
    """Export a form to ONNX, from which runtimes convert; return the error, or None."""
    try:
        export_onnx(load_module(folder / form), folder / f"{form}.onnx", spec=load_recipe(folder / form).input)
    except ArtifactError as error:
        return f"export: {error}"
    return None


def make(folder: Path, form: Form, deployment: Deployment, *, num_threads: int | None = None) -> Deployability:
    """Make a deployment of a form, in a folder next to it; return its distance on the golden images, or the error."""
    row = Deployability(form=form, deployment=deployment)
    model, onnx = folder / form, folder / f"{form}.onnx"
    calibration = noise_batch(load_recipe(model).input, NUM_CALIBRATION, seed=1)
    source = read_source(model, calibration, batch_size=BATCH, onnx=onnx if onnx.is_file() else None)
    target = deployment_folder(folder, form, deployment)
    try:
        recipe = save_deployed(source, deployment, target, num_threads=num_threads)
        # The logits from when it was saved: opening it here would compile it once more, and another process reopens it.
        images, logits = read_golden(target)
    except (ArtifactError, PlanError, QuantizationError) as error:
        return row.model_copy(update={"refused": f"conversion: {error}"})
    expected = logits_of(source.module, torch.from_numpy(images))
    return row.model_copy(
        update={
            "num_layers": len(recipe.quantized),
            "size_ratio": model_bytes(target) / model_bytes(folder / WHOLE),
            "distance": relative_distance(torch.from_numpy(logits), expected),
        }
    )


def reopen(folder: Path, row: Deployability, *, num_threads: int | None = None) -> Deployability:
    """Reopen a deployment in another process than made it, and check its golden logits; return the row, or the error in it."""
    target = deployment_folder(folder, row.form, row.deployment)
    try:
        check_golden(open_session(target, num_threads=num_threads).run, target, load_recipe(target))
    except ArtifactError as error:
        return row.model_copy(update={"refused": f"reopening: {error}"})
    return row


def deployment_folder(folder: Path, form: Form, deployment: Deployment) -> Path:
    """Return the folder of a form's deployment."""
    return folder / f"{form}-{deployment.runtime}-{deployment.scheme}"
