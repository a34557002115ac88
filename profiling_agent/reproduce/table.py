"""Reproduced tables as records, and as text: each cell what the paper prints beside what was measured here."""

from collections.abc import Mapping
from typing import Literal

from profiling_agent.documents import clean
from profiling_agent.records import Record
from profiling_agent.reproduce.paper import Family, TableName, short

Quantity = Literal[
    "top-1, %",
    "points gained",
    "params, M",
    "% of params saved",
    "MACs, M",
    "MB on disk",
    "% of bytes saved",
    "seconds an image",
    "times as fast",
    "times ONNX Runtime",
    "% of memory saved",
]
# How each is written; significant digits where models of all sizes come.
FORMATS: Mapping[Quantity, str] = {
    "top-1, %": ".2f",
    "points gained": "+.2f",
    "params, M": ".4g",
    "% of params saved": ".1f",
    "MACs, M": ".4g",
    "MB on disk": ".4g",
    "% of bytes saved": ".1f",
    "seconds an image": ".3g",
    "times as fast": ".2f",
    "times ONNX Runtime": ".2f",
    "% of memory saved": ".1f",
}
# The paper's method, made and measured here; and what this product returns.
METHOD, OURS = "the paper's method", "ours"
# What a bar of so many characters stands for, of what Figure 5 draws.
BAR = 20
WHOLE: Mapping[Quantity, float] = {"times as fast": 2.0, "% of memory saved": 100.0}


class Value(Record):
    """A number of a table; `before` is that of the unpruned float32 model, `low` and `high` are a 95% interval where there is one."""

    value: float
    before: float | None = None
    low: float | None = None
    high: float | None = None


class Cell(Record):
    """One quantity as the paper prints it, and as it was measured here; None where nobody has it."""

    quantity: Quantity
    paper: Value | None = None
    here: Value | None = None


class Row(Record):
    """One line of a table: a model on a data set, and what was done to it."""

    model: str
    family: Family
    data: str
    what: str
    cells: tuple[Cell, ...]
    note: str = ""

    def here(self, quantity: Quantity) -> Value | None:
        """Return what was measured of a quantity, None where nothing was."""
        return next((cell.here for cell in self.cells if cell.quantity == quantity), None)

    def paper(self, quantity: Quantity) -> Value | None:
        """Return what the paper prints of a quantity, None where it prints nothing."""
        return next((cell.paper for cell in self.cells if cell.quantity == quantity), None)


class Study(Record):
    """A table, what of the paper's text it contradicts, what was different, and what could not be made."""

    name: TableName
    title: str
    rows: tuple[Row, ...]
    contradicted: tuple[str, ...]
    differences: tuple[str, ...]
    missing: tuple[str, ...]


def told(quantity: Quantity, value: Value | None) -> str:
    """Return a number as it is written: before and after, its interval; nothing where there is none."""
    if value is None:
        return ""
    form = FORMATS[quantity]
    before = f"{value.before:{form}} → " if value.before is not None else ""
    interval = f" [{value.low:{form}}, {value.high:{form}}]" if value.low is not None and value.high is not None else ""
    return f"{before}{value.value:{form}}{interval}"


def columns(study: Study) -> tuple[str, ...]:
    """Return the heads of a table's columns: the paper's number stands beside each quantity of which it prints any."""
    heads = ["model", "data", "what"]
    for quantity in _quantities(study):
        heads += [quantity, "the paper"] if _is_printed(study, quantity) else [quantity]
    return (*heads, "note")


def lines(study: Study) -> tuple[tuple[str, ...], ...]:
    """Return a table's lines as text, a cell for each of its columns; of Figure 5 with bars."""
    found: list[tuple[str, ...]] = []
    for row in study.rows:
        cells = [f"{row.family}: {short(row.model)}", row.data, row.what]
        for quantity in _quantities(study):
            sides = [row.here(quantity), *([row.paper(quantity)] if _is_printed(study, quantity) else [])]
            cells += [_with_bar(study, quantity, side) for side in sides]
        found.append((*cells, row.note))
    return tuple(found)


def markdown(study: Study) -> str:
    """Return a study as Markdown: the table, and the lists below it."""
    heads = columns(study)
    parts = [f"| {' | '.join(heads)} |", f"|{'---|' * len(heads)}"]
    parts += [f"| {' | '.join(map(_escaped, line))} |" for line in lines(study)]
    for title, told_of in sections(study):
        parts += ["", f"{title}:", "", *(f"- {clean(line)}" for line in told_of)]
    return "\n".join([*parts, ""])


def sections(study: Study) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return the lists below a table that aren't empty, each with its title."""
    every = (
        ("What the paper says and this contradicts", study.contradicted),
        ("What was different", study.differences),
        ("What could not be made", study.missing),
    )
    return tuple((title, told_of) for title, told_of in every if told_of)


def _quantities(study: Study) -> tuple[Quantity, ...]:
    return tuple(dict.fromkeys(cell.quantity for row in study.rows for cell in row.cells))


def _is_printed(study: Study, quantity: Quantity) -> bool:
    return any(row.paper(quantity) is not None for row in study.rows)


def _with_bar(study: Study, quantity: Quantity, value: Value | None) -> str:
    text, whole = told(quantity, value), WHOLE.get(quantity)
    if study.name != "figure5" or value is None or whole is None:
        return text
    return f"{'█' * min(max(round(BAR * value.value / whole), 0), BAR)} {text}"


def _escaped(text: str) -> str:
    return clean(text).replace("|", "\\|")
