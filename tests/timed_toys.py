"""Timed workers whose model is a script."""

import json
import time

from profiling_agent.measure.worker import Pass, Reply, SampleRequest, WorkerSetup, serve
from profiling_agent.processes.child import Parent


def serve_holding(parent: Parent) -> None:
    """Serve a model whose pass holds 100 bytes more of a device each time."""
    blocks: list[int] = []

    def run_once() -> float:
        blocks.append(100)
        return 1.0

    serve(parent, lambda _setup: Pass(run_once, lambda: sum(blocks)))


def serve_states(parent: Parent, states: str) -> None:
    """Answer each sample with the next reasons for the GPU's clocks, and the number of the sample as its time."""
    parent.receive(WorkerSetup)
    parent.send(Reply())
    for number, reasons in enumerate(json.loads(states), start=1):
        runs = parent.receive(SampleRequest).runs
        parent.send(Reply(samples_ms=(float(number),) * runs, device_bytes=7, reasons=reasons))
    parent.receive(SampleRequest)


def serve_never(_parent: Parent) -> None:
    """Hang."""
    time.sleep(600)
