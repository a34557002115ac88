"""Reproduced tables: each of the paper's beside the same question put to our runs."""

from collections.abc import Callable, Iterator, Sequence

from profiling_agent.errors import ProfilingAgentError, PruningError
from profiling_agent.records import AccuracyDrop
from profiling_agent.reporting.report import RunReport
from profiling_agent.reproduce.paper import (
    BASELINE_PARAMS,
    CRITERIA,
    FIGURE_5_BEST,
    RATIOS,
    TABLE_1,
    TABLE_1_OURS,
    TABLE_2,
    TABLE_3,
    TABLE_4,
    TABLE_5,
    Row,
    Study,
)
from profiling_agent.reproduce.study import Reproduction, Subject
from profiling_agent.reproducibility import environment

Table = Callable[[Reproduction, Subject], Iterator[Row]]


def _row(subject: Subject, what: str, quantity: str, paper: float | None, ours: float | None, note: str = "") -> Row:
    """Return a row of a quantity of which more is better; nothing is compared where either is missing."""
    better = ours - paper if paper is not None and ours is not None else None
    return Row(
        model=subject.model,
        family=subject.family,
        what=what,
        quantity=quantity,
        paper=paper,
        ours=ours,
        better_by=better,
        note=note,
    )


def _gained(drop: AccuracyDrop | None) -> float:
    # From zero, because the negative of zero is written with its sign.
    return 0 - 100 * drop.drop if drop else 0.0


def _interval(drop: AccuracyDrop | None) -> str:
    return f"95% [{-100 * drop.high:+.2f}, {-100 * drop.low:+.2f}]" if drop else "the baseline itself"


def _saved(now: float, before: float) -> float:
    return 100 * (1 - now / before)


def _pruned_rows(
    subject: Subject, what: str, paper: tuple[float, float], drop: AccuracyDrop | None, saved: float
) -> Iterator[Row]:
    """Give the rows of a pruned model; `paper` is the points that it gained there, and the params that were left."""
    yield _row(subject, what, "points gained", paper[0], _gained(drop), _interval(drop))
    yield _row(subject, what, "% of params saved", _saved(paper[1], BASELINE_PARAMS[subject.family]), saved)


def _params_saved(report: RunReport) -> float:
    return _saved(report.best.params, report.baseline.params)


def _lighter_rows(subject: Subject, report: RunReport, gained: float, saved: float) -> Iterator[Row]:
    """Give the rows of a run that is to save bytes, beside what the paper gained and saved."""
    drop = report.heldout.drop
    yield _row(subject, "ours", "points gained", gained, _gained(drop), _interval(drop))
    yield _row(subject, "ours", "% of bytes saved", saved, _saved(report.best.size_bytes, report.baseline.size_bytes))


def table1(runs: Reproduction, subject: Subject) -> Iterator[Row]:
    """Pruning on Imagenette: uniform L1, L2 and random cuts at 1, 10 and 20%, and ours."""
    for criterion in CRITERIA:
        for ratio in RATIOS:
            paper = TABLE_1[subject.family][criterion, ratio]
            what = f"{criterion} {ratio:.0%}, here"
            try:
                made, drop = runs.baseline(subject, criterion, ratio)
            except PruningError as error:
                # A hundredth of a narrow layer is less than one channel; the other cells can be made.
                yield _row(subject, what, "points gained", paper[0], None, str(error))
                continue
            yield from _pruned_rows(subject, what, paper, drop, _saved(made.params, made.params_before))
    report = runs.run(subject, "pruned")
    yield from _pruned_rows(subject, "ours", TABLE_1_OURS[subject.family], report.heldout.drop, _params_saved(report))


def table2(runs: Reproduction, subject: Subject) -> Iterator[Row]:
    """Pruning on CIFAR-10, without fine-tuning: top-1 before and after, bytes saved."""
    before, after, saved = TABLE_2[subject.family]
    yield from _lighter_rows(subject, runs.run(subject, "pruned"), after - before, saved)


def table3(runs: Reproduction, subject: Subject) -> Iterator[Row]:
    """Quantization beside ONNX Runtime's dynamic int8."""
    gained, saved, faster = TABLE_3[subject.family]
    report = runs.run(subject, "quantized")
    yield from _lighter_rows(subject, report, gained, saved)
    peer, note = _over_onnx(report)
    yield _row(subject, f"ours ({report.best.deployment.name})", "times ONNX Runtime dynamic", faster, peer, note)


def _over_onnx(report: RunReport) -> tuple[float | None, str]:
    """Return how many times as fast as ONNX Runtime's dynamic int8 the chosen deployment was, in one race."""
    options = report.deployment_search.options if report.deployment_search else ()
    results = {option.deployment.name: option.race_result for option in options if option.race_result}
    chosen, peer = results.get(report.best.deployment.name), results.get("onnxruntime dynamic")
    if chosen is None or peer is None:
        return None, "ONNX Runtime did not race: pip install profiling-agent[onnx]"
    return chosen.speedup / peer.speedup, "both in one race; its attention is fused here, as it is not in the paper's"


def table4(runs: Reproduction, subject: Subject) -> Iterator[Row]:
    """What pruning and quantization do, each alone; and both together, which the paper doesn't have."""
    for kind in ("pruned", "quantized", "both"):
        report = runs.run(subject, kind)
        paper = TABLE_4[subject.family].get(kind)
        drop, race_result = report.heldout.drop, report.race_result
        yield _row(
            subject, kind, "points gained", paper[1] - paper[0] if paper else None, _gained(drop), _interval(drop)
        )
        size = report.best.size_bytes
        yield _row(
            subject, kind, "% of bytes saved", paper[2] if paper else None, _saved(size, report.baseline.size_bytes)
        )
        yield _row(subject, kind, "% of params saved", paper[3] if paper else None, _params_saved(report))
        note = (
            f"95% [{race_result.speedup_low:.2f}, {race_result.speedup_high:.2f}]"
            if race_result
            else "the baseline itself"
        )
        yield _row(
            subject,
            kind,
            "times as fast",
            paper[4] if paper else None,
            race_result.speedup if race_result else 1.0,
            note,
        )


def table5(runs: Reproduction, subject: Subject) -> Iterator[Row]:
    """The loop planned by two language models; by the built-in rules where fewer are named."""
    papers = TABLE_5[subject.family]
    for (name, paper), advisor in zip(papers.items(), [*runs.advisors, "rules", "rules"], strict=False):
        report = runs.run(subject, "pruned", advisor)
        what = f"{advisor} beside {name}"
        yield from _pruned_rows(subject, what, paper, report.heldout.drop, _params_saved(report))


def figure5(runs: Reproduction, subject: Subject) -> Iterator[Row]:
    """Speed-up and memory saved by pruning: ours, and uniform L1, L2 and random cuts by a tenth."""
    for criterion in CRITERIA:
        made, drop = runs.baseline(subject, criterion, 0.10)
        lost = f"loses {100 * drop.drop:+.2f} points"
        yield _row(subject, f"{criterion} 10%, here", "times as fast", None, made.speedup, lost)
        yield _row(subject, f"{criterion} 10%, here", "% of memory saved", None, 100 * (1 - made.size_ratio), lost)
    report = runs.run(subject, "pruned")
    race_result = report.race_result
    note = f"the paper's best bar; ours loses {-_gained(report.heldout.drop):+.2f} points"
    yield _row(subject, "ours", "times as fast", FIGURE_5_BEST, race_result.speedup if race_result else 1.0, note)
    saved = _saved(report.best.parameter_bytes, report.baseline.parameter_bytes)
    yield _row(subject, "ours", "% of memory saved", None, saved)


TABLES: dict[str, tuple[str, Table]] = {
    "table1": ("pruning on Imagenette", table1),
    "table2": ("pruning on CIFAR-10", table2),
    "table3": ("quantization on ImageNet-1K", table3),
    "table4": ("pruning and quantization on ImageNet-1K", table4),
    "table5": ("two language models plan", table5),
    "figure5": ("inference speed-up and memory", figure5),
}


def reproduce(name: str, runs: Reproduction, subjects: Sequence[Subject], missing: Sequence[str]) -> Study:
    """Make a table; a model on which it can't be made is told of with the reason."""
    title, table = TABLES[name]
    rows: list[Row] = []
    gone = list(missing)
    for subject in subjects:
        try:
            rows += table(runs, subject)
        except ProfilingAgentError as error:
            gone.append(f"{subject.family} ({subject.model}): {error}")
    return Study(
        name=name, title=title, rows=tuple(rows), differences=_differences(runs, subjects), missing=tuple(gone)
    )


def _differences(runs: Reproduction, subjects: Sequence[Subject]) -> tuple[str, ...]:
    here = environment()
    named = ", ".join(f"{subject.model} for {subject.family}" for subject in subjects)
    return (
        f"models: {named}",
        f"data: {runs.data}; accuracy on held-out images that no decision saw, the paper's on its test subset",
        f"hardware: {here.cpu}, {here.num_threads} threads; the paper's an AMD EPYC 7763",
        f"software: torch {here.libraries['torch']}, transformers {here.libraries['transformers']}, Python {here.python}",
        "ours is the cheapest float32 model that loses at most one point; the paper's loop keeps the most accurate one",
    )
