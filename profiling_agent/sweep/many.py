"""Many runs, one after the other or, on a cluster, side by side: each is run, gone on with or read back; one that fails costs itself alone."""

import threading
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed

from profiling_agent.agents.node import ProgressEvent
from profiling_agent.errors import ProfilingAgentError, RequestError, RunError, StorageError
from profiling_agent.lifecycle import Listener, complete, ignore
from profiling_agent.request import Request
from profiling_agent.sweep.results import RunResult, failed, result_of
from profiling_agent.sweep.sheet import name_of
from profiling_agent.workspace import changed_fields, read_manifest

# What is heard when a run begins: how many were done, how many there are, and its request.
Beginning = Callable[[int, int, Request], None]


def _unheard(*_: object) -> None:
    """Hear nothing."""


def optimize_many(
    requests: Sequence[Request],
    listener: Listener = ignore,
    *,
    begins: Beginning = _unheard,
    ends: Callable[[RunResult], None] = _unheard,
    num_at_once: int = 1,
) -> tuple[RunResult, ...]:
    """Run every request to its verdict and return what each came to, in their order; the same call goes on where it was cut.

    A request without a `run_id` is given one that follows from it, so that the next call finds its folder: a run that is complete there is read back,
    one that was cut is gone on with. `num_at_once` of them are under way at a time, which takes a cluster of as many machines to be of use; the
    events of each are then heard with its name as the stage. What keeps one run from ending is its result's `failure`; the next call tries it again.

    Raises:
        RequestError: two requests would have one folder, or one waits for somebody's approval.
        StorageError: the disk is full or can't be written, which the other runs would meet as well.
    """
    named = [one if one.run_id else one.model_copy(update={"run_id": name_of(one)}) for one in requests]
    folders = [one.output_dir / str(one.run_id) for one in named]
    doubled, number = Counter(folders).most_common(1)[0] if folders else (None, 0)
    if number > 1:
        raise RequestError(f"two of the runs would lie in {str(doubled)!r}: leave one out, or give each a run_id")
    if waits := next((one for one in named if one.approve != "never"), None):
        raise RequestError(
            f"run {waits.run_id!r} waits for an approval (approve={waits.approve!r}), which many runs can't"
        )
    if num_at_once > 1:
        return _side_by_side(named, listener, begins, ends, num_at_once)
    results: list[RunResult] = []
    for request in named:
        begins(len(results), len(named), request)
        results.append(_result(request, listener))
        ends(results[-1])
    return tuple(results)


def _side_by_side(
    requests: Sequence[Request],
    listener: Listener,
    begins: Beginning,
    ends: Callable[[RunResult], None],
    num_at_once: int,
) -> tuple[RunResult, ...]:
    """Run requests in threads, all of which wait for a cluster most of the time; the caller's functions are called one at a time."""
    results: dict[int, RunResult] = {}
    speaking, is_over = threading.Lock(), threading.Event()

    def work(number: int) -> int:
        request = requests[number]

        def hear(event: ProgressEvent) -> None:
            # A run looks up when it tells something: a thread can't be stopped from outside.
            if is_over.is_set():
                raise KeyboardInterrupt
            told = {"stage": str(request.run_id), "message": f"{event.stage}: {event.message}"}
            with speaking:
                listener(event.model_copy(update=told))

        with speaking:
            begins(len(results), len(requests), request)
        results[number] = _result(request, hear)
        return number

    with ThreadPoolExecutor(num_at_once) as pool:
        waiting = [pool.submit(work, number) for number in range(len(requests))]
        try:
            for done in as_completed(waiting):
                number = done.result()
                with speaking:
                    ends(results[number])
        finally:
            # Of no consequence where all are done.
            is_over.set()
            pool.shutdown(wait=False, cancel_futures=True)
    return tuple(results[number] for number in range(len(requests)))


def _result(request: Request, listener: Listener) -> RunResult:
    try:
        _check_same(request)
        return result_of(request, complete(request, listener))
    except StorageError:
        raise
    except ProfilingAgentError as error:
        return failed(request, str(error))


def _check_same(request: Request) -> None:
    """Raise RunError where the run's folder holds what was asked otherwise."""
    folder = request.output_dir / str(request.run_id)
    if not folder.exists():
        return
    if changed := changed_fields(read_manifest(folder).request, request):
        raise RunError(
            f"run {request.run_id!r} was begun with another {changed[0]}: choose another run_id, or ask for the same"
        )
