"""Worker: one model in a process of its own, timed when asked: `python -m profiling_agent.benchmarking.worker FOLDER`.

It ends when its standard input does, also in the middle of a sample: whoever kills the parent leaves no worker behind.
It imports torch where the model's runtime is torch's, and only there.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal

from pydantic import Field

from profiling_agent.artifacts.folder import open_folder
from profiling_agent.benchmarking.gpu_state import GpuState, read_state
from profiling_agent.benchmarking.turns import take_turn, warm
from profiling_agent.deployment.batches import noise_batch
from profiling_agent.deployment.protocol import Enqueues, ModelSession, OnDevice
from profiling_agent.deployment.registry import open_session
from profiling_agent.processes.serve import Parent
from profiling_agent.records import Record
from profiling_agent.reproducibility import available_threads

# The first pass of a sample finds caches and threads as the other workers left them, which takes milliseconds to mend: it
# isn't counted, unless passes take so long that it can't matter.
LONG_MS = 1000.0
# Samples of a turn whose passes follow each other without waiting: each is the mean of its passes.
ENQUEUED_PARTS = 5


class Start(Record):
    """First line to a worker: how it is to run its model."""

    batch_size: int
    device: str
    num_threads: int | None = None
    enqueued: bool = Field(default=False, description="on a GPU, passes follow each other without waiting")


class SampleRequest(Record):
    """Further lines to a worker: a sample of that many forward passes is wanted."""

    runs: int


class Reply(Record):
    """A worker's answer: it has loaded its model, or how long each pass took and what it has held of a device by then."""

    kind: Literal["ready", "times"]
    samples_ms: tuple[float, ...] = ()
    device_bytes: int | None = None
    gpu: GpuState | None = Field(default=None, description="the state of the GPU in this sample; None without NVML")


@dataclass(frozen=True)
class Pass:
    """One pass of an opened model over a batch; what the model takes of a device can be asked."""

    run_once: Callable[[], float]
    session: ModelSession
    enqueued: Callable[[int], float | None] | None = None

    def __call__(self) -> float:
        """Run once; return the milliseconds that it took."""
        return self.run_once()

    def peak_bytes(self) -> int | None:
        """Return the most bytes that this process has had allocated on a device; None where it runs on the CPU."""
        return _device_bytes(self.session)


def serve(open_model: Callable[[Start], Callable[[], float]]) -> None:
    """Load a model, then answer with samples until standard input ends; never returns.

    `open_model` returns a function that runs the batch once and returns the milliseconds it took; it also sees to it
    that no more than the number of threads in `Start` are used. A function that knows what is held of a device is asked.
    """
    parent = Parent()
    start = parent.receive(Start)
    run_once = open_model(start)
    parent.send(Reply(kind="ready"))
    is_first = True
    while True:
        runs, state = parent.receive(SampleRequest).runs, None
        if start.device == "cuda":
            times, state = _gpu_sample(run_once, runs)
        else:
            first = run_once()
            times = [first] if first > LONG_MS and not is_first else []
            times += [run_once() for _ in range(runs - len(times))]
        is_first = False
        parent.send(Reply(kind="times", samples_ms=tuple(times), device_bytes=_device_bytes(run_once), gpu=state))


def _gpu_sample(run_once: Callable[[], float], runs: int) -> tuple[list[float], GpuState | None]:
    """Warm up, then take a turn; the state of the GPU is read before and after it, while its clocks are up."""
    warm(run_once)
    before = read_state()
    enqueued = run_once.enqueued if isinstance(run_once, Pass) else None
    if enqueued is None:
        times = take_turn(run_once, runs)
    else:
        parts = min(runs, ENQUEUED_PARTS)
        times = [enqueued(max(1, runs // parts)) or 0.0 for _ in range(parts)]
    after = read_state()
    if before is None or after is None:
        return times, after
    return times, after.model_copy(update={"reasons": before.reasons | after.reasons})


def _device_bytes(asked: object) -> int | None:
    return asked.peak_bytes() if isinstance(asked, OnDevice) else None


def open_artifact(folder: Path, start: Start) -> Pass:
    """Return one pass of a saved model over a batch of noise."""
    threads = start.num_threads or available_threads()
    session = open_session(folder, device=start.device, num_threads=threads)
    images = noise_batch(open_folder(folder, verify=False).input, start.batch_size)
    enqueued = None
    if start.enqueued and start.device == "cuda" and isinstance(session, Enqueues):
        enqueued = partial(session.enqueued, images)
    return Pass(session.bound(images), session, enqueued)


if __name__ == "__main__":
    serve(lambda start: open_artifact(Path(sys.argv[1]), start))
