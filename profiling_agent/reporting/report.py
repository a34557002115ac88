"""Report of a run as a record, gathered from the journal and the run folder."""

import re
from collections import defaultdict
from collections.abc import Callable, Mapping

from profiling_agent import schemas
from profiling_agent.errors import PlanError
from profiling_agent.jobs.tasks import Profiled
from profiling_agent.lib.machine import environment
from profiling_agent.planning.digest import launch_text
from profiling_agent.pruning.widths import matching_names
from profiling_agent.reporting.units import count, percent
from profiling_agent.request import Request
from profiling_agent.search.evaluator import EFFORTS
from profiling_agent.search.finalize import FinalChoice
from profiling_agent.workspace import REPORT_VERSION


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

    schema_version: int = REPORT_VERSION
    run_id: str
    verdict: schemas.Verdict
    goal: schemas.Goal
    stopped: schemas.StopReason
    planned_by: str = ""  # who planned, and why
    spent: schemas.Spent | None = None  # what was asked of a language model
    decisions: tuple[schemas.Decided, ...] = ()  # what a person decided of the plans
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
    artifacts: dict[str, str]
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
    if not (unsteady := sum(row.is_unsteady for row in units)):
        return ()
    return (
        f"the machine was busy while widths were timed: what {unsteady} of {len(units)} units save of the time is a guess, "
        "and widths that save none may have been cut to",
    )


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


def build_report(  # noqa: PLR0913 (a report has a part of every stage)
    request: Request,
    final: FinalChoice,
    *,
    acquired: schemas.Acquired,
    input: schemas.InputSpec,
    deployment_search: schemas.DeploymentSearch | None,
    peak_memory_bytes: tuple[int, int],
    attempts: tuple[schemas.Attempt, ...],
    stopped: schemas.StopReason,
    planned_by: str,
    spent: schemas.Spent | None,
    decisions: tuple[schemas.Decided, ...],
    profiles: Mapping[str, tuple[Profiled, schemas.ModelProfile]],
    times: Mapping[str, tuple[int, float]],
) -> RunReport:
    """Build the report of a run from its final choice and what each stage found.

    `peak_memory_bytes` are of a fresh process that only loads and runs the baseline, and of one with the winner. `profiles` has
    `baseline` and, if another won, `best`. `times` has the number of jobs of each kind, and their seconds.
    """
    before, after = profiles["baseline"], profiles.get("best", profiles["baseline"])
    # The final sessions come last, because they replace a model's result of the screening session.
    races = [race for race in (final.screening, final.race) if race]
    results = {result.model.sha256: result for race in races for result in race.results}
    artifacts = {"best": "best", "report": "report.html", "text": "report.md", "json": "report.json"}
    artifacts |= {f"{name} profile": profiled.profile.path for name, (profiled, _) in profiles.items()}
    # Several attempts may share a deployment, so each has its number for `pick`.
    artifacts |= {
        f"candidate {number}, {row.variant} ({row.deployment.name})": row.model.path
        for number, row in enumerate(final.variants)
    }

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
        stopped=stopped,
        planned_by=planned_by,
        spent=spent,
        decisions=decisions,
        deployment_search=deployment_search,
        baseline=summarise(final.heldout_baseline, before[0], peak_memory_bytes[0], None),
        best=summarise(final.heldout_winner, after[0], peak_memory_bytes[1], final.winner.attempt),
        heldout=final.heldout_winner,
        screening=final.screening,
        race=final.race,
        variants=tuple(VariantRow(evaluation=row, race_result=results.get(row.model.sha256)) for row in final.variants),
        attempts=attempts,
        kept_beside=final.kept_beside.evaluation.model.path if final.kept_beside else None,
        notes=(
            *acquired.notes,
            *(f"no {kind} can be cut: {reason}" for kind, reason in before[1].absent.items()),
            *evidence_notes(before[1]),
            *(deployment_search.notes if deployment_search else ()),
            *final.notes,
            *(final.race.notes if final.race else ()),
        ),
        acquired=acquired,
        input=input,
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
        artifacts=artifacts,
        request=request,
        environment=environment(acquired.source.device),
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
    options = report.deployment_search.options if report.deployment_search else ()
    waiting = [option for option in options if option.wants_time]
    untried = ", ".join(option.deployment.name for option in waiting if option.deployed is None)
    unmeasured = ", ".join(option.deployment.name for option in waiting if option.deployed is not None)
    num_seen, num_all = report.heldout.predictions.num_images, report.acquired.heldout.num_images
    accuracy = next(term for term in report.verdict.terms if term.name == "accuracy")
    is_cut = accuracy.holds and accuracy.bound is not None and accuracy.bound > accuracy.required and num_seen < num_all
    max_plans = min(report.request.max_iterations, EFFORTS[report.request.effort].num_attempts)
    plans = f"{len(report.attempts)} of up to {max_plans}"
    cases = (
        (bool(untried), f"deployments that were not tried: {untried}"),
        (bool(unmeasured), f"deployments that were made and not measured: {unmeasured}"),
        (report.stopped is schemas.StopReason.TIME_SPENT, f"plans: {plans} were measured"),
        (is_cut, f"held-out images: {num_seen:,} of {num_all:,} were looked at"),
    )
    return tuple(text for applies, text in cases if applies)


def differences(reports: Mapping[str, RunReport]) -> tuple[str, ...]:
    """Return a line for each difference that makes the runs' times incomparable; empty if there is none."""
    environments = {name: report.environment for name, report in reports.items()}
    # All that times depend on, except software.
    machines = {
        name: f"{here.machine} ({', '.join(here.cpu_flags) or 'no vector extensions of note'}; {here.system}, {here.device})"
        for name, here in environments.items()
    }
    other = "runs of different machines, whose times and speed-ups aren't compared"
    compared = [
        (other, machines, "; race their models on one of them (profiling-agent race)"),
        ("times are of batches of different sizes", {n: f"{r.request.batch_size}" for n, r in reports.items()}, ""),
    ]
    for library in sorted({library for here in environments.values() for library in here.versions}):
        versions = {name: here.versions.get(library, "none") for name, here in environments.items()}
        compared.append((f"times are of different versions of {library}", versions, ""))
    lines: list[str] = []
    for what, values, advice in compared:
        runs = {value: [name for name in values if values[name] == value] for value in values.values()}
        if len(runs) > 1:
            text = "; ".join(f"{', '.join(names)}: {value}" for value, names in runs.items())
            lines.append(f"{what}: {text}{advice}")
    return tuple(lines)


# A prediction that differs from the measurement by more than this factor is marked.
MAX_FACTOR = 2.0
# Smaller differences in nats and in shares of time are noise, so no prediction is marked.
MIN_NATS, MIN_SHARE = 1e-4, 0.02


class ForecastCheck(schemas.Record):
    """Predicted and measured value of one quantity of an attempt."""

    what: str
    predicted: str
    measured: str
    is_off: bool


class Choice(schemas.Record):
    """Width of one unit before and after, and the reason."""

    unit: str
    width: int
    kept: int
    reason: str


def is_off(predicted: float, measured: float, floor: float) -> bool:
    """Return whether prediction and measurement differ by more than twice, if the larger one is above `floor`."""
    larger, smaller = max(predicted, measured), min(predicted, measured)
    return larger > floor and larger > MAX_FACTOR * max(smaller, 0.0)


def predictions(attempt: schemas.Attempt, report: RunReport) -> tuple[ForecastCheck, ...]:
    """Return what was predicted of an attempt next to what was measured; empty if it was not pruned."""
    dry_run, rows = attempt.dry_run, list[ForecastCheck]()
    if dry_run is None or attempt.pruned_model is None:
        return ()

    def add(what: str, predicted: float, measured: float, floor: float, show: Callable[[float], str]) -> None:
        off = is_off(predicted, measured, floor)
        rows.append(ForecastCheck(what=what, predicted=show(predicted), measured=show(measured), is_off=off))

    if attempt.deployed is not None:
        add("params", dry_run.params, attempt.deployed.footprint.params, 0, count)
        add("macs", dry_run.macs, attempt.deployed.footprint.macs, 0, count)
    if dry_run.kl is not None and attempt.calibration_kl is not None:
        add("KL", dry_run.kl, attempt.calibration_kl, MIN_NATS, lambda nats: f"{nats:.2g} nats")
    # The time of its float32 deployment, in torch as the prediction is.
    sha256 = attempt.pruned_model.sha256
    race_result = next((row.race_result for row in report.variants if row.evaluation.model.sha256 == sha256), None)
    if dry_run.latency_saved is not None and race_result is not None:
        saved = 1 - 1 / race_result.speedup
        add("time in float32", dry_run.latency_saved, saved, MIN_SHARE, lambda share: f"{percent(share)} less")
    return tuple(rows)


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
        reason = _cut_reason(cut, cost, attempt.plan) if cut else _uncut_reason(name, cost, attempt)
        result.append(Choice(unit=name, width=width, kept=cut.keep if cut else width, reason=reason))
    return tuple(result)


def _cut_reason(cut: schemas.Cut, cost: str, plan: schemas.Plan) -> str:
    for rec in plan.pruning:
        if _matches(rec.layer, (cut.unit.name, *cut.unit.members)):
            justification = f": {rec.justification}" if rec.justification else ""
            return f"the plan cuts {rec.pruning_ratio:.0%} of it{justification}{f' ({cost})' if cost else ''}"
    return f"the allocator's choice{f': {cost}' if cost else ''}"


def _uncut_reason(name: str, cost: str, attempt: schemas.Attempt) -> str:
    for note in attempt.dry_run.notes if attempt.dry_run else ():
        if repr(name) in note:
            return note
    for cap in attempt.plan.caps:
        if cap.max_ratio == 0 and _matches(cap.layer, (name,)):
            return f"the plan leaves {cap.layer!r} alone"
    if attempt.plan.target is None:
        return "the plan doesn't name it"
    return f"the same is saved for less elsewhere: {cost}"


def _matches(pattern: str, names: tuple[str, ...]) -> bool:
    try:
        return bool(matching_names(pattern, names))
    except PlanError:
        return False
