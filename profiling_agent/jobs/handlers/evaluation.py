"""One of the paper's baselines, made and measured beside the model that it was cut from."""

import statistics

from profiling_agent.artifacts.load import load_module, load_recipe
from profiling_agent.deployment.protocol import Batch
from profiling_agent.deployment.torch_session import TorchSession
from profiling_agent.jobs.answers import answers, written
from profiling_agent.jobs.comparing import CompareTask, PaperBaseline
from profiling_agent.jobs.context import Desk
from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.baselines import paper_prune
from profiling_agent.quantization.footprint import parameter_bytes

NUM_REPEATS, NUM_WARM_UP = 15, 3


def compare_job(task: CompareTask, desk: Desk) -> PaperBaseline:
    """Cut, ask both models about the split, and let them take turns."""
    path = desk.path(task.model)
    model, spec = load_module(path).to(task.device).eval(), load_recipe(path).input
    cut = paper_prune(model, spec, task.ratio, task.criterion, seed=task.seed).model.to(task.device).eval()
    before, after = (TorchSession(module, device=task.device) for module in (model, cut))
    predictions = {
        name: written(
            task.split,
            *answers(session, task.split, path, desk, batch_size=task.batch_size),
            desk,
            f"predictions-{name}",
        )
        for name, session in (("before", before), ("after", after))
    }
    return PaperBaseline(
        params=sum(parameter.numel() for parameter in cut.parameters()),
        params_before=sum(parameter.numel() for parameter in model.parameters()),
        size_ratio=parameter_bytes(cut) / parameter_bytes(model),
        speedup=_speedup(before, after, random_batch(spec, task.batch_size).numpy()),
        predictions=predictions["after"],
        predictions_before=predictions["before"],
    )


def _speedup(before: TorchSession, after: TorchSession, images: Batch) -> float:
    """Return the median of the rounds' ratios: both in one process, which one runtime allows."""
    turns = before.bound(images), after.bound(images)
    ratios: list[float] = []
    for number in range(NUM_WARM_UP + NUM_REPEATS):
        times = [turn() for turn in turns]
        ratios += [times[0] / times[1]] if number >= NUM_WARM_UP else []
    return statistics.median(ratios)
