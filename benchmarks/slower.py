"""Process of a race whose model takes longer than it has to: it waits after each pass, busily, for a share of what that took.

Started by measurement.py, which puts this folder onto the path.
"""

import time
from pathlib import Path

from profiling_agent.measure.worker import Pass, WorkerSetup, open_artifact, serve
from profiling_agent.processes.child import Parent


def open_slower(folder: str, start: WorkerSetup, by: float) -> Pass:
    """Return one pass of a saved model that takes longer than it has to, by such a share."""
    run_once = open_artifact(Path(folder), start).run_once

    def run_slowly() -> float:
        took_ms = run_once()
        started = time.perf_counter()
        while (waited_ms := (time.perf_counter() - started) * 1e3) < by * took_ms:
            pass
        return took_ms + waited_ms

    return Pass(run_slowly)


def serve_slower(parent: Parent, folder: str, by: str) -> None:
    """Answer with samples of a saved model that takes longer than it has to."""
    serve(parent, lambda start: open_slower(folder, start, float(by)))
