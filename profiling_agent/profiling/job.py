"""Profile a saved model: the headline in a fresh process, the rest in the worker."""

from profiling_agent.jobs.runner import Jobs
from profiling_agent.jobs.tasks import HeadlineTask, Profiled, ProfileTask
from profiling_agent.records import ArtifactRef


def profile_artifact(jobs: Jobs, model: ArtifactRef, *, batch_size: int, device: str) -> Profiled:
    """Return where the profile of `model` lies, and its totals."""
    headline = jobs.run(HeadlineTask(model=model, batch_size=batch_size, device=device))
    return jobs.run(ProfileTask(model=model, batch_size=batch_size, device=device, headline=headline))
