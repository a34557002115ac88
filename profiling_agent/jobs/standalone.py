"""Profile a model that is named, without a data set or a run."""

from pathlib import Path

from profiling_agent.jobs.profile import profile_artifact, read_profile
from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import ResolveShapeTask
from profiling_agent.progress import Progress, silent
from profiling_agent.records import ModelProfile
from profiling_agent.request import Request
from profiling_agent.workspace import Workspace


def profile_source(request: Request, folder: Path, *, batch_size: int, progress: Progress = silent) -> ModelProfile:
    """Return the profile of the request's model; `folder` takes the work files and is the caller's to remove."""
    workspace = Workspace(folder)
    workspace.jobs.mkdir(parents=True)
    jobs = Jobs(workspace, progress)
    try:
        task = ResolveShapeTask(model=request.model, revision=request.revision, device=request.device)
        resolved = jobs.run(task)
        profiled = profile_artifact(jobs, resolved.baseline, batch_size=batch_size, device=resolved.device)
        return read_profile(workspace, profiled)
    finally:
        jobs.close()
