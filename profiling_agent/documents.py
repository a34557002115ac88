"""Documents: JSON files as records, errors of pydantic as one line, and text that is safe to show.

A value is quoted in an error only where the document is the reader's own.
"""

import json
import unicodedata
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

MAX_QUOTED = 80
# What moves a terminal's cursor or turns the direction of text round; a line break and a tab are layout.
LAYOUT = frozenset("\n\t")
HIDDEN = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})

ModelT = TypeVar("ModelT", bound=BaseModel)


class DocumentError(ValueError):
    """JSON that isn't read, in words that follow "the file is damaged: "."""


def parse_json(text: str | bytes) -> Any:
    """Return the content of a JSON document; DocumentError where it is none."""
    try:
        return json.loads(text)
    # JSONDecodeError, UnicodeDecodeError, and a whole number of thousands of digits.
    except (ValueError, RecursionError) as error:
        raise DocumentError(f"it is no JSON ({error})") from None


def first_problem(error: ValidationError, *, quotes: bool = True) -> str:
    """Return the first thing wrong as `where: what (got value)`, on one line; without the value unless it `quotes`."""
    problem = error.errors(include_url=False, include_context=False)[0]
    if problem["type"] == "json_invalid":
        return f"it is no JSON ({problem['msg'].removeprefix('Invalid JSON: ')})"
    worded = problem["msg"].removeprefix("Value error, ")
    if not problem["loc"] and problem["type"] == "value_error" and quotes:
        # From a rule of ours over several fields, which names them and their values.
        return worded
    where = clean(".".join(str(part) for part in problem["loc"])[:MAX_QUOTED]) or "document"
    # Only rules of ours put values into their messages.
    what = worded if quotes or problem["type"] != "value_error" else "not a value that is allowed"
    return f"{where}: {what} (got {str(problem['input'])[:MAX_QUOTED]!r})" if quotes else f"{where}: {what}"


def parse_record(kind: type[ModelT], text: str | bytes, *, strict: bool | None = None, quotes: bool = False) -> ModelT:
    """Return the record in a JSON document; DocumentError where it holds none."""
    try:
        return kind.model_validate_json(text, strict=strict)
    except ValidationError as error:
        raise DocumentError(first_problem(error, quotes=quotes)) from None


def read_json(path: Path) -> Any:
    """Return the content of a JSON file; OSError where it can't be opened, DocumentError where it is no JSON."""
    return parse_json(path.read_bytes())


def read_record(kind: type[ModelT], path: Path) -> ModelT:
    """Return the record in a JSON file; OSError and DocumentError as `read_json`."""
    return parse_record(kind, path.read_bytes())


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
