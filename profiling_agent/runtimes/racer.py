"""One model in a process of its own that runs when it is its turn: `python -m profiling_agent.runtimes.racer FOLDER`.

It ends when its standard input does, also in the middle of a turn: whoever kills the parent leaves no racer behind.
"""

import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import TextIO

from torch import Tensor, nn

from profiling_agent.artifacts.load import load_module, load_recipe
from profiling_agent.runtimes.eager import pin_threads, random_batch, time_forward
from profiling_agent.runtimes.turns import Reply, Start, Turn

# The first pass of a turn finds caches and threads as the other racers left them; it isn't counted.
WARMUP = 1


def _lines(stream: TextIO) -> Callable[[], str]:
    """Return a function that waits for the next line; the process ends when there is none."""
    waiting: queue.SimpleQueue[str] = queue.SimpleQueue()

    def watch() -> None:
        for line in stream:
            waiting.put(line)
        os._exit(0)

    threading.Thread(target=watch, daemon=True).start()
    return waiting.get


def _own_output() -> TextIO:
    """Return standard output for our replies alone; what libraries print goes to standard error from now on."""
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return replies


def serve(open_model: Callable[[Start], tuple[nn.Module, Tensor]]) -> None:
    """Load a model and its batch, then take turns until standard input ends; never returns."""
    replies, next_line = _own_output(), _lines(sys.stdin)

    def reply(said: Reply) -> None:
        replies.write(said.model_dump_json() + "\n")
        replies.flush()

    start = Start.model_validate_json(next_line())
    pin_threads(start.num_threads)
    model, batch = open_model(start)
    reply(Reply(kind="ready"))
    while True:
        turn = Turn.model_validate_json(next_line())
        reply(Reply(kind="times", samples_ms=tuple(time_forward(model, batch, runs=turn.runs, warmup=WARMUP))))


def open_artifact(folder: str, start: Start) -> tuple[nn.Module, Tensor]:
    """Return a saved model and a batch of noise, both on the device of the race."""
    model = load_module(folder, verify=False).to(start.device)
    return model, random_batch(load_recipe(folder).input, start.batch_size).to(start.device)


if __name__ == "__main__":
    serve(lambda start: open_artifact(sys.argv[1], start))
