"""Tables of the paper, each beside the same question put to its method and to ours, on somebody's models and data."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Literal

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.reproduce.claims import contradicted
from profiling_agent.reproduce.measured import Effect, of_report, saved
from profiling_agent.reproduce.paper import (
    BASELINE_PARAMS,
    CRITERIA,
    FIGURE_5_BEST,
    FIGURE_5_SLOWER,
    RATIOS,
    TABLE_1,
    TABLE_1_OURS,
    TABLE_2,
    TABLE_3,
    TABLE_3_ONNX,
    TABLE_4,
    TABLE_5,
    TABLE_5_BEFORE,
    UNIFORM_CUT,
    Criterion,
    Table3,
    Table4,
    TableName,
    short,
)
from profiling_agent.reproduce.study import Reproduction, Subject, first
from profiling_agent.reproduce.subjects import Chosen
from profiling_agent.reproduce.table import METHOD, OURS, Cell, Row, Study, Value
from profiling_agent.reproducibility import environment

Table = Callable[[Reproduction, Subject], Iterator[Row]]
What = Literal["pruning", "quantization"]
# Of the ratios of Table 1 the one that Figure 5's baselines are cut by here; it doesn't say which.
FIGURE_5_RATIO = 0.10
UNIFORM = "its uniform plan"


def _row(subject: Subject, what: str, cells: Sequence[Cell], note: str = "") -> Row:
    return Row(
        model=subject.model,
        family=subject.family,
        data=subject.data.title,
        what=what,
        cells=tuple(cells),
        note=note,
    )


def _or_why(subject: Subject, what: str, paper: Sequence[Cell], make: Callable[[], Row]) -> Row:
    """Return a row, or the paper's part of it with why there is no other: one model's failure costs no other row."""
    try:
        return make()
    except ProfilingAgentError as error:
        return _row(subject, what, paper, str(error))


def _left(paper: tuple[float, float], before: float, effect: Effect | None) -> list[Cell]:
    """Return the cells of a pruned model of which the paper prints the points gained and the millions of params left."""
    gained, params = paper
    return [
        Cell(quantity="points gained", paper=Value(value=gained), here=effect.points_gained if effect else None),
        Cell(
            quantity="params, M",
            paper=Value(value=params, before=before),
            here=effect.millions_of_params if effect else None,
        ),
        Cell(
            quantity="% of params saved",
            paper=Value(value=saved(params, before)),
            here=effect.params_saved if effect else None,
        ),
    ]


def table1(runs: Reproduction, subject: Subject) -> Iterator[Row]:
    """Pruning on Imagenette: uniform L1, L2 and random cuts at 1, 10 and 20%, the paper's method, and ours."""
    before, advisor = BASELINE_PARAMS[subject.family], first(runs.options.advisors)
    # First, as what keeps it from being made keeps all else.
    ours = of_report(runs.run(subject, "pruned", advisor))
    for criterion in CRITERIA:
        for ratio in RATIOS:
            yield _uniform(runs, subject, criterion, ratio)
    paper = TABLE_1_OURS[subject.family]
    yield _or_why(
        subject,
        METHOD,
        _left(paper, before, None),
        lambda: _row(subject, METHOD, _left(paper, before, runs.method_pruned(subject, advisor)), _planner(advisor)),
    )
    yield _row(subject, OURS, _left(paper, before, ours))


def _uniform(runs: Reproduction, subject: Subject, criterion: Criterion, ratio: float) -> Row:
    gained, params = TABLE_1[subject.family][criterion, ratio]
    before, what = BASELINE_PARAMS[subject.family], f"{criterion} {ratio:.0%}"

    def make() -> Row:
        cut = runs.cut(subject, criterion, ratio)
        here = (cut.points_gained, cut.millions_of_params, cut.params_saved)
        filled = [one.model_copy(update={"here": value}) for one, value in zip(cells, here, strict=True)]
        return _row(subject, what, filled)

    cells = _left((gained, params), before, None)
    # A hundredth of a narrow layer is less than one channel; the other cells can be made.
    return _or_why(subject, what, cells, make)


def table2(runs: Reproduction, subject: Subject) -> Iterator[Row]:
    """Pruning on CIFAR-10 and CIFAR-100, without fine-tuning: top-1, params and MACs before and after, bytes saved."""
    advisor = first(runs.options.advisors)
    ours = of_report(runs.run(subject, "pruned", advisor))
    yield _or_why(
        subject,
        METHOD,
        _smaller(subject, None),
        lambda: _row(subject, METHOD, _smaller(subject, runs.method_pruned(subject, advisor)), _planner(advisor)),
    )
    yield _row(subject, OURS, _smaller(subject, ours))


def _smaller(subject: Subject, effect: Effect | None) -> list[Cell]:
    top1_before, top1, params_before, params, bytes_saved = TABLE_2[subject.family].get(
        subject.data.stands_for, (None,) * 5
    )
    return [
        Cell(quantity="top-1, %", paper=_value(top1, top1_before), here=effect.top1_percent if effect else None),
        Cell(
            quantity="points gained",
            paper=_value(top1 - top1_before if top1 is not None and top1_before is not None else None),
            here=effect.points_gained if effect else None,
        ),
        Cell(
            quantity="params, M",
            paper=_value(params, params_before),
            here=effect.millions_of_params if effect else None,
        ),
        Cell(quantity="MACs, M", here=effect.millions_of_macs if effect else None),
        Cell(quantity="% of bytes saved", paper=_value(bytes_saved), here=effect.bytes_saved if effect else None),
    ]


def _value(value: float | None, before: float | None = None) -> Value | None:
    return None if value is None else Value(value=value, before=before)


def table3(runs: Reproduction, subject: Subject) -> Iterator[Row]:
    """Quantization: ONNX Runtime's dynamic int8 as it comes, the paper's, and ours, all in one race."""
    made = runs.quantized(subject, first(runs.options.advisors))
    paper, faster = TABLE_3[subject.family]
    batch_size = runs.options.batch_size
    onnx = _lighter(TABLE_3_ONNX[subject.family], made.onnx, batch_size)
    yield _row(subject, "ONNX Runtime dynamic", onnx, made.note or "before: ONNX Runtime float32")
    for what, effect, over, note in (
        (METHOD, made.method, made.method_over_onnx, "eager dynamic int8, all linear layers"),
        (OURS, made.ours, made.ours_over_onnx, made.ours.deployment.name),
    ):
        ratio = Cell(quantity="times ONNX Runtime", paper=Value(value=faster), here=over)
        yield _row(subject, what, [*_lighter(paper, effect, batch_size), ratio], note)


def _lighter(paper: Table3, effect: Effect | None, batch_size: int) -> list[Cell]:
    gained, bytes_saved, before_s, after_s = paper
    return [
        Cell(quantity="points gained", paper=Value(value=gained), here=effect.points_gained if effect else None),
        Cell(quantity="MB on disk", here=effect.megabytes if effect else None),
        Cell(
            quantity="% of bytes saved",
            paper=Value(value=bytes_saved),
            here=effect.bytes_saved if effect else None,
        ),
        Cell(
            quantity="seconds an image",
            paper=Value(value=after_s, before=before_s),
            here=effect.seconds(batch_size) if effect else None,
        ),
    ]


def table4(runs: Reproduction, subject: Subject) -> Iterator[Row]:
    """What pruning and quantization do, each alone; and both together, which the paper doesn't have."""
    advisor, papers = first(runs.options.advisors), TABLE_4[subject.family]
    made: dict[What, Callable[[], Effect]] = {
        "pruning": lambda: runs.method_pruned(subject, advisor),
        "quantization": lambda: runs.quantized(subject, advisor).method,
    }
    ours: dict[What, Callable[[], Effect]] = {
        "pruning": lambda: of_report(runs.run(subject, "pruned", advisor)),
        "quantization": lambda: of_report(runs.run(subject, "quantized", advisor)),
    }
    for what, method in made.items():
        paper = papers[what]
        for who, effect in ((METHOD, method), (OURS, ours[what])):
            name = f"{what}, {who}"
            yield _or_why(
                subject,
                name,
                _effects(paper, None),
                lambda name=name, paper=paper, effect=effect: _effect_row(subject, name, paper, effect()),
            )
    both = of_report(runs.run(subject, "both", advisor))
    yield _effect_row(subject, f"both, {OURS}", None, both)


def _effect_row(subject: Subject, what: str, paper: Table4 | None, effect: Effect) -> Row:
    return _row(subject, what, _effects(paper, effect), effect.deployment.name)


def _effects(paper: Table4 | None, effect: Effect | None) -> list[Cell]:
    before, after, bytes_saved, params_saved, faster = paper or (None,) * 5
    gained = after - before if after is not None and before is not None else None
    return [
        Cell(quantity="top-1, %", paper=_value(after, before), here=effect.top1_percent if effect else None),
        Cell(quantity="points gained", paper=_value(gained), here=effect.points_gained if effect else None),
        Cell(quantity="MB on disk", here=effect.megabytes if effect else None),
        Cell(quantity="% of bytes saved", paper=_value(bytes_saved), here=effect.bytes_saved if effect else None),
        Cell(quantity="% of params saved", paper=_value(params_saved), here=effect.params_saved if effect else None),
        Cell(quantity="times as fast", paper=_value(faster), here=effect.times_as_fast if effect else None),
    ]


def table5(runs: Reproduction, subject: Subject) -> Iterator[Row]:
    """The loop planned by language models, the paper's two and those that are asked for; by the rules where none is."""
    before = TABLE_5_BEFORE[subject.family]
    for name, paper in TABLE_5[subject.family].items():
        yield _row(subject, f"{name}, as printed", _left(paper, before, None))
    for advisor in runs.options.advisors or (None,):
        who = advisor or "no language model"
        for what, make in (
            (f"{who}, {METHOD}", lambda advisor=advisor: runs.method_pruned(subject, advisor)),
            (f"{who}, {OURS}", lambda advisor=advisor: of_report(runs.run(subject, "pruned", advisor))),
        ):
            yield _or_why(
                subject,
                what,
                [],
                lambda what=what, make=make: _row(subject, what, _unprinted(_left((0, 0), before, make()))),
            )


def _unprinted(cells: Sequence[Cell]) -> list[Cell]:
    """Return cells without what the paper prints, which is of other planners."""
    return [cell.model_copy(update={"paper": None}) for cell in cells]


def figure5(runs: Reproduction, subject: Subject) -> Iterator[Row]:
    """Speed-up and memory saved by pruning: uniform L1, L2 and random cuts by a tenth, the paper's method, and ours."""
    before, advisor = BASELINE_PARAMS[subject.family], first(runs.options.advisors)
    ours = of_report(runs.run(subject, "pruned", advisor))
    for criterion in CRITERIA:
        _, params = TABLE_1[subject.family][criterion, FIGURE_5_RATIO]
        memory = Cell(quantity="% of memory saved", paper=Value(value=saved(params, before)))
        what = f"{criterion} {FIGURE_5_RATIO:.0%}"

        def make(criterion: Criterion = criterion, memory: Cell = memory, what: str = what) -> Row:
            cut = runs.cut(subject, criterion, FIGURE_5_RATIO)
            here = memory.model_copy(update={"here": Value(value=100 * (1 - cut.made.size_ratio))})
            speed = Cell(quantity="times as fast", here=Value(value=cut.made.speedup))
            return _row(subject, what, [speed, here, Cell(quantity="points gained", here=cut.points_gained)])

        yield _or_why(subject, what, [memory], make)
    yield _or_why(
        subject,
        METHOD,
        _bars(subject, None),
        lambda: _row(subject, METHOD, _bars(subject, runs.method_pruned(subject, advisor)), _printed_of(subject)),
    )
    yield _row(subject, OURS, _bars(subject, ours), _printed_of(subject))


def _bars(subject: Subject, effect: Effect | None) -> list[Cell]:
    _, params = TABLE_1_OURS[subject.family]
    memory = Value(value=saved(params, BASELINE_PARAMS[subject.family]))
    best = None if subject.family in FIGURE_5_SLOWER else Value(value=FIGURE_5_BEST)
    return [
        Cell(quantity="times as fast", paper=best, here=effect.times_as_fast if effect else None),
        Cell(quantity="% of memory saved", paper=memory, here=effect.memory_saved if effect else None),
        Cell(quantity="points gained", here=effect.points_gained if effect else None),
    ]


def _printed_of(subject: Subject) -> str:
    if subject.family in FIGURE_5_SLOWER:
        return "the paper prints no number: it is slightly slower"
    return "the paper prints the best of its bars: up to 1.10"


def _planner(advisor: str | None) -> str:
    return f"planned by {advisor}" if advisor else UNIFORM


TABLES: Mapping[TableName, tuple[str, Table]] = {
    "table1": ("pruning on Imagenette", table1),
    "table2": ("pruning on CIFAR-10 and CIFAR-100", table2),
    "table3": ("quantization on ImageNet-1K", table3),
    "table4": ("pruning and quantization on ImageNet-1K", table4),
    "table5": ("language models plan", table5),
    "figure5": ("inference speed-up and memory", figure5),
}


def reproduce(name: TableName, runs: Reproduction, chosen: Chosen) -> Study:
    """Make a table; a model on which it can't be made is told of with the reason."""
    title, table = TABLES[name]
    rows: list[Row] = []
    gone = list(chosen.missing)
    for subject in chosen.subjects:
        try:
            # All of a model's rows, or none.
            rows += list(table(runs, subject))
        except ProfilingAgentError as error:
            gone.append(f"{subject.family} ({subject.model}) on {subject.data.title}: {error}")
    return Study(
        name=name,
        title=title,
        rows=tuple(rows),
        contradicted=contradicted(name, rows),
        differences=_differences(name, runs, chosen),
        missing=tuple(gone),
    )


def _differences(name: TableName, runs: Reproduction, chosen: Chosen) -> tuple[str, ...]:
    here, options = environment(), runs.options
    models = dict.fromkeys(f"{short(subject.model)} as {subject.family}" for subject in chosen.subjects)
    data = dict.fromkeys(subject.data.title for subject in chosen.subjects)
    cuts = dict.fromkeys(
        f"{ratio:.0%} of {layer!r} ({subject.family})"
        for subject in chosen.subjects
        for layer, ratio in [UNIFORM_CUT[subject.family]]
    )
    planner = first(options.advisors)
    said = [
        f"models: {', '.join(models)}",
        f"data: {', '.join(data)}; accuracy on held-out images that no decision saw, the paper's on a random subset that "
        "its loop saw too",
        f"hardware: {here.cpu}, {here.num_threads} threads; the paper's an AMD EPYC 7763 and an A100",
        f"software: torch {here.libraries['torch']}, transformers {here.libraries['transformers']}, Python {here.python}; "
        "the paper's torch 2.6.0",
        f"times: batches of {options.batch_size}, models in turns, 95% intervals over {options.num_sessions} sessions; the paper's one run each",
    ]
    if name != "table3":
        said += [
            "the paper's method: the best of five plans by accuracy, then params, then latency (Algorithm 1), each a cut of the unpruned "
            "model by weights of least L2 norm, not made up for; widths are aligned, units are cut once, and gates refuse a model "
            "that doesn't compute what its masked parent does",
            f"its plans: by {planner}, with our prompts and guards"
            if planner
            else f"its plans: first a uniform cut, {', '.join(cuts)}, then half as much again or half of it",
            "ours: the cheapest float32 model that is shown to lose at most one point, cuts chosen and made up for on calibration images",
        ]
    if name in ("table3", "table4"):
        said.append(
            "int8 of the paper's method: our own dynamic linear layers, with the arithmetic of torch's quantize_dynamic and no pickle"
        )
    return tuple(said)
