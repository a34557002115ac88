"""The job that makes one of the paper's baselines and measures it. No torch here."""

from typing import ClassVar, Literal

from profiling_agent.jobs.tasks import Task
from profiling_agent.records import ArtifactRef, Predictions, Record, SplitInfo


class PaperBaseline(Record):
    """What a baseline came to; `speedup` is over the unpruned model, by turns in one process of one runtime."""

    params: int
    params_before: int
    size_ratio: float
    speedup: float
    predictions: Predictions
    predictions_before: Predictions


class CompareTask(Task[PaperBaseline]):
    """Prune a saved model as the paper's baselines were, and measure both: what it says of a split, and how fast it is."""

    result: ClassVar[type[Record]] = PaperBaseline
    model: ArtifactRef
    criterion: Literal["l1", "l2", "random"]
    ratio: float
    split: SplitInfo
    batch_size: int
    device: str = "cpu"
    seed: int = 0
