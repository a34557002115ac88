"""Cost of runs before they are made: a pass of each model is timed, and the rest is foretold from that as a run foretells it."""

from collections.abc import Sequence

from profiling_agent.acquisition.splits import NUM_CALIBRATION
from profiling_agent.errors import ProfilingAgentError
from profiling_agent.iteration.budget import Budget
from profiling_agent.iteration.deployments import deployment_choices, num_tried_first
from profiling_agent.iteration.evaluator import most_searched
from profiling_agent.iteration.forecast import Standing, Work, forecast
from profiling_agent.jobs.profile import measure_headline
from profiling_agent.jobs.runner import Jobs, scratch_jobs
from profiling_agent.jobs.tasks import ResolveShapeTask
from profiling_agent.jobs.timesheet import Timesheet
from profiling_agent.progress import Progress, silent
from profiling_agent.records import Plan, Record
from profiling_agent.request import Request

# As many as a run draws at most where nobody says, and held out at most for each.
NUM_SEARCH, HELDOUT = 2_000, 4
NOTHING_USED = "nothing-used.jsonl"


class Cost(Record):
    """What a run is expected to take; of one whose model can't be run, why."""

    run_id: str
    pass_s: float = 0.0
    seconds: float = 0.0
    problem: str = ""


class _Pass(Record):
    """What a model takes for an image, on the device that it was timed on; or why that isn't known."""

    pass_s: float = 0.0
    device: str = ""
    problem: str = ""


def foretell(requests: Sequence[Request], progress: Progress = silent) -> tuple[Cost, ...]:
    """Return what each run is expected to take on this machine; each model is timed once for each batch size, which takes seconds."""
    known: dict[tuple[object, ...], _Pass] = {}
    found: list[Cost] = []
    with scratch_jobs(progress) as jobs:
        for request in requests:
            timed = (request.model, request.revision, request.device, request.batch_size)
            if timed not in known:
                progress(f"timing {request.model}", len(known), len(requests))
                known[timed] = _timed(jobs, request)
            found.append(_cost(jobs, request, known[timed]))
    return tuple(found)


def _timed(jobs: Jobs, request: Request) -> _Pass:
    try:
        resolved = jobs.run(ResolveShapeTask(model=request.model, revision=request.revision, device=request.device))
        headline = measure_headline(jobs, resolved.baseline, batch_size=request.batch_size, device=resolved.device)
    except ProfilingAgentError as error:
        return _Pass(problem=str(error))
    return _Pass(pass_s=headline.pass_s, device=resolved.device)


def _cost(jobs: Jobs, request: Request, timed: _Pass) -> Cost:
    run_id = request.run_id or ""
    if timed.problem:
        return Cost(run_id=run_id, problem=timed.problem)
    # Of the run that is foretold nothing is used yet.
    budget = Budget(Timesheet(jobs.workspace.root / NOTHING_USED), timed.pass_s, request.time_budget_s)
    num_search = request.num_samples or NUM_SEARCH
    work = Work(
        num_calibration=NUM_CALIBRATION,
        num_search=most_searched(num_search, budget, request.goal),
        num_heldout=HELDOUT * num_search,
        num_deployments=num_tried_first(Plan(), budget, request.goal, deployment_choices(request, timed.device)),
        num_sessions=request.num_sessions,
        num_attempts=request.max_iterations if request.iterate else 1,
    )
    return Cost(
        run_id=run_id,
        pass_s=timed.pass_s,
        seconds=forecast(work, budget, Standing(stage="acquisition")).run_s,
    )
