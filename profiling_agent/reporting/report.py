"""Report of a run as a record: gathered at its end, read back, and what is derived from it."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from profiling_agent import schemas
from profiling_agent.data import is_local
from profiling_agent.errors import PlanError, RunError
from profiling_agent.jobs.tasks import Profiled
from profiling_agent.lib.io import DocumentError, read_record
from profiling_agent.lib.machine import environment
from profiling_agent.planning.digest import launch_text
from profiling_agent.pruning.widths import matching_names
from profiling_agent.reporting.units import count, drop, ms, percent, size, speedup
from profiling_agent.request import Request
from profiling_agent.runtimes.artifact import CardRow, HeldOutAccuracy, load_recipe
from profiling_agent.search.evaluator import EFFORTS
from profiling_agent.search.finalize import FinalChoice
from profiling_agent.workspace import MANIFEST, Workspace, read_manifest


class Summary(schemas.Record):
    """One model in one line; `top1` is measured on the held-out images."""

    variant: schemas.Variant
    deployment: schemas.Deployment = schemas.Deployment()  # what executes it
    attempt: int | None = None
    top1: float
    num_images: int
    latency_ms: float
    params: int
    macs: int
    size_bytes: int
    parameter_bytes: int
    peak_memory_bytes: int


class VariantRow(schemas.Record):
    """One variant of pruning and quantization on the search images, raced in its own sessions or in the screening session."""

    evaluation: schemas.Evaluation
    race_result: schemas.RaceResult | None = None


class LayerGroup(schemas.Record):
    """Sums over repeated layers, before and after; milliseconds are those of the profiling pass."""

    name: str
    params: int
    params_after: int
    macs: int
    macs_after: int
    latency_ms: float
    latency_after_ms: float


class Sensitivity(schemas.Record):
    """Expected cost and saving of cutting one unit of the baseline alone to each width."""

    unit: str
    kind: schemas.UnitKind
    width: int
    options: tuple[schemas.WidthOption, ...]

    def at(self, share: float) -> schemas.WidthOption:
        """Return the option whose kept share of the width is nearest to `share`."""
        return schemas.nearest_option(self.options, self.width, share)


class TimeRow(schemas.Record):
    """Total time of the jobs of one kind; `passes` is that in passes of the baseline, eager float32 on one image."""

    kind: str
    count: int
    seconds: float
    passes: float


class RunReport(schemas.Record):
    """Contents of `report.json`."""

    schema_version: int = 7
    run_id: str
    verdict: schemas.Verdict
    goal: schemas.Goal
    stopped: schemas.StopReason
    planned_by: str = ""  # who planned, and why
    spent: schemas.Spent | None = None  # what was asked of a language model
    decisions: tuple[schemas.Decided, ...] = ()  # what a person decided of the plans
    advice: tuple[schemas.Advice, ...] = ()  # after a miss: changed limits that measured candidates meet
    deployment_search: schemas.DeploymentSearch | None = None  # the deployments that the unpruned model was tried in
    baseline: Summary
    best: Summary
    heldout: schemas.Evaluation  # the returned model on the held-out images
    variants: tuple[VariantRow, ...]
    screening: schemas.Race | None = None  # the session that it was chosen by
    race: schemas.Race | None = None  # the sessions that the returned model was timed in
    attempts: tuple[schemas.Attempt, ...]
    kept_beside: str | None = None  # a candidate that failed on the held-out images
    notes: tuple[str, ...]
    acquired: schemas.Acquired
    input: schemas.InputSpec
    profiles: dict[str, Profiled]
    layers: tuple[LayerGroup, ...]
    on_gpu: tuple[str, ...] = ()  # what a pass leaves of the GPU, and its energy; empty on the CPU
    sensitivity: tuple[Sensitivity, ...] = ()
    times: tuple[TimeRow, ...] = ()  # where the run's time went, most first
    request: Request
    environment: schemas.Environment

    @property
    def judged(self) -> str:
        """Return the model that the contract was measured on: the returned one, or a candidate that held-out images refused."""
        is_refused = self.kept_beside is not None and self.best.variant is schemas.Variant.BASELINE
        return "the candidate that held-out images refused, kept beside" if is_refused else "the returned model"

    @property
    def certifying(self) -> str:
        """Return how many held-out images would certify the contract, as a sentence; empty if unknown."""
        number, total = self.verdict.images_to_certify, self.acquired.heldout.num_images
        if not number:
            return ""
        return f"About {number:,} held-out images would certify it{f'; there are {total:,}' if number > total else ''}."

    @property
    def race_result(self) -> schemas.RaceResult | None:
        """Return the race result of the returned model, or None if it was not timed."""
        return next((row.race_result for row in self.variants if row.evaluation.model == self.heldout.model), None)


def evidence_notes(profile: schemas.ModelProfile) -> tuple[str, ...]:
    """Return warnings on the evidence: that there is none, or that a busy machine timed it."""
    if profile.evidence_note is not None:
        return (f"no sensitivity was measured, so ratios are uniform: {profile.evidence_note}",)
    units = profile.evidence.units if profile.evidence else ()
    unsteady = sum(row.is_unsteady for row in units)
    note = f"the machine was busy while widths were timed: what {unsteady} of {len(units)} units save of the time is a guess"
    return (note,) if unsteady else ()


def gpu_lines(profiles: Mapping[str, schemas.ModelProfile]) -> tuple[str, ...]:
    """Return how far launches bound each model on a GPU, and the energy of an image; empty on the CPU."""
    lines: list[str] = []
    for name, profile in profiles.items():
        if profile.launch_bound_share is not None:
            lines.append(launch_text(profile.launch_bound_share, name))
        if (energy := profile.headline.energy) is not None:
            idle = "" if energy.idle_watts is None else f", idle {energy.idle_watts:.0f} W"
            lines.append(f"{name}: {energy.joules_per_image:.3g} J an image at {energy.watts:.0f} W{idle}")
    return tuple(lines)


def build_report(
    request: Request,
    final: FinalChoice,
    *,
    acquired: schemas.Acquired,
    deployment_search: schemas.DeploymentSearch | None,
    peak_memory_bytes: tuple[int, int],
    profiles: Mapping[str, tuple[Profiled, schemas.ModelProfile]],
    times: Mapping[str, tuple[int, float]],
    **fields: Any,
) -> RunReport:
    """Build the report of a run from its final choice, what each stage found, and other `fields` of the report as they are.

    `peak_memory_bytes` are of a fresh process that only loads and runs the baseline, and of one with the winner. `profiles` has
    `baseline` and, if another won, `best`. `times` has the number of jobs of each kind, and their seconds.
    """
    before, after = profiles["baseline"], profiles.get("best", profiles["baseline"])
    # The final sessions come last, because they replace a model's result of the screening session.
    races = [race for race in (final.screening, final.race) if race]
    results = {result.model.sha256: result for race in races for result in race.results}

    def summarise(evaluation: schemas.Evaluation, profiled: Profiled, peak_bytes: int, attempt: int | None) -> Summary:
        # Latency is that of the race, else that of the model's own process.
        result = results.get(evaluation.model.sha256)
        return Summary(
            variant=evaluation.variant,
            deployment=evaluation.deployment,
            attempt=attempt,
            top1=evaluation.top1,
            num_images=evaluation.predictions.num_images,
            latency_ms=result.latency.median_ms if result else profiled.latency_ms,
            peak_memory_bytes=peak_bytes,
            **evaluation.footprint.model_dump(),
        )

    # Without the orders of the channels.
    evidence = {row.unit: row.options for row in before[1].evidence.units} if before[1].evidence else {}
    return RunReport(
        run_id=request.run_id or "",
        verdict=final.verdict,
        goal=request.goal,
        deployment_search=deployment_search,
        baseline=summarise(final.heldout_baseline, before[0], peak_memory_bytes[0], None),
        best=summarise(final.heldout_winner, after[0], peak_memory_bytes[1], final.winner.attempt),
        heldout=final.heldout_winner,
        screening=final.screening,
        race=final.race,
        variants=tuple(VariantRow(evaluation=row, race_result=results.get(row.model.sha256)) for row in final.variants),
        kept_beside=final.kept_beside.evaluation.model.path if final.kept_beside else None,
        notes=(
            *acquired.notes,
            *evidence_notes(before[1]),
            *(deployment_search.notes if deployment_search else ()),
            *final.notes,
            *(final.race.notes if final.race else ()),
        ),
        acquired=acquired,
        profiles={name: profiled for name, (profiled, _) in profiles.items()},
        layers=_compare_layers(before[1], after[1]),
        on_gpu=gpu_lines({name: profile for name, (_, profile) in profiles.items()}),
        sensitivity=tuple(
            Sensitivity(unit=unit.name, kind=unit.kind, width=unit.width, options=evidence[unit.name])
            for unit in before[1].units
            if evidence.get(unit.name)
        ),
        times=tuple(
            TimeRow(kind=kind, count=count, seconds=seconds, passes=seconds / before[1].headline.pass_s)
            for kind, (count, seconds) in times.items()
        ),
        request=request,
        environment=environment(acquired.source.device),
        **fields,
    )


def _compare_layers(before: schemas.ModelProfile, after: schemas.ModelProfile) -> tuple[LayerGroup, ...]:
    """Return the layers of both profiles, merged if only their index differs; most MACs first."""
    names = [name for name in LayerGroup.model_fields if name != "name"]
    totals: defaultdict[str, dict[str, float]] = defaultdict(lambda: dict.fromkeys(names, 0.0))
    for suffix, profile in (("", before), ("_after", after)):
        for row in profile.layers:
            # An index is a whole segment of a name: in `layers.3`, but not in `fc1`.
            sums = totals[re.sub(r"(?<=\.)\d+(?=\.|$)", "#", row.name) or "(the model itself)"]
            sums[f"params{suffix}"] += row.params
            sums[f"macs{suffix}"] += row.macs
            sums[f"latency{suffix}_ms"] += row.latency_ms
    groups = [LayerGroup.model_validate({"name": name, **sums}) for name, sums in totals.items()]
    return tuple(sorted(groups, key=lambda group: (-group.macs, -group.latency_ms)))


def omissions(report: RunReport) -> tuple[str, ...]:
    """Return what was left out for lack of time, by the time budget or in proportion to the model, in run order."""
    lines, options = list[str](), report.deployment_search.options if report.deployment_search else ()
    if waiting := [option.deployment.name for option in options if option.wants_time]:
        lines.append(f"deployments that were not measured: {', '.join(waiting)}")
    if report.stopped is schemas.StopReason.TIME_SPENT:
        most = min(report.request.max_iterations, EFFORTS[report.request.effort].num_attempts)
        lines.append(f"plans: {len(report.attempts)} of up to {most} were measured")
    num_seen, num_all = report.heldout.predictions.num_images, report.acquired.heldout.num_images
    accuracy = next(term for term in report.verdict.terms if term.name == "accuracy")
    if accuracy.holds and accuracy.bound is not None and accuracy.bound > accuracy.required and num_seen < num_all:
        lines.append(f"held-out images: {num_seen:,} of {num_all:,} were looked at")
    return tuple(lines)


def differences(reports: Mapping[str, RunReport]) -> tuple[str, ...]:
    """Return a line for each difference that makes the runs' times incomparable; empty if there is none."""
    values: defaultdict[str, dict[str, object]] = defaultdict(dict)
    for name, report in reports.items():
        host = report.environment
        parts = {"machine": host.machine, "instructions": ", ".join(host.cpu_flags), "system": host.system}
        for part, value in {**parts, "batch size": report.request.batch_size, **host.versions}.items():
            values[part][name] = value
    return tuple(
        f"{part}: {'; '.join(f'{name}: {value}' for name, value in row.items())}"
        for part, row in values.items()
        if len(row) < len(reports) or len(set(row.values())) > 1
    )


def measures(report: RunReport) -> tuple[tuple[str, str, str, str], ...]:
    """Return what was measured before and after: the label, the field of `Summary`, and both values as texts."""
    shown: tuple[tuple[str, str, Callable[[float], str]], ...] = (
        (f"top-1 on {report.best.num_images:,} held-out images", "top1", percent),
        (f"latency of a batch of {report.request.batch_size}", "latency_ms", ms),
        ("params", "params", count),
        ("MACs of one image", "macs", count),
        ("on disk", "size_bytes", size),
        ("in memory", "parameter_bytes", size),
        ("peak memory of a process", "peak_memory_bytes", size),
    )
    return tuple(
        (label, field, show(getattr(report.baseline, field)), show(getattr(report.best, field)))
        for label, field, show in shown
    )


def predictions(attempt: schemas.Attempt, report: RunReport) -> tuple[tuple[str, str, str, str], ...]:
    """Return each predicted quantity of a pruned attempt: its name, prediction, measurement, and a mark if one is twice the other.

    Less than 0.0001 nats and 2% of the time are noise.
    """
    dry_run, rows = attempt.dry_run, list[tuple[str, float, float, float, Callable[[float], str]]]()
    if dry_run is None or attempt.pruned_model is None:
        return ()
    if attempt.deployed is not None:
        rows.append(("params", dry_run.params, attempt.deployed.footprint.params, 0, count))
        rows.append(("MACs", dry_run.macs, attempt.deployed.footprint.macs, 0, count))
    if dry_run.kl is not None and attempt.calibration_kl is not None:
        rows.append(("KL", dry_run.kl, attempt.calibration_kl, 1e-4, lambda nats: f"{nats:.2g} nats"))
    # The time of its float32 deployment, in torch as the prediction is.
    sha256 = attempt.pruned_model.sha256
    race_result = next((row.race_result for row in report.variants if row.evaluation.model.sha256 == sha256), None)
    if dry_run.latency_saved is not None and race_result is not None:
        saved = 1 - 1 / race_result.speedup
        rows.append(("time in float32", dry_run.latency_saved, saved, 0.02, lambda share: f"{percent(share)} less"))
    result: list[tuple[str, str, str, str]] = []
    for name, predicted, measured, noise, show in rows:
        is_off = max(predicted, measured) > max(noise, 2 * min(predicted, measured))
        result.append((name, show(predicted), show(measured), "off by more than twice" if is_off else ""))
    return tuple(result)


class Choice(NamedTuple):
    """Width of one unit before and after, and the reason."""

    unit: str
    width: int
    kept: int
    reason: str


def final_attempt(report: RunReport) -> schemas.Attempt | None:
    """Return the attempt that the returned model came from, else the last one, or None without attempts."""
    chosen = next((attempt for attempt in report.attempts if attempt.number == report.best.attempt), None)
    return chosen or (report.attempts[-1] if report.attempts else None)


def unit_decisions(report: RunReport, attempt: schemas.Attempt) -> tuple[Choice, ...]:
    """Return what an attempt did to each unit that could be cut, and why, in the model's order."""
    cuts = {cut.unit.name: cut for cut in attempt.dry_run.cuts} if attempt.dry_run else {}
    sensitivities = {row.unit: row for row in report.sensitivity}
    result: list[Choice] = []
    for name in dict.fromkeys([*sensitivities, *cuts]):
        cut, row = cuts.get(name), sensitivities.get(name)
        width = cut.unit.width if cut else sensitivities[name].width
        keep = cut.keep if cut else max((option.keep for option in row.options), default=width) if row else width
        option = row.at(keep / width) if row else None
        cost = f"{option.kl:.2g} nats alone for {count(option.params_saved)} params at {option.keep}" if option else ""
        reason = _reason((name, *cut.unit.members) if cut else (name,), cut, cost, attempt)
        result.append(Choice(unit=name, width=width, kept=cut.keep if cut else width, reason=reason))
    return tuple(result)


def _reason(names: tuple[str, ...], cut: schemas.Cut | None, cost: str, attempt: schemas.Attempt) -> str:
    plan, notes = attempt.plan, attempt.dry_run.notes if attempt.dry_run else ()
    if cut is not None:
        rec = next((rec for rec in plan.pruning if _matches(rec.layer, names)), None)
        why = (
            (f"the plan cuts {rec.pruning_ratio:.0%} of it", rec.justification) if rec else ("the allocator's choice",)
        )
        return ": ".join(filter(None, (*why, cost)))
    if note := next((note for note in notes if repr(names[0]) in note), None):
        return note
    for cap in plan.caps:
        if cap.max_ratio == 0 and _matches(cap.layer, names):
            return f"the plan leaves {cap.layer!r} alone"
    return "the plan doesn't name it" if plan.target is None else f"the same is saved for less elsewhere: {cost}"


def _matches(pattern: str, names: tuple[str, ...]) -> bool:
    try:
        return bool(matching_names(pattern, names))
    except PlanError:
        return False


REPORT = "report.json"
FORKS = "forks"


def read_report(folder: Path) -> RunReport:
    """Return the report of a finished run, or of a fork of one.

    Raises:
        RunError: the folder is not a run, the run has no report yet, or the report is damaged or of another version.
    """
    path = folder / REPORT
    if not path.is_file():
        read_manifest(folder)
        raise RunError(f"run {str(folder)!r} has no report yet: finish it with `profiling-agent resume {folder}`")
    try:
        return read_record(RunReport, path)
    except (OSError, DocumentError) as error:
        raise RunError(f"{str(path)!r} is damaged or of another version ({error}): run again") from error


def results_folder(root: Path, report: RunReport) -> Path:
    """Return where a report belongs: the run folder, or a fork's own if the run's report is on another request or other plans.

    A thread forked from an earlier checkpoint shares the run folder and its jobs; the earlier report stays as it was.
    """

    def identity(report: RunReport) -> str:
        plans = (attempt.plan.model_dump_json() for attempt in report.attempts)
        return "\n".join((report.request.model_dump_json(), *plans))

    try:
        earlier = read_report(root)
    except RunError:
        return root
    if identity(earlier) == identity(report):
        return root
    return root / FORKS / hashlib.sha256(identity(report).encode()).hexdigest()[:12]


def run_of(folder: Path) -> Path:
    """Return the run folder that the results of a run, or of a fork, belong to."""
    folder = folder.resolve()
    return folder if (folder / MANIFEST).is_file() or folder.parent.name != FORKS else folder.parents[1]


def is_run(source: Path) -> bool:
    """Return whether a folder is a run's, or a fork's."""
    return (source / MANIFEST).is_file() or (source / REPORT).is_file()


def models_of_all(sources: Sequence[Path]) -> dict[str, Path]:
    """Return the folders of the models behind runs' verdicts, numbered as in `pick`, the baseline first, and saved models themselves.

    The models of one of several runs have its path before their names.

    Raises:
        ArtifactError: a source is neither a run nor a saved model.
        RunError: a run has no report yet.
    """
    models: dict[str, Path] = {}
    for source in sources:
        if not is_run(source):
            models[f"{source} ({load_recipe(source).deployment.name})"] = source.resolve()
            continue
        workspace, origin = Workspace(run_of(source)), f"{source}: " if len(sources) > 1 else ""
        for number, variant in enumerate(read_report(source).variants):
            row = variant.evaluation
            name = f"{origin}{number} {row.variant} ({row.deployment.name})"
            models[name] = workspace.path(row.model).resolve()
    return models


def card_rows(report: RunReport) -> tuple[CardRow, ...]:
    """Return the model card's rows, before and after, formatted as in the report."""
    return tuple(CardRow(name=name, before=before, after=after) for name, _, before, after in measures(report))


def card_notes(report: RunReport) -> tuple[str, ...]:
    """Return the verdict, its intervals, and where they were measured."""
    result, env = report.race_result, report.environment
    notes = [f"{report.verdict.outcome}: {report.verdict.explanation}."]
    if report.heldout.drop:
        notes.append(f"Top-1 lost: {drop(report.heldout.drop)}.")
    if result:
        sessions = f"{len(result.turns)} sessions on one machine"
        notes.append(f"Times as fast as the baseline in eager float32, in {sessions}: {speedup(result)}.")
    notes.append(f"Measured on {env.machine}, {env.system}, device {report.acquired.source.device}.")
    return tuple(notes)


def card_judged(report: RunReport) -> HeldOutAccuracy | None:
    """Return the held-out result as metadata for the Hub, or None if the data set isn't on the Hub."""
    request = report.request
    if is_local(request.dataset) or "/" not in request.dataset:
        return None
    split = report.acquired.heldout.source_split
    return HeldOutAccuracy(dataset=request.dataset, config=request.dataset_config, split=split, top1=report.best.top1)
