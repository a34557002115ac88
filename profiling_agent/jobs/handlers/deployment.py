"""Tuning, export and deployment: a float32 model made ready for int8, written as ONNX, brought into a runtime."""

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from profiling_agent.acquisition.prepared import iter_batches
from profiling_agent.artifacts.golden import check_golden
from profiling_agent.artifacts.load import load_module, load_processor, load_recipe, load_skeleton
from profiling_agent.deployment.onnx_export import export_onnx
from profiling_agent.deployment.protocol import Batch, ModelSession, Source
from profiling_agent.deployment.registry import open_session
from profiling_agent.deployment.save import save_deployed
from profiling_agent.errors import QuantizationError
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.handlers.logits import given_logits
from profiling_agent.jobs.handlers.pruning import keep_model
from profiling_agent.jobs.tasks import DeployTask, Exported, ExportTask, TuneTask
from profiling_agent.modules.complexity import count_complexity
from profiling_agent.modules.divergence import mean_kl, relative_distance
from profiling_agent.modules.products import quick_products
from profiling_agent.quantization import tune as tuning
from profiling_agent.records import DeployedModel, Tuned
from profiling_agent.reproducibility import available_threads

# Activation ranges and NNCF's statistics settle well before; more only take longer.
MAX_CALIBRATION = 128


def tune(task: TuneTask, job: JobContext) -> Tuned:
    """Even out activations, find what each layer costs; save the model if it was changed."""
    started = time.perf_counter()
    path = job.path(task.model)
    batches = iter_batches(job.images("calibration"), batch_size=task.batch_size, limit=tuning.MAX_IMAGES)
    model = load_module(path)
    images = (pixel_values for pixel_values, _ in batches)
    with quick_products():
        tuned = tuning.tune(model, images, task.scheme, task.latency_shares, progress=job.progress)
    return Tuned(
        model=task.model if tuned.model is model else keep_model(tuned.model, task.model, job),
        sites=tuned.sites,
        layers=tuned.rows,
        kl=tuned.kl,
        kl_unfolded=tuned.kl_unfolded,
        num_images=tuned.num_images,
        seconds=time.perf_counter() - started,
    )


def export(task: ExportTask, job: JobContext) -> Exported:
    """Write a float32 model as ONNX."""
    source, path = job.path(task.model), job.folder / "model.onnx"
    distance = export_onnx(load_module(source), path, spec=load_recipe(source).input)
    return Exported(onnx=job.ref(path, "onnx"), distance=distance)


def deploy(task: DeployTask, job: JobContext) -> DeployedModel:
    """Bring a float32 model into a deployment, save it, open it again, and see how far it is from its parent."""
    source, folder, expected = _source(task, job), job.folder / "model", given_logits(job)
    assert expected is not None, "where there are calibration images, the float32 model was asked about them"
    num_threads = available_threads()
    job.progress(f"converting to {task.deployment.name}", 0, 0)
    started = time.perf_counter()
    complexity = complexity_of(job.path(task.model))
    recipe = save_deployed(source, task.deployment, folder, complexity=complexity, num_threads=num_threads)
    seconds = time.perf_counter() - started
    session = open_session(folder, device=task.device, num_threads=num_threads)
    distance, kl = _differences(session, source, expected)
    check_golden(session.run, folder, recipe)
    return DeployedModel(
        model=job.ref(folder, "model"),
        deployment=task.deployment,
        layers=tuple(layer.name for layer in recipe.quantized),
        distance=distance,
        kl=kl,
        seconds=seconds,
    )


def _source(task: DeployTask, job: JobContext) -> Source:
    path = job.path(task.model)
    images = [
        pixel_values for pixel_values, _ in job.images("calibration").batches(task.batch_size, limit=MAX_CALIBRATION)
    ]
    if not images:
        raise QuantizationError("there are 0 calibration images: raise num_samples")
    return Source(
        module=load_module(path),
        recipe=load_recipe(path),
        processor=load_processor(path),
        calibration=np.concatenate(images),
        batch_size=task.batch_size,
        onnx=job.path(task.onnx) if task.onnx else None,
        device=task.device,
    )


def complexity_of(path: Path) -> tuple[int, int]:
    """Return params and MACs of one image, counted on a saved model that torch can read."""
    rows = count_complexity(load_skeleton(path), load_recipe(path).input).values()
    return sum(row.params for row in rows), sum(row.macs for row in rows)


def _differences(session: ModelSession, source: Source, expected: Tensor) -> tuple[float, float]:
    """Return the relative distance of the logits from the float32 model's, and the KL divergence to it, nats.

    `expected` is what the float32 model says of the first calibration images.
    """
    compared: Batch = source.calibration[: len(expected)]
    found = [
        torch.from_numpy(session.run(compared[index : index + source.batch_size]))
        for index in range(0, len(compared), source.batch_size)
    ]
    ours, theirs = torch.cat(found).double(), expected.double()
    if not ours.isfinite().all():
        raise QuantizationError("on calibration images the logits aren't finite in this deployment: leave it out")
    # Rounding makes it a hair negative where both are equal.
    return relative_distance(ours, theirs), max(0.0, mean_kl(theirs, ours))
