"""Matching: whether models and data sets can be had and go together, looked at before anything is run on them."""

from collections.abc import Iterable, Mapping
from typing import Any

from profiling_agent.errors import AcquisitionError
from profiling_agent.jobs.runner import Jobs, scratch_jobs
from profiling_agent.jobs.tasks import MatchLabelsTask
from profiling_agent.progress import Progress, silent
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
