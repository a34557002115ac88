"""Many runs, one after the other: each is run, gone on with or read back; one that fails costs itself alone."""

from collections import Counter
from collections.abc import Callable, Sequence

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
) -> tuple[RunResult, ...]:
    """Run every request to its verdict and return what each came to, in their order; the same call goes on where it was cut.

    A request without a `run_id` is given one that follows from it, so that the next call finds its folder: a run that is complete there is read back,
    one that was cut is gone on with. What keeps one run from ending is its result's `failure`; the next call tries it again.

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
    results: list[RunResult] = []
    for request in named:
        begins(len(results), len(named), request)
        results.append(_result(request, listener))
        ends(results[-1])
    return tuple(results)


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
