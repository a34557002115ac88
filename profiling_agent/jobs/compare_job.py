"""One of the paper's baselines, made and measured beside the model that it was cut from."""

import statistics
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from profiling_agent.acquisition.batches import iter_batches
from profiling_agent.artifacts.load import load_module, load_processor, load_recipe
from profiling_agent.evaluation.footprint import parameter_bytes
from profiling_agent.evaluation.predictions import Classes, write_predictions
from profiling_agent.jobs.comparing import Compared, CompareTask
from profiling_agent.jobs.desk import Desk
from profiling_agent.pruning.baselines import paper_prune
from profiling_agent.records import Predictions
from profiling_agent.runtimes.eager import random_batch

NUM_ROUNDS, NUM_WARM_UP = 15, 3


def compare_job(task: CompareTask, desk: Desk) -> Compared:
    """Cut, ask both models about the split, and let them take turns."""
    path = desk.path(task.model)
    model, spec = load_module(path).to(task.device).eval(), load_recipe(path).input
    cut = paper_prune(model, spec, task.ratio, task.criterion, seed=task.seed).model.to(task.device).eval()
    predictions = {name: _predictions(one, name, task, path, desk) for name, one in (("before", model), ("after", cut))}
    batch = random_batch(spec, task.batch_size).to(task.device)
    return Compared(
        params=sum(parameter.numel() for parameter in cut.parameters()),
        params_before=sum(parameter.numel() for parameter in model.parameters()),
        size_ratio=parameter_bytes(cut) / parameter_bytes(model),
        speedup=_speedup(model, cut, batch),
        predictions=predictions["after"],
        predictions_before=predictions["before"],
    )


def _predictions(model: nn.Module, name: str, task: CompareTask, path: Path, desk: Desk) -> Predictions:
    batches = iter_batches(desk.path(task.split.file), load_processor(path), batch_size=task.batch_size)
    predicted, true = _answers(model, batches, task.device, desk, task.split.num_images)
    out = desk.folder / f"predictions-{name}.safetensors"
    write_predictions(out, predicted, true)
    return Predictions(
        split=task.split.name,
        num_images=len(true),
        num_correct=int((predicted == true).sum()),
        file=desk.ref(out, "predictions"),
    )


def _answers(
    model: nn.Module, batches: Iterable[tuple[Tensor, Tensor]], device: str, desk: Desk, num_images: int
) -> tuple[Classes, Classes]:
    predicted, true, done = list[Tensor](), list[Tensor](), 0
    with torch.inference_mode():
        for pixel_values, labels in batches:
            predicted.append(model(pixel_values.to(device)).logits.argmax(dim=-1).cpu())
            true.append(labels)
            done += len(labels)
            desk.progress("evaluating", done, num_images)
    return torch.cat(predicted).numpy().astype(np.int64), torch.cat(true).numpy().astype(np.int64)


def _speedup(model: nn.Module, cut: nn.Module, batch: Tensor) -> float:
    """Return the median of the rounds' ratios: both in one process, which one runtime allows."""
    ratios: list[float] = []
    with torch.inference_mode():
        for number in range(NUM_WARM_UP + NUM_ROUNDS):
            times = [_seconds(one, batch) for one in (model, cut)]
            ratios += [times[0] / times[1]] if number >= NUM_WARM_UP else []
    return statistics.median(ratios)


def _seconds(model: nn.Module, batch: Tensor) -> float:
    started = time.perf_counter()
    model(batch)
    if batch.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - started
