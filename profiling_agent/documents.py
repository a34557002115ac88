"""Documents: the one door for JSON that somebody else may have written, and the one cleaning of text for people.

JSON is bounded in size, depth and numbers before anything looks into it. An error names the field and the reason; what was
found there is quoted only where the document is the user's own, because whoever reads the error may not be who may read
the file.
"""

import json
import unicodedata
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from profiling_agent.files import MAX_DOCUMENT, read_bytes

MAX_DEPTH = 100
# 2**63 has 19 digits; nothing of ours counts further.
MAX_DIGITS = 19
MAX_QUOTED = 80
# What moves a terminal's cursor or turns the direction of text round; a line break and a tab are layout.
LAYOUT = frozenset("\n\t")
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})

ModelT = TypeVar("ModelT", bound=BaseModel)


class DocumentError(ValueError):
    """JSON that isn't read, in words that follow "the file is damaged: "."""


def parse_json(text: str | bytes, *, max_bytes: int = MAX_DOCUMENT) -> Any:
    """Return what a JSON document says; DocumentError where it is none, or too large, too deep, or out of numbers."""
    if len(text) > max_bytes:
        raise DocumentError(f"it is larger than {max_bytes:,} bytes")
    try:
        found = json.loads(text, parse_int=_integer, parse_float=_float, parse_constant=_constant)
    except DocumentError:
        raise
    except RecursionError:
        raise DocumentError(f"it is nested deeper than {MAX_DEPTH}") from None
    except json.JSONDecodeError as error:
        raise DocumentError(f"it is no JSON (line {error.lineno}, column {error.colno}: {error.msg})") from None
    except UnicodeDecodeError:
        raise DocumentError("it is no UTF-8 text") from None
    _check_depth(found)
    return found


def _integer(digits: str) -> int:
    if len(digits.lstrip("-")) > MAX_DIGITS:
        raise DocumentError(f"it has a whole number of {len(digits)} digits, {MAX_DIGITS} are read")
    return int(digits)


def _float(digits: str) -> float:
    if (value := float(digits)) in (float("inf"), float("-inf")):
        raise DocumentError("it has a number beyond those of float64")
    return value


def _constant(name: str) -> float:
    raise DocumentError(f"it has {name}, which is no JSON")


def _check_depth(document: Any) -> None:
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    raise DocumentError(f"it is nested deeper than {MAX_DEPTH}")


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(value.values())
    return value if isinstance(value, list) else []


def first_problem(error: ValidationError, *, quotes: bool = True) -> str:
    """Return the first thing wrong as `where: what (got value)`, on one line; without the value unless it `quotes`."""
    problem = error.errors(include_url=False, include_context=False)[0]
    if not problem["loc"] and problem["type"] == "value_error" and quotes:
        # Said by a rule of ours over several fields, which names them and what it saw.
        return problem["msg"].removeprefix("Value error, ")
    where = clean(".".join(str(part) for part in problem["loc"])[:MAX_QUOTED]) or "document"
    # Values are quoted in pydantic's own words only where a rule of ours wrote them.
    worded = problem["msg"].removeprefix("Value error, ")
    said = worded if quotes or problem["type"] != "value_error" else "not a value that is allowed"
    return f"{where}: {said} (got {str(problem['input'])[:MAX_QUOTED]!r})" if quotes else f"{where}: {said}"


def parse_record(
    kind: type[ModelT],
    text: str | bytes,
    *,
    strict: bool | None = None,
    quotes: bool = False,
    max_bytes: int = MAX_DOCUMENT,
) -> ModelT:
    """Return a record of ours that a JSON document holds; DocumentError where it holds none."""
    parse_json(text, max_bytes=max_bytes)
    try:
        return kind.model_validate_json(text, strict=strict)
    except ValidationError as error:
        raise DocumentError(first_problem(error, quotes=quotes)) from None


def read_json(path: Path, *, under: Path | None = None, max_bytes: int = MAX_DOCUMENT) -> Any:
    """Return what a JSON file says; OSError where it can't be opened, DocumentError where it says nothing."""
    return parse_json(read_bytes(path, under=under, max_bytes=max_bytes), max_bytes=max_bytes)


def read_record(
    kind: type[ModelT],
    path: Path,
    *,
    under: Path | None = None,
    strict: bool | None = None,
    quotes: bool = False,
    max_bytes: int = MAX_DOCUMENT,
) -> ModelT:
    """Return a record of ours from a JSON file; OSError and DocumentError as `read_json`."""
    text = read_bytes(path, under=under, max_bytes=max_bytes)
    return parse_record(kind, text, strict=strict, quotes=quotes, max_bytes=max_bytes)


def first_line(error: BaseException) -> str:
    """Return the first line of what an exception says, the name of its kind where it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def clean(text: str, *, layout: bool = False) -> str:
    """Return text that shows as it reads: control, format and unassigned characters as escapes, in `layout` but for \\n and \\t."""
    if text.isprintable():
        return text
    kept = LAYOUT if layout else frozenset[str]()
    return "".join(
        character
        if character in kept or unicodedata.category(character) not in HIDDEN
        else character.encode("unicode_escape").decode("ascii")
        for character in text
    )


def inert(text: str) -> str:
    """Return text for a Markdown page in which it opens no link, fetches no picture and is no HTML; other marks stay."""
    return clean(text, layout=True).replace("](", "] (").replace("![", "! [").replace("<", "&lt;")
