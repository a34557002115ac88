"""What the one who starts a race and a worker say to each other: one JSON line each way at a time. No torch here."""

from typing import Literal

from profiling_agent.records import Record


class Start(Record):
    """First line to a worker: how it is to run its model."""

    batch_size: int
    device: str
    num_threads: int | None = None


class SampleRequest(Record):
    """Further lines to a worker: it is its turn to run that many forward passes."""

    runs: int


class Reply(Record):
    """A worker's answer: it has loaded its model, or how long each pass took."""

    kind: Literal["ready", "times"]
    samples_ms: tuple[float, ...] = ()
