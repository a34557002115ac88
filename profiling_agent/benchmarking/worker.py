"""Worker: one model in a process of its own, timed when asked: `python -m profiling_agent.benchmarking.worker FOLDER`.

It ends when its standard input does, also in the middle of a sample: whoever kills the parent leaves no worker behind.
It imports torch where the model's runtime is torch's, and only there.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from profiling_agent.artifacts.folder import open_folder
from profiling_agent.deployment.batches import noise_batch
from profiling_agent.deployment.protocol import ModelSession, OnDevice
from profiling_agent.deployment.registry import open_session
from profiling_agent.processes.serve import Parent
from profiling_agent.records import Record
from profiling_agent.reproducibility import available_threads

# The first pass of a sample finds caches and threads as the other workers left them, which takes milliseconds to mend: it
# isn't counted, unless passes take so long that it can't matter.
LONG_MS = 1000.0


class Start(Record):
    """First line to a worker: how it is to run its model."""

    batch_size: int
    device: str
    num_threads: int | None = None


class SampleRequest(Record):
    """Further lines to a worker: a sample of that many forward passes is wanted."""

    runs: int


class Reply(Record):
    """A worker's answer: it has loaded its model, or how long each pass took and what it has held of a device by then."""

    kind: Literal["ready", "times"]
    samples_ms: tuple[float, ...] = ()
    device_bytes: int | None = None


@dataclass(frozen=True)
class Pass:
    """One pass of an opened model over a batch; what the model takes of a device can be asked."""

    run_once: Callable[[], float]
    session: ModelSession

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
    run_once = open_model(parent.receive(Start))
    parent.send(Reply(kind="ready"))
    warmed = False
    while True:
        sample = parent.receive(SampleRequest)
        first = run_once()
        times = [first] if warmed and first > LONG_MS else []
        while len(times) < sample.runs:
            times.append(run_once())
        warmed = True
        parent.send(Reply(kind="times", samples_ms=tuple(times), device_bytes=_device_bytes(run_once)))


def _device_bytes(asked: object) -> int | None:
    return asked.peak_bytes() if isinstance(asked, OnDevice) else None


def open_artifact(folder: Path, start: Start) -> Pass:
    """Return one pass of a saved model over a batch of noise."""
    threads = start.num_threads or available_threads()
    session = open_session(folder, device=start.device, num_threads=threads)
    return Pass(session.bound(noise_batch(open_folder(folder, verify=False).input, start.batch_size)), session)


if __name__ == "__main__":
    serve(lambda start: open_artifact(Path(sys.argv[1]), start))
