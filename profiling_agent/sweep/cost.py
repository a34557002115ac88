"""Cost of runs before they are made: a pass of each model is timed, and the rest is foretold from that as a run foretells it."""

from collections.abc import Sequence

from profiling_agent.acquisition.sampling import NUM_CALIBRATION
from profiling_agent.errors import ProfilingAgentError
from profiling_agent.iteration.budget import Budget
from profiling_agent.iteration.deployments import deployment_choices, in_rounds, possible_deployments
from profiling_agent.iteration.evaluator import most_searched
from profiling_agent.iteration.forecast import Standing, Work, forecast
from profiling_agent.jobs.match import scratch_jobs
from profiling_agent.jobs.profile import measure_headline
from profiling_agent.jobs.tasks import ResolveShapeTask
from profiling_agent.progress import Progress, silent
from profiling_agent.records import Plan, Record
from profiling_agent.request import Request

# As many as a run draws at most where nobody says, and held out at most for each.
NUM_SEARCH, HELDOUT = 2_000, 4


class Cost(Record):
    """What a run is expected to take, at most; of one whose model can't be run, why."""

    run_id: str
    pass_s: float = 0.0
    seconds: float = 0.0
    problem: str = ""


def foretell(requests: Sequence[Request], progress: Progress = silent) -> tuple[Cost, ...]:
    """Return what each run is expected to take on this machine; each model is timed once for each batch size, which takes seconds."""
    known: dict[tuple[object, ...], Cost] = {}
    found: list[Cost] = []
    for request in requests:
        timed = (request.model, request.revision, request.device, request.batch_size)
        asked = (*timed, request.model_dump_json(exclude={"run_id", "output", "seed"}))
        if asked not in known:
            progress(f"timing {request.model}", len(found), len(requests))
            known[asked] = _cost(request, progress)
        found.append(known[asked].model_copy(update={"run_id": request.run_id or ""}))
    return tuple(found)


def _cost(request: Request, progress: Progress) -> Cost:
    with scratch_jobs(progress) as jobs:
        try:
            resolved = jobs.run(ResolveShapeTask(model=request.model, revision=request.revision, device=request.device))
            headline = measure_headline(jobs, resolved.baseline, batch_size=request.batch_size, device=resolved.device)
        except ProfilingAgentError as error:
            return Cost(run_id="", problem=str(error))
        budget = Budget(jobs.timesheet, headline.pass_s, request.time_budget_s)
        return Cost(run_id="", pass_s=headline.pass_s, seconds=_seconds(request, budget, resolved.device))


def _seconds(request: Request, budget: Budget, device: str) -> float:
    choices = deployment_choices(request, device)
    tried = () if request.selection == "paper" else possible_deployments(Plan(), choices)
    num_search = request.num_samples or NUM_SEARCH
    work = Work(
        num_calibration=NUM_CALIBRATION,
        num_search=most_searched(num_search, budget, request.goal),
        num_heldout=HELDOUT * num_search,
        num_deployments=len(in_rounds(tried, budget, request.goal, choices)[0].deployments),
        num_sessions=request.num_sessions,
        num_attempts=request.max_iterations if request.iterate else 1,
    )
    return forecast(work, budget, Standing(stage="acquisition")).run_s
