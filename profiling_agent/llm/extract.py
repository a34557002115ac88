"""JSON extraction: the object in what a model wrote, whatever it wrote around it."""

import json
import re
from typing import Any

from pydantic import ValidationError

from profiling_agent.documents import clean, parse_json
from profiling_agent.records import unprinted

# A server that cuts off the opening tag leaves the closing one; a model that ran out of tokens leaves the opening one.
REASONING = re.compile(r"<(think|thinking|reasoning)>.*?(</\1>|\Z)", re.DOTALL | re.IGNORECASE)
CLOSING = re.compile(r"</(?:think|thinking|reasoning)>", re.IGNORECASE)
MAX_CHARACTERS = 200_000
# A text full of braces that open nothing would be read from each of them to its end.
MAX_STARTS = 200
# What is quoted of a name or a value that was wrong.
MAX_QUOTED = 80


class NoJsonError(ValueError):
    """There is no JSON object in the text; the message says so in words for whoever wrote it."""


def extract_object(text: str) -> dict[str, Any]:
    """Return the longest JSON object in `text`, outside of its reasoning; NoJsonError where there is none."""
    if len(text) > MAX_CHARACTERS:
        raise NoJsonError(f"the answer is longer than {MAX_CHARACTERS} characters; answer with the JSON object alone")
    text = unprinted(CLOSING.split(REASONING.sub("", text))[-1])
    decoder = json.JSONDecoder(parse_constant=_refuse)
    best: tuple[int, dict[str, Any]] | None = None
    problem, start = "it holds no JSON object", 0
    for _ in range(MAX_STARTS):
        if (start := text.find("{", start)) < 0:
            break
        try:
            found, end = decoder.raw_decode(text, start)
            # Shallow, and its numbers can be written again.
            parse_json(text[start:end], max_bytes=MAX_CHARACTERS)
        except RecursionError:
            problem, start = "it is nested too deeply", start + 1
            continue
        except ValueError as error:
            problem, start = f"it is no valid JSON ({error})", start + 1
            continue
        if best is None or end - start > best[0]:
            best = end - start, found
        start = end
    if best is None:
        raise NoJsonError(f"{problem}; answer with one complete JSON object and nothing else")
    return best[1]


def problems(error: ValidationError) -> str:
    """Return the first things wrong with a document, on one line, for whoever wrote it."""
    return "; ".join(_problem(each) for each in error.errors(include_url=False, include_context=False)[:5])


def _problem(found: Any) -> str:
    where = clean(".".join(str(part) for part in found["loc"])[:MAX_QUOTED]) or "the document"
    return f"{where}: {clean(found['msg'])[:500]} (got {str(found['input'])[:MAX_QUOTED]!r})"


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")
