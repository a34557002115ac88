"""The jobs around a runtime: export to ONNX, bring a model into a deployment, ask it what it sees, time it."""

import time
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from profiling_agent.acquisition.batches import iter_batches
from profiling_agent.artifacts.folder import open_folder
from profiling_agent.artifacts.golden import logits_of
from profiling_agent.artifacts.load import load_module, load_processor, load_recipe, load_skeleton
from profiling_agent.artifacts.recipe import Counts
from profiling_agent.deployment.load import check_session
from profiling_agent.deployment.onnx_export import export_onnx
from profiling_agent.deployment.protocol import Batch, ModelSession, Source
from profiling_agent.deployment.registry import open_session
from profiling_agent.deployment.save import save_deployed
from profiling_agent.errors import QuantizationError
from profiling_agent.jobs import tasks
from profiling_agent.jobs.answers import answers, written
from profiling_agent.jobs.context import Desk
from profiling_agent.modules.complexity import count_complexity
from profiling_agent.modules.divergence import mean_kl
from profiling_agent.quantization.footprint import folder_bytes, parameter_bytes
from profiling_agent.records import DeployedModel, Footprint
from profiling_agent.reproducibility import available_threads

# Activation ranges and NNCF's statistics settle well before; more only take longer.
MAX_CALIBRATION = 128
# Each deployment is compared anew, and float32 takes longest of all; a deployment that is far off is so on half of the images.
MAX_COMPARED = 64


def export_job(task: tasks.ExportTask, desk: Desk) -> tasks.Exported:
    """Write a float32 model as ONNX."""
    source, path = desk.path(task.model), desk.folder / "model.onnx"
    distance = export_onnx(load_module(source), path, spec=load_recipe(source).input)
    return tasks.Exported(onnx=desk.ref(path, "onnx"), distance=distance)


def deploy_job(task: tasks.DeployTask, desk: Desk) -> DeployedModel:
    """Bring a float32 model into a deployment, save it, open it again, and see how far it is from its parent."""
    source, folder = _source(task, desk), desk.folder / "model"
    num_threads = available_threads()
    desk.progress(f"converting to {task.deployment.name}", 0, 0)
    started = time.perf_counter()
    complexity = complexity_of(desk.path(task.model))
    recipe = save_deployed(source, task.deployment, folder, complexity=complexity, num_threads=num_threads)
    seconds = time.perf_counter() - started
    session = open_session(folder, device=task.device, num_threads=num_threads)
    distance, kl = _differences(session, source)
    check_session(session, folder, recipe)
    return DeployedModel(
        model=desk.ref(folder, "model"),
        deployment=task.deployment,
        layers=tuple(layer.name for layer in recipe.quantized),
        distance=distance,
        kl=kl,
        seconds=seconds,
    )


def _source(task: tasks.DeployTask, desk: Desk) -> Source:
    path = desk.path(task.model)
    processor = load_processor(path)
    read = iter_batches(desk.path(task.calibration.file), processor, batch_size=task.batch_size, limit=MAX_CALIBRATION)
    images = [pixel_values.numpy() for pixel_values, _ in read]
    if not images:
        raise QuantizationError("there are 0 calibration images: raise num_samples")
    return Source(
        module=load_module(path),
        recipe=load_recipe(path),
        processor=processor,
        calibration=np.concatenate(images),
        batch_size=task.batch_size,
        onnx=desk.path(task.onnx) if task.onnx else None,
        device=task.device,
    )


def complexity_of(path: Path) -> tuple[int, int]:
    """Return params and MACs of one image, counted on a saved model that torch can read."""
    rows = count_complexity(load_skeleton(path), load_recipe(path).input).values()
    return sum(row.params for row in rows), sum(row.macs for row in rows)


def _counts(path: Path) -> Counts:
    params, macs = complexity_of(path)
    return Counts(params=params, macs=macs, parameter_bytes=parameter_bytes(load_module(path, verify=False)))


def _differences(session: ModelSession, source: Source) -> tuple[float, float]:
    """Return the relative distance of the logits from the float32 model's, and the KL divergence to it, nats."""
    expected, found = list[Tensor](), list[Tensor]()
    compared: Batch = source.calibration[:MAX_COMPARED]
    for index in range(0, len(compared), source.batch_size):
        images = compared[index : index + source.batch_size]
        expected.append(logits_of(source.module, torch.from_numpy(images)))
        found.append(torch.from_numpy(session.run(images)))
    ours, theirs = torch.cat(found).double(), torch.cat(expected).double()
    if not ours.isfinite().all():
        raise QuantizationError("on calibration images the logits aren't finite in this deployment: leave it out")
    distance = (ours - theirs).norm() / theirs.norm().clamp_min(torch.finfo(torch.float32).tiny)
    # Rounding makes it a hair negative where both are equal.
    return float(distance), max(0.0, mean_kl(theirs, ours))


def evaluate_job(task: tasks.EvaluateTask, desk: Desk) -> tasks.Evaluated:
    """Run the model over the split, or its first images; count what it takes."""
    path = desk.path(task.model)
    recipe = open_folder(path, verify=True)
    session = open_session(path, device=task.device, num_threads=available_threads())
    predicted, true = answers(session, task.split, path, desk, batch_size=task.batch_size, limit=task.num_images)
    # Last, because a runtime that compiles for each size of batch then has a larger one to put the two images in.
    check_session(session, path, recipe)
    counts = recipe.counts or _counts(path)
    return tasks.Evaluated(
        footprint=Footprint(**counts.model_dump(), size_bytes=folder_bytes(path)),
        predictions=written(task.split, predicted, true, desk),
    )
