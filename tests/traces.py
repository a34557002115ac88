"""Numbers of the pages, followed to the files that the pages name for them.

A page is read block by block, a paragraph or a table. The sources of a block are the files that it names (`*.json` of `benchmarks/results/`, or
another page, in which the number has to stand as it is printed) and the results, or the log, that were named last under its heading.
A cell of a table is looked up in the rows of JSON that its model, share, method and so on choose (`CHOICES`), a number in prose
anywhere in its sources. What is looked up are intervals, as three numbers of one place, and numbers with a decimal point, each
to the last digit that is printed.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
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
UNKEPT = re.compile(r"\bnot kept\b")
PAPER = re.compile(r"\bpaper\b")
LOG = "docs/decisions/LOG.md"
# Names of models in the pages, the longer ones first, and those in the files.
MODELS = {
    r"DINOv2-S": r"dinov2-s",
    r"BEiT-B": r"beit-b",
    r"DeiT-S": r"deit-s",
    r"Swin-T": r"swin-t",
    r"ConvNeXt-T": r"convnext-t",
    r"ResNet-50": r"resnet-50",
    r"RegNetY": r"regnety",
    r"EfficientNet": r"efficientnet",
    r"MobileNetV2": r"mobilenetv2",
    r"MobileViT": r"mobilevit",
    r"SegFormer": r"segformer",
    r"PVT-T": r"pvt-t",
    r"ViT-B": r"vit-b",
    r"DeiT-B": r"deit-b",
    r"Swin-B": r"swin-b",
    r"ResNet-101": r"resnet-101",
    r"DeiT": r"deit(?!-[bs])",
    r"ViT": r"vit(?!-b)",
    r"Swin": r"swin(?!-[bt])",
    r"ResNet": r"resnet(?!-101|-50)",
    r"MobileNet": r"mobilenet",
}
# What a label or a column's head says, and which rows of JSON that means: a field, and what it holds. The first of a field that fits counts.
CHOICES: dict[str, tuple[tuple[str, str], ...]] = {
    "share": ((r"\b20%", r"0\.2$"), (r"\b30%", r"0\.3$"), (r"\b50%", r"0\.5$")),
    "method": (
        (r"ranked by L2", "ours, L2 order$"),
        (r"not compensated", "ours, no compensation$"),
        (r"the same ratio", "ours, the same ratio$"),
        (r"mean shift", "VBP$"),
        (r"variance-based", "VBP, folded$"),
        (r"Hessian, isomorphic", "TP hessian isomorphic, folded$"),
        (r"Hessian", "TP hessian global, folded$"),
        (r"Taylor", "TP taylor global, folded$"),
        (r"FLAP with its own", "FLAP$"),
        (r"FLAP", "FLAP, folded$"),
        (r"uniform L2", "uniform l2, folded$"),
        (r"uniform L1, as it comes", "uniform l1$"),
        (r"uniform L1", "uniform l1, folded$"),
        (r"ours|everything|lost at", "ours$"),
    ),
    "deployment": (
        (r"our choice", ""),
        (r"eager dynamic", "eager dynamic"),
        (r"ONNX Runtime dynamic$", "onnxruntime dynamic"),
        (r"ONNX Runtime static", "onnxruntime static"),
        (r"inductor", "inductor"),
        (r"OpenVINO static \(ours\)", "openvino static$"),
        (r"OpenVINO static \(NNCF\)", "openvino static_nncf$"),
    ),
    "final": (
        (r"ours over it", r"(openvino static(_nncf)?|onnxruntime dynamic)$"),
        (r"pruned by 25%", "pruned, 25%"),
        (r"pruned by .* and int8|both over int8", r"pruned, (openvino|onnxruntime)"),
        (r"by 4\d to 4\d%, fp32", r"pruned, 4\d%"),
        (r"int8, ours", r"(openvino static(_nncf)?|onnxruntime dynamic)$"),
        (r"as it comes", "ONNX Runtime dynamic"),
        (r"paper's recipe, here", "torch.ao"),
    ),
    "planner": ((r"rules alone", "rules$"), (r"hybrid", "hybrid$")),
    "what": ((r"the paper's tables", "both, ours$"),),
    "processor": ((r"Xeon", ".*Xeon"), (r"EPYC", ".*EPYC")),
    "variant": ((r"\bint8 alone", "quantized$"), (r"\bpruned, eager", "pruned$"), (r"\bboth\b", r"pruned\+quantized$")),
}


@dataclass(frozen=True)
class Claim:
    """A number, or the three of an interval, that a page prints; `said` is what tells which rows of JSON it is of."""

    page: str
    printed: str
    values: tuple[str, ...]
    is_percent: bool
    said: str
    in_table: bool
    sources: tuple[str, ...]


@dataclass(frozen=True)
class Place:
    """A row of JSON: its fields in words, and the numbers and triples in it."""

    fields: dict[str, str]
    numbers: tuple[float, ...]
    triples: tuple[Triple, ...] = field(default=())


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
        for said, piece in _cells(block) if block.startswith("|") else (("", " ".join(block.split())),):
            yield from _claims_in(piece, page.name, said, sources, in_table=block.startswith("|"))


def _cells(table: str) -> Iterator[tuple[str, str]]:
    """Yield each cell of a table below its head, with what its row's label, its column's head and the corner say."""
    head, _, *rows = ([cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines())
    places_ = [place for place, name in enumerate(head) if name in ("processor", "machine")]
    for label, *cells in rows:
        label = ", ".join((label, *(cells[place - 1] for place in places_)))
        for name, cell in zip(head[1:], cells, strict=True):
            if not (
                UNKEPT.search(name)
                or PAPER.search(label)
                or re.search(r"\bpaper'?s?,? (?!recipe)|^the paper$|Table", name)
            ):
                yield f"{label}\n{name}\n{head[0]}", cell


def _claims_in(text: str, page: str, said: str, sources: tuple[str, ...], *, in_table: bool) -> Iterator[Claim]:
    left = NO_CLAIM.sub(" ", text).replace("**", "")
    for found in INTERVAL.finditer(left):
        value, percent, low, high = found.groups()
        yield Claim(page, found[0], (value, low, high), bool(percent), said, in_table, sources)
    for found in DECIMAL.finditer(INTERVAL.sub(" ", left)):
        yield Claim(page, found[0], (found[1],), bool(found[2]), said, in_table, sources)


def is_found(claim: Claim) -> bool:
    """Return whether one of its sources holds what is claimed."""
    pages = [name for name in claim.sources if name.endswith(".md")]
    if any(_is_printed(claim, name) for name in pages):
        return True
    held = [place for name in claim.sources if name.endswith(".json") for place in places(name)]
    chosen = [place for place in held if _is_chosen(place, claim.said)] if claim.in_table else held
    return any(_holds(place, claim) for place in chosen)


def _is_printed(claim: Claim, name: str) -> bool:
    found = [path for path in (ROOT / name, ROOT / "docs" / name, ROOT / "docs" / "decisions" / name) if path.is_file()]
    pattern = re.compile(rf"(?<![\d.]){re.escape(claim.printed)}(?![\d]|\.\d)")
    return any(pattern.search(" ".join(path.read_text(encoding="utf-8").replace("**", "").split())) for path in found)


def _is_chosen(place: Place, said: str) -> bool:
    label, name, corner = said.split("\n")
    first = [model for part in (label, name) for model in re.findall("|".join(MODELS), part)]
    if first and "model" in place.fields and not re.match(MODELS[first[0]], place.fields["model"].lower()):
        return False
    if "model" in place.fields and ("its norms" in label) != ("norms" in place.fields["model"]):
        return False
    for key, options in CHOICES.items():
        wanted = next(
            (held for part in (name, label, corner) for words, held in options if re.search(words, part)), None
        )
        if wanted is not None and key in place.fields and not re.match(wanted, place.fields[key]):
            return False
    return True


def _holds(place: Place, claim: Claim) -> bool:
    if len(claim.values) == 3:
        return any(
            all(map(_is_rounded, claim.values, scaled)) for triple in place.triples for scaled in _scaled(triple)
        )
    (printed,) = claim.values
    told = [abs(number) for number in place.numbers]
    ways = [100 * number for number in told]
    if claim.is_percent:
        ways += told
        ways += [100 - way for way in ways]
    else:
        ways += [*told, *(number / scale for number in told for scale in (1e9, 1e6) if number > 1e6)]
    return any(_is_rounded(printed.lstrip("-"), way) for way in ways)


def _scaled(triple: Triple) -> Iterator[Triple]:
    """Yield a triple as it is, and as points where it is a fraction."""
    yield triple
    value, low, high = triple
    yield 100 * value, 100 * low, 100 * high


def _is_rounded(printed: str, value: float) -> bool:
    """Return whether a value, rounded to the digits of a printed one, is it."""
    digits = len(printed.partition(".")[2])
    return abs(float(printed.replace(",", "")) - value) <= 0.5 * 10**-digits + 1e-9


@cache
def places(name: str) -> tuple[Place, ...]:
    """Return the rows and checks of a file of results by the name that a page has for it; none where there is no such file."""
    found = sorted(RESULTS.glob(name.split("results/")[-1]))
    rows: list[Any] = []
    for path in found:
        document = json.loads(path.read_text(encoding="utf-8"))
        processor = {key: value for key, value in document.get("environment", {}).items() if key == "processor"}
        rows += [processor | row for row in (*document.get("rows", ()), *document.get("checks", ()))]
    return tuple(_place(row) for row in rows)


def _place(row: dict[str, Any]) -> Place:
    numbers, triples = [], []
    for held in _walk(row):
        if isinstance(held, str):
            triples += [
                tuple(map(float, found))
                for found in re.findall(r"([-+]?[\d.]+) \[([-+]?[\d.]+), ([-+]?[\d.]+)\]", held)
            ]
            numbers += [float(found) for found in re.findall(r"(?<![\w.])[-+]?\d+\.\d+", held)]
        elif isinstance(held, list):
            triples.append(tuple(held[:3]))
        elif isinstance(held, dict):
            value = next((held[key] for key in ("value", "drop", "gain", "more_lost", "speedup") if key in held), None)
            if value is not None and held.get("low") is not None:
                triples.append((value, held["low"], held["high"]))
        else:
            numbers.append(float(held))
    fields = {key: str(value) for key, value in row.items() if isinstance(value, str | float | int)}
    if "model" in fields:
        fields["model"] = fields["model"].split("/work/shared/models/")[-1]
    return Place(fields, tuple(numbers), cast("tuple[Triple, ...]", tuple(triples)))


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


def unfounded(pages: Sequence[Path]) -> list[Claim]:
    """Return what the pages claim and none of its sources holds."""
    return [claim for page in pages for claim in claims(page) if not is_found(claim)]
