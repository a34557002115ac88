"""Tables of the paper, measured: runs of the product, baseline methods, and the text of a table."""

import functools
import hashlib
import io
import itertools
import json
import statistics
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import TypeAdapter
from torch import nn
from torch.ao.nn.quantized import dynamic

from benchmarks.paper import numbers as paper
from benchmarks.paper.methods import dynamic_int8, paper_prune
from benchmarks.paper.numbers import METHOD, ONNX, OURS, RECIPE, Family, Numbers, Row, Study, TableName, Value, saved
from profiling_agent.api import Listener, complete, ignore
from profiling_agent.data.images import PreparedImages
from profiling_agent.errors import ProfilingAgentError, PruningError, QuantizationError
from profiling_agent.graph.run import ProgressEvent
from profiling_agent.jobs.base import prepared
from profiling_agent.jobs.measuring import answer
from profiling_agent.jobs.runner import Jobs, job_key, read_profile
from profiling_agent.lib.machine import environment
from profiling_agent.lib.modules import on_device, random_batch
from profiling_agent.measure.intervals import paired_drop
from profiling_agent.measure.race import compare as compare_speed
from profiling_agent.measure.race import run_steady_sessions
from profiling_agent.quantization.layers import parameter_bytes
from profiling_agent.reporting.report import RunReport
from profiling_agent.request import Request
from profiling_agent.runtimes import registry
from profiling_agent.runtimes.registry import recommend
from profiling_agent.runtimes.torch_artifact import load_module, load_recipe
from profiling_agent.runtimes.torch_session import TorchSession
from profiling_agent.schemas import (
    SHARD,
    AccuracyDrop,
    ArtifactRef,
    Attempt,
    Deployment,
    Footprint,
    InputSpec,
    RaceResult,
    Record,
    Variant,
)
from profiling_agent.search.deployments import Deployer
from profiling_agent.search.evaluator import MIN_LOOK, Evaluator
from profiling_agent.search.selection import papers_rank
from profiling_agent.workspace import Workspace, slug

Kind = Literal["pruned", "quantized", "both", "paper"]
FLOAT32: Mapping[str, Any] = {"quantize_dtype": "none", "runtimes": "eager", "max_size_ratio": 1.0}
# Requests: "pruned" is the cheapest float32 model that loses at most a point, "quantized" cuts nothing, "both" is the
# product's default, "paper" is Algorithm 1 with cuts by weights alone and no compensation.
KINDS: Mapping[Kind, Mapping[str, Any]] = {
    "pruned": FLOAT32,
    "quantized": {"quantize_dtype": "qint8", "iterate": False, "max_size_ratio": 1.0},
    "both": {},
    "paper": {**FLOAT32, "selection": "paper", "calibrate": False},
}
# Figure 5 does not print the ratio of its baselines.
FIGURE_5_RATIO = 0.10
NUM_REPEATS, NUM_WARM_UP = 15, 3
MILLION = 1e6
NUMBERS: TypeAdapter[Numbers] = TypeAdapter(Numbers)


Made = tuple[Numbers, str]  # numbers of a row, and a note


class Subject(Record):
    """A model, the paper's model that it stands for, and the data."""

    model: str
    family: Family
    data: paper.DataSet


@dataclass(frozen=True)
class Entry:
    """A row to make: its name, the paper's numbers, and the measurement, None for a row that only the paper has."""

    what: str
    printed: Numbers
    measure: Callable[[], Made] | None


def effect(
    before: Footprint,
    after: Footprint,
    top1s: tuple[float, float],
    drop: AccuracyDrop | None,
    seconds: tuple[float, float],
    race: RaceResult | None = None,
) -> Numbers:
    """Return the numbers of a model next to the unpruned one; `drop` is None for that itself.

    `top1s` are those of the same held-out images and `seconds` those of an image, each before and after. The speed-up has
    the interval of `race`; without a race it is the ratio of the seconds.
    """
    # From zero, so that no change is not written as -0.
    gained = Value(value=0 - 100 * drop.drop, low=-100 * drop.high, high=-100 * drop.low) if drop else Value(value=0.0)
    speedup = Value(value=seconds[0] / seconds[1])
    if race is not None:
        speedup = Value(value=race.speedup, low=race.speedup_low, high=race.speedup_high)
    return {
        "top-1, %": Value(value=100 * top1s[1], before=100 * top1s[0]),
        "points gained": gained,
        "params, M": Value(value=after.params / MILLION, before=before.params / MILLION),
        "% of params saved": Value(value=saved(after.params, before.params)),
        "MACs, M": Value(value=after.macs / MILLION, before=before.macs / MILLION),
        "MB on disk": Value(value=after.size_bytes / MILLION, before=before.size_bytes / MILLION),
        "% of bytes saved": Value(value=saved(after.size_bytes, before.size_bytes)),
        "% of memory saved": Value(value=saved(after.parameter_bytes, before.parameter_bytes)),
        "seconds an image": Value(value=seconds[1], before=seconds[0]),
        "times as fast": speedup,
    }


def of_report(report: RunReport) -> Made:
    """Return the numbers of a run's winner, and its deployment's name."""
    baseline, best, result = report.baseline, report.best, report.race_result
    # The winner may be the baseline itself, which was raced with nothing.
    ms_before = report.race.results[0].latency.median_ms if report.race and result else baseline.latency_ms
    before, after = (
        Footprint.model_validate(one.model_dump(include=set(Footprint.model_fields))) for one in (baseline, best)
    )
    image = 1e3 * report.request.batch_size
    seconds = ms_before / image, (best.latency_ms if result else ms_before) / image
    return effect(before, after, (baseline.top1, best.top1), report.heldout.drop, seconds, result), best.deployment.name


def best_by_algorithm_1(attempts: Sequence[Attempt]) -> Attempt:
    """Return the best pruned model by accuracy, then params, then latency; the unpruned one is no candidate.

    Raises:
        PruningError: no plan could be carried out.
    """
    pruned = [
        (papers_rank(one.deployed, one.latency_ms), one)
        for one in attempts
        if one.deployed is not None and one.deployed.variant is Variant.PRUNED
    ]
    if not pruned:
        raise PruningError(f"no plan could be carried out: {attempts[-1].reason if attempts else 'there was none'}")
    return min(pruned, key=lambda ranked: ranked[0])[1]


class Runs:
    """The runs of a study in one folder; a complete run in it is used again."""

    def __init__(
        self,
        output: Path,
        options: Mapping[str, Any],
        llms: Sequence[str] = (),
        base_url: str | None = None,
        listener: Listener = ignore,
    ) -> None:
        """Work in `output`, with `options` in every request; `llms` are language models at `base_url`."""
        self.output, self.llms, self.llm = output, llms, llms[0] if llms else None
        self._options, self._base_url, self._listener = options, base_url, listener
        self._answers: dict[str, Any] = {}

    def request(self, subject: Subject, kind: Kind, llm: str | None = None) -> Request:
        """Return one run's request; its folder is named by a digest of it. Raises ValidationError for a bad option."""
        asked: dict[str, Any] = {
            "model": subject.model,
            **subject.data.model_dump(exclude={"stands_for"}),
            **self._options,
            **KINDS[kind],
            "llm": "none" if llm is None else llm,
            "base_url": None if llm is None else self._base_url,
        }
        if kind == "paper" and llm is not None:
            asked["planner"] = "llm"
        elif kind in ("paper", "quantized"):
            asked["plan"] = str(self.output / f"{kind}-{slug(subject.family)}.json")
        # Equal for equal requests on one machine: times of two machines never mix.
        identity = json.dumps([asked, environment().machine], sort_keys=True)
        digest = hashlib.sha256(identity.encode()).hexdigest()[:8]
        name = "-".join([slug(subject.family), slug(subject.data.stands_for), kind, digest])
        return Request.model_validate({**asked, "run_id": name, "output": str(self.output)})

    def run(self, subject: Subject, kind: Kind, llm: str | None = None) -> RunReport:
        """Return the report of one run; the plan file has the paper's uniform cut, or none for "quantized"."""
        request = self.request(subject, kind, llm)
        if request.plan is not None:
            layer, ratio = paper.UNIFORM_CUT[subject.family]
            cut = {"layer": layer, "pruning_type": "structured", "pruning_ratio": ratio}
            plan = {"pruning_recommendations": [cut], "quantization_recommendations": []} if kind == "paper" else {}
            self.output.mkdir(parents=True, exist_ok=True)
            Path(request.plan).write_text(json.dumps(plan))
        return complete(request, self._listener)

    def pruned(self, subject: Subject, llm: str | None) -> Made:
        """Measure the product's pruned float32 model."""
        return of_report(self.run(subject, "pruned", llm))[0], ""

    def method(self, subject: Subject, llm: str | None) -> Made:
        """Measure the best model of Algorithm 1, whatever it lost."""
        report = self.run(subject, "paper", llm)
        best = best_by_algorithm_1(report.attempts)
        assert best.pruned_model is not None, "a measured model exists"
        with self._evaluator(report, METHOD) as evaluator:
            (numbers,), _ = _side_by_side(evaluator, report, [(Variant.PRUNED, best.pruned_model, Deployment())])
        return numbers, f"planned by {llm}" if llm else "its uniform plan"

    def quantized(self, subject: Subject, llm: str | None) -> dict[str, Made]:
        """Measure int8 three ways in one race: our dynamic layers, ONNX Runtime's, and the product's choice.

        Raises:
            QuantizationError: dynamic int8 can't be made here.
        """
        report = self.run(subject, "quantized", llm)
        ours, missing = report.heldout, registry.missing("onnxruntime")
        is_quantized = ours.variant is not Variant.BASELINE
        with self._evaluator(report, METHOD) as evaluator:
            plain, baseline = replace(evaluator.deployer, tunes=False), evaluator.baseline
            models = [_deployed(plain, baseline, "eager", "dynamic")]
            if missing is None:
                models += [_deployed(plain, baseline, "onnxruntime", scheme) for scheme in ("dynamic", "float32")]
            if is_quantized:
                models.append((ours.variant, ours.model, ours.deployment))
            numbers, results = _side_by_side(evaluator, report, models)
        found: dict[str, Made] = {
            ONNX: ({}, missing or ""),
            METHOD: (numbers[0], "our dynamic int8 layers, a scale for each output channel"),
            OURS: (numbers[-1], ours.deployment.name) if is_quantized else of_report(report),
        }
        if missing is None:
            # The paper compares ONNX Runtime's int8 with ONNX Runtime's float32.
            whole = numbers[2]
            size, float32 = numbers[1]["MB on disk"].value, whole["MB on disk"].value
            own = {
                "MB on disk": Value(value=size, before=float32),
                "% of bytes saved": Value(value=saved(size, float32)),
                "seconds an image": numbers[1]["seconds an image"].model_copy(
                    update={"before": whole["seconds an image"].value}
                ),
            }
            found[ONNX] = {**numbers[1], **own}, "before: ONNX Runtime float32"
            for what, result in ((METHOD, results[0]), *([(OURS, results[-1])] if is_quantized else [])):
                score = compare_speed(result, results[1])
                found[what][0]["times ONNX Runtime"] = Value(value=score.speedup, low=score.low, high=score.high)
        return found

    def uniform(self, subject: Subject, criterion: paper.Criterion, ratio: float) -> Made:
        """Measure one of the paper's baselines, a uniform cut."""
        report = self.run(subject, "pruned", self.llm)

        def cut(model: nn.Module, spec: InputSpec) -> nn.Module:
            return paper_prune(model, spec, ratio, criterion, seed=report.request.seed).model

        return self._in_process(report, f"{criterion} {ratio:.0%}", cut), ""

    def recipe(self, subject: Subject, llm: str | None) -> Made:
        """Measure torch's `quantize_dynamic` of all linear layers with its default settings, as in the paper."""
        report = self.run(subject, "quantized", llm)
        numbers = self._in_process(report, "quantize_dynamic", lambda model, _: dynamic_int8(model))
        # Quantized weights are no parameters to torch; none is gone.
        numbers["% of params saved"] = Value(value=0.0)
        return numbers, "7-bit activations, a scale for each weight tensor; timed in turns in one process"

    def _in_process(self, report: RunReport, name: str, change: Callable[[nn.Module, InputSpec], nn.Module]) -> Numbers:
        """Return the numbers of a model that can't be saved as an artifact; those in the run's folder are read back.

        Speed is the median of turns with the unpruned model in this process, and bytes are those of a state dict.
        """
        file = self.output / report.run_id / "paper" / f"{slug(name)}.json"
        if file.exists():
            return NUMBERS.validate_json(file.read_bytes())
        split, batch_size = report.acquired.heldout, report.request.batch_size
        with self._evaluator(report, name) as evaluator:
            jobs, device = evaluator.jobs, evaluator.device
            path = jobs.path(evaluator.baseline)
            model, spec = on_device(load_module(path), device).eval(), load_recipe(path).input
            changed = change(model, spec).to(device).eval()
            tasks = prepared(split, path)
            jobs.run_each(tasks)
            images = PreparedImages([jobs.workspace.jobs / job_key(task) for task in tasks])
            sessions = [TorchSession(module, device=device) for module in (model, changed)]
            if report.run_id not in self._answers:
                self._answers[report.run_id] = answer(sessions[0], images, batch_size, jobs.progress).right
            rights = self._answers[report.run_id], answer(sessions[1], images, batch_size, jobs.progress).right
        turns = [session.bound(random_batch(spec, batch_size).numpy()) for session in sessions]
        times = [[turn() for turn in turns] for _ in range(NUM_WARM_UP + NUM_REPEATS)][NUM_WARM_UP:]
        first, second = (statistics.median(column) / 1e3 / batch_size for column in zip(*times, strict=True))
        before, after = (_footprint(module) for module in (model, changed))
        top1s = float(rights[0].mean()), float(rights[1].mean())
        numbers = effect(before, after, top1s, paired_drop(*rights), (first, second))
        # Turn by turn, which what slows both does not change.
        numbers["times as fast"] = Value(value=statistics.median(before / after for before, after in times))
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(NUMBERS.dump_json(numbers))
        return numbers

    @contextmanager
    def _evaluator(self, report: RunReport, stage: str) -> Generator[Evaluator]:
        """Give the evaluator of a finished run, in its folder."""

        def progress(message: str, done: int, total: int) -> None:
            self._listener(ProgressEvent(stage=stage, message=message, done=done, total=total))

        asked, workspace = report.request, Workspace(self.output / report.run_id)
        jobs, lock = Jobs(workspace, progress), workspace.lock()
        try:
            evaluator = Evaluator(
                jobs=jobs,
                acquired=report.acquired,
                baseline=report.variants[0].evaluation.model,
                profile=read_profile(jobs, report.profiles["baseline"]),
                goal=report.goal,
                settings=asked,
            )
            yield evaluator
        finally:
            jobs.forget_images()
            jobs.close()
            lock.release()


Model = tuple[Variant, ArtifactRef, Deployment]


def _deployed(deployer: Deployer, baseline: ArtifactRef, runtime: Any, scheme: Any) -> Model:
    """Return the unpruned model in a deployment, untuned."""
    deployment = Deployment(runtime=runtime, scheme=scheme, recommendations=recommend(scheme))
    if scheme not in registry.runtime(runtime).schemes(deployer.device):
        raise QuantizationError(f"{deployment.name} has no kernels on {deployer.device}: use device cpu")
    option = deployer.make(baseline, deployment)
    if option.deployed is None:
        raise QuantizationError(f"{deployment.name} could not be made: {option.reason}")
    return Variant.BASELINE if scheme == "float32" else Variant.QUANTIZED, option.deployed.model, deployment


def _side_by_side(
    evaluator: Evaluator, report: RunReport, models: Sequence[Model]
) -> tuple[list[Numbers], list[RaceResult]]:
    """Measure models next to the baseline, on the held-out images that the run looked at and in one race."""
    heldout = evaluator.acquired.heldout
    num_images = max(report.heldout.predictions.num_images, MIN_LOOK)
    images = range(min(-(-num_images // SHARD) * SHARD, heldout.num_images))
    baseline = evaluator.evaluate_baseline(heldout, images)
    seen = [evaluator.evaluate(v, model, heldout, baseline, d, images=images) for v, model, d in models]
    raced = [model for _, model, _ in models]
    race = run_steady_sessions(lambda number: evaluator.hold_session(raced, number), report.request.num_sessions)
    results = [race.result_of(one.model) for one in seen]
    image = 1e3 * report.request.batch_size
    found: list[Numbers] = []
    for one, result in zip(seen, results, strict=True):
        seconds = race.results[0].latency.median_ms / image, result.latency.median_ms / image
        found.append(effect(baseline.footprint, one.footprint, (baseline.top1, one.top1), one.drop, seconds, result))
    return found, results


def _footprint(model: nn.Module) -> Footprint:
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    params = sum(parameter.numel() for parameter in model.parameters())
    num_bytes = parameter_bytes(model)
    for layer in model.modules():
        # Packed as int8, with one scale a tensor; biases are float32.
        if isinstance(layer, dynamic.Linear):
            num_bytes += layer.weight().numel() + 4 * (1 + (0 if layer.bias() is None else layer.bias().numel()))
    return Footprint(params=params, macs=0, parameter_bytes=num_bytes, size_bytes=file.tell())


def _uniform_cut(runs: Runs, subject: Subject, criterion: paper.Criterion, ratio: float) -> Entry:
    family, place = subject.family, paper.RATIOS.index(ratio)
    gained, params = paper.UNIFORM_GAINED[family][criterion][place], paper.UNIFORM_PARAMS[family][place]
    printed = paper.printed_pruned(gained, params, paper.PARAMS[family])
    return Entry(f"{criterion} {ratio:.0%}", printed, lambda: runs.uniform(subject, criterion, ratio))


def _method_and_ours(runs: Runs, subject: Subject, printed: Numbers) -> Iterator[Entry]:
    yield Entry(METHOD, printed, lambda: runs.method(subject, runs.llm))
    yield Entry(OURS, printed, lambda: runs.pruned(subject, runs.llm))


def _table1(runs: Runs, subject: Subject) -> Iterator[Entry]:
    for criterion, ratio in itertools.product(paper.CRITERIA, paper.RATIOS):
        yield _uniform_cut(runs, subject, criterion, ratio)
    yield from _method_and_ours(
        runs, subject, paper.printed_pruned(*paper.TABLE_1[subject.family], paper.PARAMS[subject.family])
    )


def _table2(runs: Runs, subject: Subject) -> Iterator[Entry]:
    yield from _method_and_ours(runs, subject, paper.printed_table2(subject.family, subject.data.stands_for))


def _table3(runs: Runs, subject: Subject) -> Iterator[Entry]:
    # All but torch's recipe in one race.
    raced = functools.cache(lambda: runs.quantized(subject, runs.llm))
    printed = paper.printed_table3(paper.TABLE_3[subject.family])
    yield Entry(ONNX, paper.printed_table3(paper.TABLE_3_ONNX[subject.family]), lambda: raced()[ONNX])
    yield Entry(METHOD, printed, lambda: raced()[METHOD])
    yield Entry(RECIPE, printed, lambda: runs.recipe(subject, runs.llm))
    yield Entry(OURS, printed, lambda: raced()[OURS])


def _table4(runs: Runs, subject: Subject) -> Iterator[Entry]:
    llm, printed = runs.llm, paper.printed_table4(subject.family, "pruning")
    for entry in _method_and_ours(runs, subject, printed):
        yield replace(entry, what=f"pruning, {entry.what}")
    printed = paper.printed_table4(subject.family, "quantization")
    yield Entry(f"quantization, {METHOD}", printed, lambda: runs.quantized(subject, llm)[METHOD])
    yield Entry(f"quantization, {RECIPE}", printed, lambda: runs.recipe(subject, llm))
    steps: tuple[tuple[str, Kind], ...] = (("quantization", "quantized"), ("both", "both"))
    for step, kind in steps:
        own = printed if step == "quantization" else {}
        yield Entry(f"{step}, {OURS}", own, lambda kind=kind: of_report(runs.run(subject, kind, llm)))


def _table5(runs: Runs, subject: Subject) -> Iterator[Entry]:
    for planner, printed in paper.TABLE_5[subject.family].items():
        yield Entry(
            f"{planner}, as printed", paper.printed_pruned(*printed, paper.TABLE_5_PARAMS[subject.family]), None
        )
    for llm in runs.llms or (None,):
        for what, measure in ((METHOD, runs.method), (OURS, runs.pruned)):
            row = functools.partial(measure, subject, llm)
            yield Entry(f"{llm or 'no language model'}, {what}", {}, row)


def _figure5(runs: Runs, subject: Subject) -> Iterator[Entry]:
    # It draws no accuracies.
    for criterion in paper.CRITERIA:
        entry = _uniform_cut(runs, subject, criterion, FIGURE_5_RATIO)
        yield replace(entry, printed={"% of memory saved": entry.printed["% of memory saved"]})
    memory = paper.printed_pruned(*paper.TABLE_1[subject.family], paper.PARAMS[subject.family])["% of memory saved"]
    printed: Numbers = {"% of memory saved": memory}
    if subject.family != paper.FIGURE_5_SLOWER:
        printed["times as fast"] = Value(value=paper.FIGURE_5_BEST)
    yield from _method_and_ours(runs, subject, printed)


ENTRIES: Mapping[TableName, Callable[[Runs, Subject], Iterator[Entry]]] = {
    "table1": _table1,
    "table2": _table2,
    "table3": _table3,
    "table4": _table4,
    "table5": _table5,
    "figure5": _figure5,
}


def make_table(name: TableName, runs: Runs, subjects: Sequence[Subject], missing: Sequence[str] = ()) -> Study:
    """Measure a table; a row that fails has the reason as its note, and a model of which no run succeeds is missing."""
    rows: list[Row] = []
    gone = list(missing)
    title, _, quantities = paper.TABLES[name]
    for subject in subjects:
        try:
            runs.run(subject, "quantized" if name == "table3" else "pruned", runs.llm)
        except ProfilingAgentError as error:
            gone.append(f"{subject.family} ({subject.model}) on {subject.data.title}: {error}")
            continue
        for entry in ENTRIES[name](runs, subject):
            here, note = Numbers(), ""
            try:
                if entry.measure is not None:
                    here, note = entry.measure()
            except Exception as error:  # noqa: BLE001 - a row's boundary: Torch-Pruning raises nearly anything
                note = str(error) if isinstance(error, ProfilingAgentError) else f"{type(error).__name__}: {error}"
            cells = tuple(
                paper.Cell(quantity=quantity, paper=entry.printed.get(quantity), here=here.get(quantity))
                for quantity in quantities
                if quantity in entry.printed or quantity in here
            )
            family, data = subject.family, subject.data.title
            rows.append(Row(model=subject.model, family=family, data=data, what=entry.what, cells=cells, note=note))
    return Study(
        name=name,
        title=title,
        rows=tuple(rows),
        differences=_differences(runs, subjects),
        missing=tuple(gone),
    )


def _differences(runs: Runs, subjects: Sequence[Subject]) -> tuple[str, ...]:
    here = environment()
    options = runs.request(subjects[0], "both") if subjects else Request()
    models = dict.fromkeys(f"{paper.short(subject.model)} as {subject.family}" for subject in subjects)
    data = dict.fromkeys(subject.data.title for subject in subjects)
    return (
        f"models: {', '.join(models)}",
        f"data: {', '.join(data)}; accuracy on held-out images that no decision used, the paper's on a random subset that "
        "its loop used too",
        f"hardware: {here.cpu}, {here.num_threads} threads; the paper's an AMD EPYC 7763 and an A100",
        f"software: torch {here.libraries['torch']}, transformers {here.libraries['transformers']}, Python {here.python}; "
        "the paper's torch 2.6.0",
        f"times: batches of {options.batch_size}, models in turns, 95% intervals over {options.num_sessions} sessions; "
        "the paper's one run each",
        f"plans of the paper's method: {f'by {runs.llm}' if runs.llm else 'a uniform cut, then half as much again or half of it'}",
    )


def _columns(study: Study) -> list[tuple[str, bool]]:
    """Return the quantities of a table, and for each whether the paper prints any."""
    quantities = dict.fromkeys(cell.quantity for row in study.rows for cell in row.cells)
    return [(one, any(row.paper(one) is not None for row in study.rows)) for one in quantities]


def _escaped(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def markdown(study: Study) -> str:
    """Return a study as Markdown: the table, and the lists below it."""
    heads = ["model", "data", "what"]
    for quantity, is_printed in _columns(study):
        heads += [quantity, "the paper"] if is_printed else [quantity]
    heads.append("note")
    lines = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    for row in study.rows:
        cells = [f"{row.family}: {paper.short(row.model)}", row.data, row.what]
        for quantity, is_printed in _columns(study):
            cells.append(paper.formatted(quantity, row.here(quantity)))
            if is_printed:
                cells.append(paper.formatted(quantity, row.paper(quantity)))
        lines.append(f"| {' | '.join(map(_escaped, [*cells, row.note]))} |")
    for title, items in (
        ("Differences from the paper", study.differences),
        ("Not made", study.missing),
    ):
        if items:
            lines += ["", f"{title}:", "", *(f"- {' '.join(item.split())}" for item in items)]
    return "\n".join([*lines, ""])
