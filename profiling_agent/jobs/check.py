"""Checks without a run: of one model, what can be cut and deployed; of a runtime and of a device, with a tiny model.

Each step is a job in a child process, as a runtime or driver that was built for other hardware may crash it.
"""

import io
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from PIL import Image
from safetensors.numpy import load_file

from profiling_agent import schemas
from profiling_agent.data.images import write_rows
from profiling_agent.errors import ArtifactError, JobError, PlanError, ProfilingAgentError, QuantizationError
from profiling_agent.jobs.base import HOUR, LOGITS, LOGITS_FILE, JobContext, Task
from profiling_agent.jobs.runner import Jobs, job_key, profile_artifact, read_profile
from profiling_agent.jobs.tasks import DeployTask, ExportTask, HeadlineTask, LogitsTask, ModelTask, PruneTask
from profiling_agent.lib.machine import available_threads
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.artifact import check_golden, load_recipe, model_bytes, open_session, read_golden
from profiling_agent.runtimes.registry import noise_batch, reads_onnx, runtime

if TYPE_CHECKING:
    from torch import nn

# Work folder of the jobs that check one model.
CHECK_FOLDER = "checked"
WHOLE, PRUNED = "whole", "pruned"
# Calibration images are noise: the check is whether a deployment can be made, not how accurate it is.
NUM_CALIBRATION, BATCH = 16, 8


def cuts_of(units: Sequence[schemas.Unit], ratio: float) -> tuple[schemas.Cut, ...]:
    """Return a cut of about this share off every unit that can be cut so far."""
    cuts = [schemas.Cut(unit=unit, keep=snap(unit, ratio), requested_ratio=ratio) for unit in units]
    return tuple(cut for cut in cuts if cut.keep < cut.unit.width)


def lay_out(
    model: "nn.Module", folder: Path, *, spec: schemas.InputSpec, processor: object, name: str
) -> schemas.Prunable:
    """Save a classifier to `folder`/whole, and with a quarter cut off every unit to `folder`/pruned; return what can be cut.

    Without a unit there is no pruned one.
    """
    from profiling_agent.pruning.prune import prune_model
    from profiling_agent.pruning.units import find_units
    from profiling_agent.runtimes.torch_artifact import save_derived, save_model

    save_model(model, folder / WHOLE, spec=spec, processor=processor, base_model=name)
    result = find_units(model, spec, {})
    params = num_left = sum(parameter.numel() for parameter in model.parameters())
    if cuts := cuts_of(result.units, 0.25):
        pruned = prune_model(model, cuts, spec=spec).model
        num_left = sum(parameter.numel() for parameter in pruned.parameters())
        save_derived(pruned, folder / WHOLE, folder / PRUNED, cuts=cuts)
    refusals = schemas.by_cause(result.refusals)
    return schemas.Prunable(
        architecture=type(model).__name__,
        input=spec,
        params=params,
        units=Counter(unit.kind.value for unit in result.units),
        refused={code: len(layers) for code, layers in refusals.items()},
        absent=result.absent,
        examples={code: layers[0] for code, layers in refusals.items()},
        cut_share=1 - num_left / params,
    )


def write_onnx(folder: Path, form: schemas.Form) -> str:
    """Export a form to ONNX, from which runtimes convert; return the error, or an empty string."""
    from profiling_agent.runtimes.onnx_export import export_onnx
    from profiling_agent.runtimes.torch_artifact import load_module

    try:
        export_onnx(load_module(folder / form), folder / f"{form}.onnx", spec=load_recipe(folder / form).input)
    except ArtifactError as error:
        return f"export: {error}"
    return ""


def make(
    folder: Path, form: schemas.Form, deployment: schemas.Deployment, *, num_threads: int | None = None
) -> schemas.Deployability:
    """Make a deployment of a form, in a folder next to it; return its distance on the golden images, or the error."""
    import torch

    from profiling_agent.lib.modules import logits_of, relative_distance
    from profiling_agent.runtimes.torch_artifact import read_source, save_deployed

    row = schemas.Deployability(form=form, deployment=deployment)
    model, onnx = folder / form, folder / f"{form}.onnx"
    images = noise_batch(load_recipe(model).input, NUM_CALIBRATION, seed=1)
    source = read_source(model, images, batch_size=BATCH, onnx=onnx if onnx.is_file() else None)
    target = deployment_folder(folder, row)
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


def reopen(folder: Path, row: schemas.Deployability, *, num_threads: int | None = None) -> schemas.Deployability:
    """Reopen a deployment in another process than made it, and check its golden logits; return the row, or the error in it."""
    target = deployment_folder(folder, row)
    try:
        check_golden(open_session(target, num_threads=num_threads).run, target, load_recipe(target))
    except ArtifactError as error:
        return row.model_copy(update={"refused": f"reopening: {error}"})
    return row


def deployment_folder(folder: Path, row: schemas.Deployability) -> Path:
    """Return the folder of a form's deployment."""
    return folder / f"{row.form}-{row.deployment.runtime}-{row.deployment.scheme}"


class LookTask(ModelTask[schemas.Prunable]):
    """Load a model, and save it whole and with a quarter cut off every unit."""

    def run(self, context: JobContext) -> schemas.Prunable:
        """Read a model and lay it out; AcquisitionError and ShapeUnresolvedError if it can't be read."""
        from profiling_agent.data.shape import check_processor, resolve_input_shape

        loaded = self.load(context, "cpu")
        check_processor(loaded.model, loaded.processor)
        spec, folder = resolve_input_shape(loaded.model, loaded.processor), context.root / CHECK_FOLDER
        return lay_out(loaded.model, folder, spec=spec, processor=loaded.processor, name=self.model)


class TryTask(Task[schemas.Deployability]):
    """Export a form of the model that LookTask saved, make its deployment of `row`, or reopen that."""

    isolated_timeout_s = HOUR / 4
    uses_runtimes = True
    isolated: bool = True
    step: Literal["export", "make", "reopen"]
    row: schemas.Deployability

    def run(self, context: JobContext) -> schemas.Deployability:
        """Take the step; return how far it got, or why no further."""
        folder, row, threads = context.root / CHECK_FOLDER, self.row, available_threads()
        if self.step == "export":
            return row.model_copy(update={"refused": write_onnx(folder, row.form)})
        if self.step == "make":
            return make(folder, row.form, row.deployment, num_threads=threads)
        return reopen(folder, row, num_threads=threads)


def check_deployments(
    jobs: Jobs, form: schemas.Form, runtimes: Sequence[schemas.RuntimeName]
) -> Iterator[schemas.Deployability]:
    """Deploy a form of LookTask's model in every scheme of these runtimes, and reopen each in another process; errors become rows."""

    def try_step(step: Literal["export", "make", "reopen"], row: schemas.Deployability) -> schemas.Deployability:
        try:
            return jobs.run(TryTask(step=step, row=row))
        except JobError as error:
            return row.model_copy(update={"refused": f"{'export' if step == 'export' else 'crashed'}: {error}"})

    deployments = [
        schemas.Deployment(runtime=name, scheme=s) for name in runtimes for s in runtime(name).schemes("cpu")
    ]
    export_error = ""
    if any(map(reads_onnx, deployments)):
        jobs.progress(f"{form}: exporting to ONNX", 0, len(deployments))
        export_error = try_step("export", schemas.Deployability(form=form, deployment=schemas.Deployment())).refused
    for number, deployment in enumerate(deployments):
        jobs.progress(f"{form}: {deployment.name}", number, len(deployments))
        row = schemas.Deployability(form=form, deployment=deployment)
        if export_error and reads_onnx(deployment):
            yield row.model_copy(update={"refused": export_error})
            continue
        result = try_step("make", row)
        yield result if result.refused else try_step("reopen", result)


# A device adds float32 numbers in another order than the CPU.
MAX_DISTANCE = 1e-3
# Seconds that a step of `doctor` may take: a hung driver must not hang it.
DOCTOR_S = 600.0
# Compensation needs 128 different ones.
NUM_IMAGES = 256
STEPS = ("find", "profile", "prune", "evaluate")


class Tiny(schemas.Record):
    """A tiny model, images of noise, and the name of the device."""

    model: schemas.ArtifactRef
    images: schemas.SplitInfo
    device: str


class TinyTask(Task[Tiny]):
    """Save a ViT of two layers with random weights, and images of noise, to check a runtime or device with."""

    timeout_s = DOCTOR_S
    device: str

    def run(self, context: JobContext) -> Tiny:
        """Find the device, and make both."""
        import torch
        from transformers import ViTConfig, ViTForImageClassification
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        from profiling_agent.data.models import resolve_device
        from profiling_agent.runtimes.torch_artifact import save_model

        side, folder, noise = 32, context.folder / "model", context.folder / "noise.parquet"
        device = torch.cuda.get_device_name() if resolve_device(self.device) == "cuda" else "the CPU"
        sizes: dict[str, Any] = {"image_size": side, "patch_size": 8, "hidden_size": 64, "intermediate_size": 256}
        model = ViTForImageClassification(ViTConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)).eval()
        spec = schemas.InputSpec(channels=3, height=side, width=side, source="probe")
        processor = ViTImageProcessorPil(size={"height": side, "width": side})
        save_model(model, folder, spec=spec, processor=processor, base_model="probe")
        rng, images = np.random.default_rng(0), list[bytes]()
        for _ in range(NUM_IMAGES):
            encoded = io.BytesIO()
            Image.fromarray(rng.integers(0, 256, (side, side, 3), dtype=np.uint8)).save(encoded, format="PNG")
            images.append(encoded.getvalue())
        write_rows(noise, ((image, 0) for image in images))
        file = context.ref(noise, "split")
        split = schemas.SplitInfo(name="calibration", source_split="noise", num_images=NUM_IMAGES, file=file)
        return Tiny(model=context.ref(folder, "model"), images=split, device=device)


def probe_runtime(jobs: Jobs, name: schemas.RuntimeName) -> float:
    """Return the milliseconds of one image in a tiny model on a runtime.

    Raises:
        ProfilingAgentError: what prevents that, such as a crash.
    """
    tiny, deployment = jobs.run(TinyTask(device="cpu")), schemas.Deployment(runtime=name)
    onnx = jobs.run(ExportTask(model=tiny.model)).onnx if reads_onnx(deployment) else None
    deploy = DeployTask(
        isolated=True, model=tiny.model, deployment=deployment, calibration=tiny.images, onnx=onnx, batch_size=1
    )
    return jobs.run(HeadlineTask(model=jobs.run(deploy).model, batch_size=1, device="cpu")).latency.median_ms


def check_device(jobs: Jobs, device: str) -> tuple[list[str], str]:
    """Return what each step of profiling, pruning and evaluating a tiny model saw, and how the next one failed or ""."""
    seen: list[str] = []
    try:
        for step, text in zip(STEPS, _device_steps(jobs, device), strict=True):
            seen.append(f"{step}: {text}")
    except ProfilingAgentError as error:
        return seen, f"{STEPS[len(seen)]} failed: {error}"
    return seen, ""


def _device_steps(jobs: Jobs, device: str) -> Iterator[str]:
    tiny, size = jobs.run(TinyTask(device=device)), BATCH
    yield tiny.device

    headline = jobs.run(HeadlineTask(model=tiny.model, batch_size=size, device=device))
    images: dict[str, Any] = {"calibration": tiny.images, "cache": False, "headline": headline}
    profiled = profile_artifact(jobs, tiny.model, batch_size=size, device=device, **images)
    profile = read_profile(jobs, profiled)
    if profile.evidence is None:
        raise ArtifactError(f"no evidence on its units: {profile.evidence_note}")
    units, memory = profile.units, headline.peak_memory_bytes / 1e6
    yield f"{headline.latency.median_ms:.2f} ms a batch of {size}, {memory:.0f} MB at most, {len(units)} units"

    pruned = jobs.run(
        PruneTask(baseline=tiny.model, cuts=cuts_of(units, 0.5), calibration=tiny.images, seed=0, device=device)
    )
    if pruned.compensation_note:
        raise ArtifactError(pruned.compensation_note)
    yield f"KL {pruned.kl_uncompensated:.2g} nats, {pruned.kl:.2g} after compensation"

    distance = 0.0
    for model in (tiny.model, pruned.model):
        task = LogitsTask(model=model, split=tiny.images, batch_size=size)
        computed = list[Any]()
        for each in (task, task.model_copy(update={"device": device})):
            jobs.run(each)
            computed.append(load_file(jobs.workspace.jobs / job_key(each) / LOGITS_FILE)[LOGITS])
        expected, logits = computed
        distance = max(distance, float(np.linalg.norm(logits - expected) / np.linalg.norm(expected)))
    if not distance <= MAX_DISTANCE:
        raise ArtifactError(f"logits are {distance:.2g} from the CPU's (relative), {MAX_DISTANCE:g} is allowed")
    names, outcomes = list[schemas.RuntimeName](["eager", "graphed"]), list[str]()
    deployments = [schemas.Deployment(runtime=name, scheme=s) for name in names for s in runtime(name).schemes(device)]
    for deployment in deployments[1:]:
        deploy = DeployTask(
            model=pruned.model, deployment=deployment, calibration=tiny.images, batch_size=size, device=device
        )
        try:
            jobs.run(deploy)
            outcomes.append(deployment.name)
        except QuantizationError as error:
            # A GPU may have no float8.
            outcomes.append(f"{deployment.name} doesn't ({error})")
    yield f"float32 is {distance:.1g} from the CPU's; what works: {', '.join(outcomes)}"
