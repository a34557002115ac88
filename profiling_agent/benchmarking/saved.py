"""Race or measure saved models again: on another machine, at another batch size, or beside each other. No torch here."""

from collections.abc import Sequence
from pathlib import Path

from pydantic import Field, ValidationError

from profiling_agent.artifacts.folder import open_folder
from profiling_agent.artifacts.recipe import RECIPE
from profiling_agent.benchmarking.race import race
from profiling_agent.benchmarking.throughput import check_same_machine, compare, machine, memory_use, taken, throughput
from profiling_agent.errors import RequestError
from profiling_agent.processes.machine_lock import machine_turn
from profiling_agent.progress import Progress, silent
from profiling_agent.records import ArtifactRef, Comparison, Race, Record, Taken, Variant
from profiling_agent.reporting.results import REPORT, read_report, run_of
from profiling_agent.workspace import MANIFEST, file_sha256


def race_saved(
    sources: Sequence[Path], *, batch_size: int, device: str = "cpu", progress: Progress = silent
) -> tuple[dict[str, str], Race]:
    """Return the race of saved models, compared with the first, and the name of each by the path in its lap.

    A source is a saved model, or a run: then all models that its verdict rests on, the baseline first.

    Raises:
        ArtifactError: a saved model is damaged.
        JobError: the first one can't be run.
        RequestError: there are fewer than two models.
        RunError: a run has no report yet.
    """
    entries = [entry for source in sources for entry in _models(source)]
    if len(entries) < 2:
        raise RequestError(f"a race takes two models, {len(entries)} was given: name a run, or another saved model")
    refs = tuple((variant, _ref(folder)) for _, variant, folder in entries)
    with machine_turn(progress):
        held = race(refs, root=Path("/"), batch_size=batch_size, device=device, progress=progress)
    return {ref.path: name for (_, ref), (name, _, _) in zip(refs, entries, strict=True)}, held


class Measured(Record):
    """What one saved model takes, under the name that it was given."""

    name: str
    taken: Taken


class Measurements(Record):
    """What `profiling-agent measure --json` writes, and `--against` reads."""

    models: tuple[Measured, ...] = Field(min_length=1)


def measure_saved(sources: Sequence[Path], *, device: str = "cpu", progress: Progress = silent) -> Measurements:
    """Return what saved models take on this machine; a run stands for its baseline and its best model.

    Raises:
        ArtifactError: a saved model is damaged.
        JobError: one of them can't be run at batch size 1.
        RunError: a run has no report yet.
    """
    entries = [entry for source in sources for entry in _before_and_after(source)]
    refs = [_ref(folder) for _, _, folder in entries]
    measured: list[Measured] = []
    with machine_turn(progress):
        through = throughput(refs, root=Path("/"), device=device, progress=progress)
        for number, (ref, (name, _, _)) in enumerate(zip(refs, entries, strict=True)):
            progress("reading memory", number, len(refs))
            use = memory_use(ref, root=Path("/"), batch_size=1, device=device)
            measured.append(Measured(name=name, taken=taken(ref, through, use)))
    return Measurements(models=tuple(measured))


def read_measurements(path: Path, *, device: str = "cpu") -> Measurements:
    """Return what an earlier `profiling-agent measure --json` wrote on this machine.

    Raises:
        RequestError: the file holds no measurements, or those of another machine.
    """
    try:
        earlier = Measurements.model_validate_json(path.read_bytes())
    except (OSError, ValidationError) as error:
        said = "measurements of `profiling-agent measure --json`"
        raise RequestError(f"{str(path)!r} doesn't hold {said}: write it again") from error
    check_same_machine(earlier.models[0].taken.machine, machine(device))
    return earlier


def compare_measurements(measured: Measurements, earlier: Measurements) -> tuple[Comparison, ...]:
    """Return each model beside the first one of `earlier`; RequestError where that is another machine's."""
    return tuple(compare(earlier.models[0].taken, model.taken) for model in measured.models)


def _before_and_after(source: Path) -> list[tuple[str, Variant, Path]]:
    models = _models(source)
    if not _is_run(source):
        return models
    best = (source / "best").resolve()
    return [models[0], *(model for model in models[1:] if model[2] == best)]


def _models(source: Path) -> list[tuple[str, Variant, Path]]:
    """Return what is to be raced of a source: a name, its corner, its folder."""
    if not _is_run(source):
        recipe = open_folder(source.resolve(), verify=False)
        return [(f"{source} ({recipe.form.name})", Variant.BASELINE, source.resolve())]
    report = read_report(source)
    rows = [row.evaluation for row in report.variants]
    root = run_of(source)
    return [(f"{row.variant} ({row.form.name})", row.variant, (root / row.model.path).resolve()) for row in rows]


def _is_run(source: Path) -> bool:
    return (source / MANIFEST).is_file() or (source / REPORT).is_file()


def _ref(folder: Path) -> ArtifactRef:
    size_bytes = sum(file.stat().st_size for file in folder.iterdir())
    return ArtifactRef(path=str(folder), sha256=file_sha256(folder / RECIPE), size_bytes=size_bytes, kind="model")
