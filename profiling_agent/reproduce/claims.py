"""Claims of the paper's text that a local run contradicts, each in a sentence with both numbers.

A claim is contradicted where the interval of what was measured of the paper's own method lies wholly on the other side; what is
within the noise contradicts nothing.
"""

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence

from profiling_agent.reproduce.paper import TableName, short
from profiling_agent.reproduce.table import METHOD, Quantity, Row, Value, told

Claim = Callable[[Sequence[Row]], Iterator[str]]
# What the paper calls a collapse loses this many points at least.
COLLAPSE = 10.0
# "approximately 74% across models" (5.5), of which the printed rows of three models are 74.3 and more.
MOST_OF_THE_BYTES = 70.0


def contradicted(name: TableName, rows: Sequence[Row]) -> tuple[str, ...]:
    """Return a sentence for each claim on a table that its rows contradict, model by model."""
    by_subject: defaultdict[tuple[str, str], list[Row]] = defaultdict(list)
    for row in rows:
        by_subject[row.model, row.data].append(row)
    return tuple(said for own in by_subject.values() for claim in CLAIMS[name] for said in claim(own))


def _of(rows: Sequence[Row], what: str) -> Row | None:
    return next((row for row in rows if row.what == what), None)


def _method(rows: Sequence[Row]) -> Row | None:
    return _of(rows, METHOD)


def _who(row: Row) -> str:
    return f"{row.family} ({short(row.model)}, {row.data})"


def _told(row: Row, quantity: Quantity) -> str:
    return told(quantity, row.here(quantity))


def _high(value: Value) -> float:
    return value.value if value.high is None else value.high


def _low(value: Value) -> float:
    return value.value if value.low is None else value.low


def best_balance(rows: Sequence[Row]) -> Iterator[str]:
    """Table 1: its method has the better balance of params and accuracy than uniform cuts, on every model."""
    method = _method(rows)
    gained = method.here("points gained") if method else None
    params = method.here("% of params saved") if method else None
    if method is None or gained is None or params is None:
        return
    for row in rows:
        own, other = row.here("% of params saved"), row.here("points gained")
        if row.what.partition(" ")[0] not in ("l1", "l2", "random") or own is None or other is None:
            continue
        if own.value >= params.value and _low(other) > _high(gained):
            yield (
                f"the paper says that its method has the better balance than uniform cuts on all models (5.2.1); on {_who(row)} "
                f"{row.what} saves {own.value:.1f}% of the params for {_told(row, 'points gained')} points, its method "
                f"{params.value:.1f}% for {_told(method, 'points gained')}"
            )


def collapse(rows: Sequence[Row]) -> Iterator[str]:
    """Table 1: uniform cuts bring a ResNet-101 to collapse."""
    for row in rows:
        paper, here = row.paper("points gained"), row.here("points gained")
        if row.what == METHOD or paper is None or here is None or paper.value > -COLLAPSE:
            continue
        if _low(here) > -COLLAPSE:
            yield (
                f"the paper says that uniform cuts collapse this network ({row.what}: {paper.value:+.1f} points, 5.2.1); "
                f"on {_who(row)} it is {_told(row, 'points gained')}"
            )


def keeps_accuracy(most: float, where: str) -> Claim:
    """Return the claim that its method loses less than so many points."""

    def claim(rows: Sequence[Row]) -> Iterator[str]:
        for row in (row for row in rows if METHOD in row.what):
            paper, here = row.paper("points gained"), row.here("points gained")
            # What the paper's own row doesn't keep is no claim on it.
            if paper is None or here is None or paper.value < -most or _high(here) >= -most:
                continue
            yield (
                f"the paper's method gains {paper.value:+.2f} points there ({where}); on {_who(row)} {row.what} gains "
                f"{_told(row, 'points gained')}"
            )

    return claim


def faster_than_onnx(rows: Sequence[Row]) -> Iterator[str]:
    """Table 3: its int8 is 1.36 to 1.66 times as fast as ONNX Runtime's."""
    method = _method(rows)
    here = method.here("times ONNX Runtime") if method else None
    if method is None or here is None or _high(here) >= 1:
        return
    paper = method.paper("times ONNX Runtime")
    yield (
        f"the paper's int8 is {paper.value if paper else 0:.2f} times as fast as ONNX Runtime's (5.4); on {_who(method)} it is "
        f"{_told(method, 'times ONNX Runtime')} times as fast"
    )


def smaller_than_onnx(rows: Sequence[Row]) -> Iterator[str]:
    """Table 3: its int8 saves more bytes than ONNX Runtime's."""
    method, onnx = _method(rows), _of(rows, "ONNX Runtime dynamic")
    own = method.here("% of bytes saved") if method else None
    other = onnx.here("% of bytes saved") if onnx else None
    if method is None or own is None or other is None or own.value >= other.value:
        return
    yield (
        f"the paper says that its int8 consistently saves more bytes than ONNX Runtime's (5.4); on {_who(method)} it is "
        f"{own.value:.1f}% beside {other.value:.1f}%"
    )


def quantization_pays(rows: Sequence[Row]) -> Iterator[str]:
    """Table 4: int8 saves about 74% of the bytes and makes every model faster."""
    row = _of(rows, f"quantization, {METHOD}")
    if row is None:
        return
    faster, lighter = row.here("times as fast"), row.here("% of bytes saved")
    if faster is not None and _high(faster) < 1:
        yield (
            f"the paper says that int8 is consistently faster (5.5); on {_who(row)} it is {_told(row, 'times as fast')} times "
            "as fast"
        )
    paper = row.paper("% of bytes saved")
    if lighter is not None and paper is not None and lighter.value < MOST_OF_THE_BYTES:
        own = f", and its own table has {paper.value:.1f}%" if paper.value < MOST_OF_THE_BYTES else ""
        yield (
            f"the paper says that int8 saves approximately 74% of the bytes across models (5.5); on {_who(row)} it saves "
            f"{lighter.value:.1f}%{own}"
        )


def fastest(rows: Sequence[Row]) -> Iterator[str]:
    """Figure 5: its pruned models are faster than all baselines'."""
    method = _method(rows)
    own = method.here("times as fast") if method else None
    if method is None or own is None:
        return
    for row in rows:
        other = row.here("times as fast")
        if row.what.partition(" ")[0] not in ("l1", "l2", "random") or other is None or other.value <= _high(own):
            continue
        yield (
            f"the paper says that its pruned models are faster than all baselines' (5.2.2); on {_who(row)} {row.what} is "
            f"{other.value:.2f} times as fast, its method {_told(method, 'times as fast')}"
        )


CLAIMS: dict[TableName, tuple[Claim, ...]] = {
    "table1": (best_balance, collapse, keeps_accuracy(1.0, "Table 1")),
    "table2": (keeps_accuracy(1.0, "Table 2"),),
    "table3": (faster_than_onnx, smaller_than_onnx, keeps_accuracy(1.0, "Table 3")),
    "table4": (keeps_accuracy(1.0, "Table 4"), quantization_pays),
    "table5": (),
    "figure5": (fastest,),
}
