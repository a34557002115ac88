"""Numbers of the pages, followed to the files that the pages name for them.

A page is read block by block, a paragraph or a table. The sources of a block are the files that it names (`*.json` of `benchmarks/results/`, or
another page, in which the number has to stand as it is printed) and the results, or the log, that were named last under its heading.
What is looked up in them are intervals, as three numbers of one place, and numbers with a decimal point, each to the last digit
that is printed.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, cast

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
Triple = tuple[float, float, float]

NAMED = re.compile(r"[\w*/.-]+\.(?:json|md)\b")
NUMBER = r"-?\d[\d,]*(?:\.\d+)?"
INTERVAL = re.compile(rf"({NUMBER})(%?)(?: points)? \[({NUMBER}), ({NUMBER})\]")
DECIMAL = re.compile(r"(?<![\w./-])(-?\d[\d,]*\.\d+)(%?)(?!\.?\d)")
# Code, where links lead, what the paper printed, and names and versions are no measurements of ours. What no file holds says so.
NO_CLAIM = re.compile(
    r"`[^`]*`|\]\([^)]*\)|\*(?!\*)[^*]+\*(?!\*)|(?:torch|transformers|Python|opset|ViT,|DeiT,|Swin,|ResNet,|MobileNetV1|Table|decimals?) ?[\d.]+"
    r"|[\d.]+ GHz|[\d.]+(?: to [\d.]+)? M params|\([^()]*\bnot kept\b[^()]*\)|(?:bound|bounds|aim|asks? for|allowed|allows) (?:of |at |is )?[\d.]+|[\d.]+ (?:is|are) allowed"
)
# Columns of a table that hold no measurement of ours.
OTHERS = re.compile(r"\bnot kept\b|\bpaper'?s?,? (?!recipe)|^the paper$|Table")
LOG = "docs/decisions/LOG.md"


@dataclass(frozen=True)
class Claim:
    """A number, or the three of an interval, that a page prints, and the files that it names for it."""

    printed: str
    values: tuple[str, ...]
    is_percent: bool
    sources: tuple[str, ...]


def claims(page: Path) -> Iterator[Claim]:
    """Yield every interval and every number with a decimal point that a page prints as measured."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    named: tuple[str, ...] = ()
    for block in (part.strip() for part in re.split(r"\n\s*\n|\n(?=#)|\n(?=- )", text)):
        if block.startswith("#"):
            named = ()
            continue
        own = tuple(NAMED.findall(block))
        sources = (*named, *own)
        named = tuple(name for name in own if name.endswith(".json") or name == LOG) or named
        for piece in _cells(block) if block.startswith("|") else (" ".join(block.split()),):
            yield from _claims_in(piece, sources)


def _cells(table: str) -> Iterator[str]:
    """Yield each cell of a table below its head that is a measurement of ours."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    for label, *cells in rows:
        for name, cell in zip(head[1:], cells, strict=True):
            if not OTHERS.search(name) and not re.search(r"\bpaper\b", label):
                yield cell


def _claims_in(text: str, sources: tuple[str, ...]) -> Iterator[Claim]:
    left = NO_CLAIM.sub(" ", text).replace("**", "")
    for found in INTERVAL.finditer(left):
        value, percent, low, high = found.groups()
        yield Claim(found[0], (value, low, high), bool(percent), sources)
    for found in DECIMAL.finditer(INTERVAL.sub(" ", left)):
        yield Claim(found[0], (found[1],), bool(found[2]), sources)


def is_found(claim: Claim) -> bool:
    """Return whether one of its sources holds what is claimed."""
    if any(_is_printed(claim, name) for name in claim.sources if name.endswith(".md")):
        return True
    held = (place for name in claim.sources if name.endswith(".json") for place in places(name))
    return any(_holds(*place, claim) for place in held)


def _is_printed(claim: Claim, name: str) -> bool:
    found = [path for path in (ROOT / name, ROOT / "docs" / name, ROOT / "docs" / "decisions" / name) if path.is_file()]
    pattern = re.compile(rf"(?<![\d.]){re.escape(claim.printed)}(?![\d]|\.\d)")
    return any(pattern.search(" ".join(path.read_text(encoding="utf-8").replace("**", "").split())) for path in found)


def _holds(numbers: Sequence[float], triples: Sequence[Triple], claim: Claim) -> bool:
    if len(claim.values) == 3:
        # As it is, or as points where it is a fraction.
        scaled = [[scale * value for value in triple] for triple in triples for scale in (1, 100)]
        return any(all(map(_is_rounded, claim.values, values)) for values in scaled)
    told = [abs(number) for number in numbers]
    ways = [100 * number for number in told] + told
    if claim.is_percent:
        ways += [100 - way for way in ways]
    else:
        ways += [number / scale for number in told for scale in (1e9, 1e6) if number > 1e6]
    return any(_is_rounded(claim.values[0].lstrip("-"), way) for way in ways)


def _is_rounded(printed: str, value: float) -> bool:
    """Return whether a value, rounded to the digits of a printed one, is it."""
    digits = len(printed.partition(".")[2])
    return abs(float(printed.replace(",", "")) - value) <= 0.5 * 10**-digits + 1e-9


@cache
def places(name: str) -> list[tuple[list[float], list[Triple]]]:
    """Return the numbers and triples in each row and check of a file of results, by the name that a page has for it."""
    documents = [json.loads(path.read_text("utf-8")) for path in sorted(RESULTS.glob(name.split("results/")[-1]))]
    return [_place(row) for each in documents for row in (*each.get("rows", ()), *each.get("checks", ()))]


def _place(row: dict[str, Any]) -> tuple[list[float], list[Triple]]:
    numbers, triples = list[float](), list[Any]()
    for held in _walk(row):
        if isinstance(held, str):
            found = re.findall(r"([-+]?[\d.]+) \[([-+]?[\d.]+), ([-+]?[\d.]+)\]", held)
            triples += [tuple(map(float, triple)) for triple in found]
            numbers += [float(found) for found in re.findall(r"(?<![\w.])[-+]?\d+\.\d+", held)]
        elif isinstance(held, list):
            triples.append(tuple(held[:3]))
        elif isinstance(held, dict):
            value = next((held[key] for key in ("value", "drop", "gain", "more_lost", "speedup") if key in held), None)
            if value is not None and held.get("low") is not None:
                triples.append((value, held["low"], held["high"]))
        else:
            numbers.append(float(held))
    return numbers, triples


def _walk(held: Any) -> Iterator[Any]:
    """Yield the numbers and words of a JSON document, and each dict, and each list of three numbers or more."""
    if isinstance(held, dict):
        yield held
        for value in cast("dict[str, Any]", held).values():
            yield from _walk(value)
    elif isinstance(held, list):
        values = cast("list[Any]", held)
        if len(values) >= 3 and all(isinstance(value, int | float) for value in values):
            yield values
        for value in values:
            yield from _walk(value)
    elif isinstance(held, int | float | str) and not isinstance(held, bool):
        yield held
