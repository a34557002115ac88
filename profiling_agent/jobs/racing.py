"""Jobs that time models against each other, or measure one alone: each in processes of their own. No torch here."""

from typing import ClassVar

from profiling_agent.jobs.tasks import Task
from profiling_agent.records import ArtifactRef, MemoryUse, Race, Record, Throughputs, Variant


class RaceTask(Task[Race]):
    """Let models take turns; the first is the baseline."""

    result: ClassVar[type[Record]] = Race
    fresh: ClassVar[bool] = True
    timeout_s: ClassVar[float] = 3600.0
    entries: tuple[tuple[Variant, ArtifactRef], ...]
    batch_size: int
    device: str
    seed: int


class ThroughputTask(Task[Throughputs]):
    """Count images per second at several batch sizes, models taking turns."""

    result: ClassVar[type[Record]] = Throughputs
    fresh: ClassVar[bool] = True
    timeout_s: ClassVar[float] = 3600.0
    models: tuple[ArtifactRef, ...]
    batch_sizes: tuple[int, ...] = (1, 8, 32)
    device: str = "cpu"
    seed: int = 0


class MemoryTask(Task[MemoryUse]):
    """Read what a process holds at most that only loads and runs a model."""

    result: ClassVar[type[Record]] = MemoryUse
    fresh: ClassVar[bool] = True
    timeout_s: ClassVar[float] = 1800.0
    model: ArtifactRef
    batch_size: int
    device: str = "cpu"
