"""Saved models raced or measured again: on another machine, at another batch size, or beside each other. No torch here."""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from profiling_agent.artifacts.folder import model_bytes, named_folder, open_folder
from profiling_agent.artifacts.recipe import RECIPE, TORCH
from profiling_agent.benchmarking.race import SHORT, TIMED, Track, choose, hold_one, hold_sessions, pool
from profiling_agent.benchmarking.throughput import memory_use, taken, throughput
from profiling_agent.deployment.registry import missing
from profiling_agent.errors import ArtifactError, RequestError
from profiling_agent.files import file_sha256
from profiling_agent.processes.environment import child_environment
from profiling_agent.processes.machine_lock import machine_lock
from profiling_agent.processes.started import fork_server
from profiling_agent.progress import Progress, silent
from profiling_agent.records import NUM_SESSIONS, ArtifactRef, Dropped, Race, Record, RuntimeName, Taken, Variant


@dataclass(frozen=True, slots=True)
class SavedModel:
    """A saved model: the name that readers see, the variant that it is of its run, and its folder."""

    name: str
    variant: Variant
    folder: Path


def race_saved(
    models: Sequence[SavedModel],
    *,
    batch_size: int,
    num_sessions: int = NUM_SESSIONS,
    device: str = "cpu",
    progress: Progress = silent,
) -> tuple[dict[str, str], Race]:
    """Return the race of saved models, compared with the first, and the name of each by the path in its race result.

    Every session starts all of them anew. What this machine can't run, by its runtime or in a session beforehand, has dropped out.

    Raises:
        ArtifactError: one of them isn't there, or the first one's runtime isn't installed.
        JobError: the first can't be run.
        RequestError: there are fewer than two models, or nothing can be run beside the first.
    """
    if len(models) < 2:
        raise RequestError(f"a race takes two models, {len(models)} was given: name a run, or another saved model")
    refs = [_ref(model.folder) for model in models]
    entries = [(model.variant, ref) for model, ref in zip(models, refs, strict=True)]
    runtimes: list[RuntimeName] = [open_folder(model.folder, verify=False).deployment.runtime for model in models]
    lacking = {place: line for place, name in enumerate(runtimes) if (line := missing(name))}
    if 0 in lacking:
        raise ArtifactError(f"{models[0].name}, which all are compared with, can't be run here: {lacking[0]}")
    dropped = [Dropped(variant=entries[place][0], model=refs[place], reason=line) for place, line in lacking.items()]
    entries = [entry for place, entry in enumerate(entries) if place not in lacking]
    with (
        machine_lock(progress, "a measurement of saved models"),
        fork_server(TIMED, child_environment()) if TORCH.intersection(runtimes) else nullcontext() as server,
    ):
        track = Track(root=Path("/"), batch_size=batch_size, device=device, server=server)
        first = choose(entries, track, limits=SHORT, progress=progress)
        dropped += first.dropped
        out = [each.model for each in first.dropped]
        entries = [entry for entry in entries if entry[1] not in out]
        if len(entries) < 2:
            raise RequestError(f"none but the first can be run here: {'; '.join(each.reason for each in dropped)}")
        sessions, void = hold_sessions(lambda number: hold_one(entries, track, number, progress=progress), num_sessions)
    held = pool(sessions, void).model_copy(update={"dropped": tuple(dropped)})
    return {ref.path: model.name for ref, model in zip(refs, models, strict=True)}, held


class MeasuredModel(Record):
    """What one saved model takes, under the name that it was given."""

    name: str
    taken: Taken


class Measurements(Record):
    """What `profiling-agent measure --json` writes."""

    models: tuple[MeasuredModel, ...] = Field(min_length=1)


def measure_saved(models: Sequence[SavedModel], *, device: str = "cpu", progress: Progress = silent) -> Measurements:
    """Return what saved models take on this machine.

    Raises:
        JobError: one of them can't be run at batch size 1.
    """
    refs = [_ref(model.folder) for model in models]
    measured: list[MeasuredModel] = []
    with machine_lock(progress, "a measurement of saved models"):
        through = throughput(refs, root=Path("/"), device=device, progress=progress)
        for number, (ref, model) in enumerate(zip(refs, models, strict=True)):
            progress("reading memory", number, len(refs))
            use = memory_use(ref, root=Path("/"), batch_size=1, device=device)
            measured.append(MeasuredModel(name=model.name, taken=taken(ref, through, use)))
    return Measurements(models=tuple(measured))


def saved_model(source: Path) -> SavedModel:
    """Return a saved model under the path that it was given; ArtifactError where it is none."""
    folder = named_folder(source)
    return SavedModel(f"{source} ({open_folder(folder, verify=False).deployment.name})", Variant.BASELINE, folder)


def _ref(folder: Path) -> ArtifactRef:
    open_folder(folder, verify=False)
    sha256, size_bytes = file_sha256(folder / RECIPE), model_bytes(folder)
    return ArtifactRef(path=str(folder), sha256=sha256, size_bytes=size_bytes, kind="model")
