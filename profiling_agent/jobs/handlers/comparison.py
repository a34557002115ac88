"""The paper's baselines: one is cut, asked about a split's images beside the unpruned model, and timed beside it."""

import statistics

from profiling_agent.artifacts.load import load_module, load_recipe
from profiling_agent.deployment.protocol import Batch
from profiling_agent.deployment.torch_session import TorchSession
from profiling_agent.jobs.context import JobContext
from profiling_agent.jobs.handlers.evaluation import answer, keep_answers
from profiling_agent.jobs.tasks import CompareTask, PaperBaseline
from profiling_agent.modules.inference import on_device, random_batch
from profiling_agent.pruning.rivals import paper_prune
from profiling_agent.quantization.footprint import parameter_bytes

NUM_REPEATS, NUM_WARM_UP = 15, 3


def compare(task: CompareTask, job: JobContext) -> PaperBaseline:
    """Cut, ask both models about the split, and let them take turns."""
    path, images = job.path(task.model), job.images("images")
    model, spec = on_device(load_module(path), task.device).eval(), load_recipe(path).input
    cut = paper_prune(model, spec, task.ratio, task.criterion, seed=task.seed).model.to(task.device).eval()
    before, after = (TorchSession(module, device=task.device) for module in (model, cut))
    said = [answer(session, images, task.batch_size, job.progress) for session in (before, after)]
    return PaperBaseline(
        predictions_before=keep_answers(said[0], task.split.name, job, name="predictions-before"),
        predictions=keep_answers(said[1], task.split.name, job, name="predictions-after"),
        params=sum(parameter.numel() for parameter in cut.parameters()),
        params_before=sum(parameter.numel() for parameter in model.parameters()),
        size_ratio=parameter_bytes(cut) / parameter_bytes(model),
        speedup=_speedup(before, after, random_batch(spec, task.batch_size).numpy()),
    )


def _speedup(before: TorchSession, after: TorchSession, images: Batch) -> float:
    """Return the median ratio of the repeats: both in one process, which one runtime allows."""
    turns = before.bound(images), after.bound(images)
    ratios: list[float] = []
    for number in range(NUM_WARM_UP + NUM_REPEATS):
        times = [turn() for turn in turns]
        ratios += [times[0] / times[1]] if number >= NUM_WARM_UP else []
    return statistics.median(ratios)
