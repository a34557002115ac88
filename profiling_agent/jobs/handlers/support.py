"""Steps of a look at a model: read it and cut it, bring it into a deployment, open that again; each in whoever's process."""

from collections import Counter
from pathlib import Path

import numpy as np
import torch
from torch import nn

from profiling_agent.data.models import load_model
from profiling_agent.data.shape import check_processor, resolve_input_shape
from profiling_agent.errors import ArtifactError, PlanError, QuantizationError
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.tasks import LOOKED, LookTask, TryTask
from profiling_agent.lib.machine import available_threads
from profiling_agent.modules.inference import logits_of, relative_distance
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.artifact import check_golden, model_bytes, read_golden
from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.runtimes.registry import Source, noise_batch, open_session
from profiling_agent.runtimes.save import save_deployed
from profiling_agent.runtimes.torch_artifact import load_module, load_processor, load_recipe, save_derived, save_model
from profiling_agent.schemas import Cut, Deployability, Deployment, Form, InputSpec, Prunable, by_cause

RATIO = 0.25
# Ranges are of noise here: what is asked is whether a deployment can be made, not how good it is.
NUM_CALIBRATION, BATCH = 16, 8
WHOLE, PRUNED = "whole", "pruned"


def look(task: LookTask, job: JobContext) -> Prunable:
    """Read a model and lay it out; AcquisitionError and ShapeUnresolvedError where it can't be read."""
    loaded = load_model(task.model, revision=task.revision, progress=job.progress)
    check_processor(loaded.model, loaded.processor)
    spec = resolve_input_shape(loaded.model, loaded.processor)
    return lay_out(loaded.model, job.root / LOOKED, spec=spec, processor=loaded.processor, name=task.model)


def attempt(task: TryTask, job: JobContext) -> Deployability:
    """Take one step towards a deployment; return how far it got, or why no further."""
    folder, row, threads = job.root / LOOKED, task.row, available_threads()
    if task.step == "export":
        return row.model_copy(update={"refused": write_onnx(folder, row.form) or ""})
    if task.step == "make":
        return make(folder, row.form, row.deployment, num_threads=threads)
    return reopen(folder, row, num_threads=threads)


def lay_out(model: nn.Module, folder: Path, *, spec: InputSpec, processor: object, name: str) -> Prunable:
    """Write a classifier to `folder`/whole, and with a quarter off every unit to `folder`/pruned; return what can be cut of it.

    Without a unit there is no pruned one.
    """
    save_model(model, folder / WHOLE, spec=spec, processor=processor, base_model=name)
    found = find_units(model, spec, {})
    snapped = [Cut(unit=unit, keep=snap(unit, RATIO), requested_ratio=RATIO) for unit in found.units]
    cuts = [cut for cut in snapped if cut.keep < cut.unit.width]
    params = left = sum(parameter.numel() for parameter in model.parameters())
    if cuts:
        cut = prune_model(model, cuts, spec=spec).model
        left = sum(parameter.numel() for parameter in cut.parameters())
        save_derived(cut, folder / WHOLE, folder / PRUNED, cuts=cuts)
    refusals = by_cause(found.refusals)
    return Prunable(
        architecture=type(model).__name__,
        input=spec,
        params=params,
        units=Counter(unit.kind.value for unit in found.units),
        refused={code: len(layers) for code, layers in refusals.items()},
        absent=found.absent,
        examples={code: layers[0] for code, layers in refusals.items()},
        cut_share=1 - left / params,
    )


def write_onnx(folder: Path, form: Form) -> str | None:
    """Write the ONNX file of a form, of which runtimes make theirs; return why there is none."""
    try:
        export_onnx(load_module(folder / form), folder / f"{form}.onnx", spec=load_recipe(folder / form).input)
    except ArtifactError as error:
        return f"export: {error}"
    return None


def make(folder: Path, form: Form, deployment: Deployment, *, num_threads: int | None = None) -> Deployability:
    """Bring a form into a deployment, in a folder beside it; return how far its logits on the golden images are, or why it can't be."""
    told = Deployability(form=form, deployment=deployment)
    source, onnx = folder / form, folder / f"{form}.onnx"
    module, base = load_module(source), load_recipe(source)
    given = Source(
        module=module,
        recipe=base,
        processor=load_processor(source),
        calibration=noise_batch(base.input, NUM_CALIBRATION, seed=1),
        batch_size=BATCH,
        onnx=onnx if onnx.is_file() else None,
    )
    made = made_folder(folder, form, deployment)
    try:
        recipe = save_deployed(given, deployment, made, num_threads=num_threads)
        # What it said when it was saved: opening it once more, which another process does, would compile it once more.
        golden = read_golden(made)
    except (ArtifactError, PlanError, QuantizationError) as error:
        return told.model_copy(update={"refused": f"conversion: {error}"})
    expected = logits_of(module, torch.from_numpy(golden.pixel_values.astype(np.float32)))
    return told.model_copy(
        update={
            "num_layers": len(recipe.quantized),
            "size_ratio": model_bytes(made) / model_bytes(folder / WHOLE),
            "distance": relative_distance(torch.from_numpy(golden.logits), expected),
        }
    )


def reopen(folder: Path, told: Deployability, *, num_threads: int | None = None) -> Deployability:
    """Open a deployment in this process, which has not made it, and compare it with what its maker saw; return it, or why not."""
    made = made_folder(folder, told.form, told.deployment)
    try:
        check_golden(open_session(made, num_threads=num_threads).run, made, load_recipe(made))
    except ArtifactError as error:
        return told.model_copy(update={"refused": f"reopening: {error}"})
    return told


def made_folder(folder: Path, form: Form, deployment: Deployment) -> Path:
    """Return where a deployment of a form lies."""
    return folder / f"{form}-{deployment.runtime}-{deployment.scheme}"
