"""Single jobs without a run: labels matched, a model profiled."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from profiling_agent.documents import read_record
from profiling_agent.errors import AcquisitionError
from profiling_agent.jobs.runner import Jobs, jobs_in, scratch_jobs
from profiling_agent.jobs.tasks import (
    EvidenceTask,
    HeadlineTask,
    MatchLabelsTask,
    Profiled,
    ProfileTask,
    ResolveShapeTask,
)
from profiling_agent.progress import Progress, silent
from profiling_agent.records import ArtifactRef, Headline, ModelProfile, SplitInfo
from profiling_agent.request import Request

MAX_NAMED = 5


def check_match(jobs: Jobs, asked: Mapping[str, Any]) -> None:
    """Raise AcquisitionError where a model and a data set, in the fields of a request, can't be had, or a label is no class of the model."""
    matched = jobs.run(MatchLabelsTask.model_validate(asked))
    if unknown := matched.unknown:
        shown = ", ".join(map(repr, unknown[:MAX_NAMED]))
        raise AcquisitionError(
            f"{len(unknown)} of the {len(matched.labels)} labels of split {matched.split!r} are no class of the model "
            f"({shown}{', ...' if len(unknown) > MAX_NAMED else ''}): use the data that it was trained for"
        )


def check_matches(requests: Iterable[Request], progress: Progress = silent) -> None:
    """Raise AcquisitionError, naming the two, where the model and the data set of a request can't be had or don't go together."""
    fields = tuple(name for name in MatchLabelsTask.model_fields if name in Request.model_fields)
    every = {tuple(getattr(request, name) for name in fields) for request in requests}
    with scratch_jobs(progress) as jobs:
        for values in sorted(every, key=str):
            asked = dict(zip(fields, values, strict=True))
            try:
                check_match(jobs, asked)
            except AcquisitionError as error:
                raise AcquisitionError(f"{asked['model']} on {asked['dataset']}: {error}") from error


def profile_artifact(
    jobs: Jobs,
    model: ArtifactRef,
    *,
    batch_size: int,
    device: str,
    calibration: SplitInfo | None = None,
    seed: int = 0,
    cache: bool = True,
    headline: Headline | None = None,
) -> Profiled:
    """Return where the profile of `model` lies, and its totals; `calibration` images give evidence on its units.

    With `cache`, evidence of an earlier run is used where that had the same model, images and machine. Its `headline` is measured where it isn't given.
    """
    if headline is None:
        headline = measure_headline(jobs, model, batch_size=batch_size, device=device)
    if calibration is None:
        return jobs.run(ProfileTask(model=model, batch_size=batch_size, device=device, headline=headline))
    task = EvidenceTask(
        model=model,
        batch_size=batch_size,
        device=device,
        headline=headline,
        calibration=calibration,
        seed=seed,
        cache=cache,
    )
    return jobs.run(task)


def measure_headline(jobs: Jobs, model: ArtifactRef, *, batch_size: int, device: str) -> Headline:
    """Return the latency and the memory of `model`; the first that a run measures is its baseline, by which its jobs' limits go."""
    headline = jobs.run(HeadlineTask(model=model, batch_size=batch_size, device=device))
    if jobs.pass_s is None:
        jobs.learn(headline, device)
    return headline


def read_profile(jobs: Jobs, profiled: Profiled) -> ModelProfile:
    """Return the full profile that a job left; RunError where the file is missing or damaged."""
    return read_record(ModelProfile, jobs.path(profiled.profile))


def profile_source(request: Request, folder: Path, *, batch_size: int, progress: Progress = silent) -> ModelProfile:
    """Return the profile of the request's model, without a data set; `folder` takes the work files and is the caller's to remove."""
    with jobs_in(folder, progress) as jobs:
        resolved = jobs.run(ResolveShapeTask(model=request.model, revision=request.revision, device=request.device))
        profiled = profile_artifact(jobs, resolved.baseline, batch_size=batch_size, device=resolved.device)
        return read_profile(jobs, profiled)
