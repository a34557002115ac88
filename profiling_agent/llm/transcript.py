"""`llm.jsonl`: the record of what a run asks its LLM, with the budget of tokens and the calls of tools.

Nothing here imports LangChain, so that stages needn't. A line is a JSON object with a `kind`: `turn` (one request and its reply), `call` (of a
tool), `complaint` (why something was refused) or `failure` (why a plan was left to the rules).
"""

import json
import os
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

from profiling_agent.errors import AdvisorError, RequestError
from profiling_agent.lib.io import append_line, expanded
from profiling_agent.schemas import Record, Spent, ToolCall

FILE, RECORDED = "llm.jsonl", "recorded:"
# Estimate for servers that count no tokens.
CHARACTERS_A_TOKEN = 4
# Local servers require a key, and don't read it.
NO_KEY = "EMPTY"
# Everything that the OpenAI client reads from the environment and sends to its server.
SECRETS = ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_CUSTOM_HEADERS")
# Characters of a call's arguments and of the first line of its answer, for the report.
MAX_SHOWN = 300


def quoted(text: str, max_length: int = 200) -> str:
    """Return third-party text as a JSON string of one line."""
    return json.dumps(text if len(text) <= max_length else text[:max_length] + "...", ensure_ascii=True)


def redacted(text: str) -> str:
    """Replace keys from the environment by their variables' names: some servers quote keys in errors."""
    for name in SECRETS:
        if (key := os.environ.get(name, "")) not in ("", NO_KEY):
            text = text.replace(key, f"({name})")
    return text


class Transcript:
    """The file of one run: read once, then appended to."""

    def __init__(self, path: Path, *, max_tokens: int = 0) -> None:
        self._path, self._max_tokens, self._lines = path, max_tokens, list[dict[str, Any]]()
        for line in path.read_bytes().splitlines() if path.is_file() else ():
            # A kill may have cut a line off.
            with suppress(ValueError):
                record: Any = json.loads(line)
                self._lines += [record] if isinstance(record, dict) and "kind" in record else []

    @property
    def spent(self) -> Spent:
        """Return requests, tokens, repairs, failures and calls of tools so far."""
        turns = [turn for turn in self.of("turn") if turn.get("mode") != "recorded"]
        return Spent(
            requests=len(turns),
            input_tokens=_total(turns, "input_tokens"),
            output_tokens=_total(turns, "output_tokens"),
            repairs=len(self.of("complaint")),
            failures=tuple(str(line.get("reason")) for line in self.of("failure")),
            calls=tuple(ToolCall(**{name: line[name] for name in ToolCall.model_fields}) for line in self.of("call")),
        )

    def check_budget(self) -> None:
        """Raise AdvisorError if the run may make no further request."""
        num_tokens = 0
        for turn in self.of("turn"):
            count = _total([turn], "input_tokens", "output_tokens")
            num_tokens += turn.get("characters", 0) // CHARACTERS_A_TOKEN if count is None else count
        if num_tokens >= self._max_tokens:
            raise AdvisorError(f"the budget of {self._max_tokens} tokens is spent: raise llm_tokens")

    def add(self, kind: str, **fields: Any) -> None:
        """Append a line, without keys."""
        text = redacted(json.dumps({"kind": kind, **fields}, ensure_ascii=True))
        append_line(self._path, text)
        self._lines.append(json.loads(text))

    def add_call(self, attempt: int, tool: str, arguments: Any, answer: str) -> None:
        """Append the call of a tool for the plan of an attempt; only the first line of its answer is kept, the next turn has all."""
        first = next(iter(answer.splitlines()), "")[:MAX_SHOWN]
        self.add("call", attempt=attempt, tool=tool, arguments=json.dumps(arguments)[:MAX_SHOWN], answer=first)

    def of(self, kind: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the lines of a kind with these fields."""
        return [line for line in self._lines if line["kind"] == kind and fields.items() <= line.items()]


def _total(turns: Iterable[dict[str, Any]], *names: str) -> int | None:
    counts = [turn.get(name) for turn in turns for name in names]
    return None if None in counts else sum(cast("list[int]", counts))


class Question(Record):
    """An agent's question: its instructions and the evidence."""

    agent: str
    instructions: str
    evidence: str


def open_recording(file: str) -> Transcript:
    """Return the transcript of another run; raises RequestError if it has no replies."""
    recording = Transcript(expanded(file))
    if not recording.of("turn"):
        hint = f"give the {FILE} of a run that one planned, as in llm={RECORDED}runs/first/{FILE}"
        raise RequestError(f"{file!r} has no answers of a language model: {hint}")
    return recording
