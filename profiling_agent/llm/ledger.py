"""Ledger: what a run has asked and been told, in its folder; it replays answers, so that nothing is paid for twice.

`llm.jsonl` says which model is planned for, and has one line for each request, each turn with a model, each question without an answer,
each answer that was accepted, and the run's end; keys are never part of any. Whoever gave the folder away may have written in it: a line that isn't one of these is
read round and counted.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, cast

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from profiling_agent.documents import DocumentError, parse_json
from profiling_agent.errors import AdvisorError, RunError
from profiling_agent.files import FileRefusedError, append_line, open_regular
from profiling_agent.llm.endpoint import redacted
from profiling_agent.llm.reply import MAX_TOKENS
from profiling_agent.records import Spent

FILE = "llm.jsonl"
# A prompt has up to 40,000 characters; what a model says beyond is told by its length.
MAX_TEXT = 50_000
# From here on a turn's texts are left out, its tokens aren't: thousands of requests don't fill a disk.
MAX_WRITTEN = 32 * 2**20
MAX_NAME = 200
# What is read back: all that is written, and no more of what a stranger added.
MAX_READ, MAX_LINE = 2 * MAX_WRITTEN, 4 * 2**20
# The report counts failures and tells the last.
MAX_FAILURES, MAX_REASON = 1_000, 500
# What a turn whose server counts nothing is taken for; English has about four characters a token.
CHARACTERS_A_TOKEN = 4


class _Line(BaseModel):
    """A line; what it has beside these fields is for whoever reads the file."""

    model_config = ConfigDict(strict=True, extra="ignore")


class _Run(_Line):
    kind: Literal["run"]
    architecture: str = Field(max_length=MAX_NAME)


class _End(_Line):
    kind: Literal["end"]


class _Request(_Line):
    kind: Literal["request"]


class _Turn(_Line):
    kind: Literal["turn"]
    input_tokens: int | None = Field(ge=0, le=MAX_TOKENS)
    output_tokens: int | None = Field(ge=0, le=MAX_TOKENS)
    complaint: str | None
    characters: int = Field(default=0, ge=0, le=MAX_TOKENS)


class _Failure(_Line):
    kind: Literal["failure"]
    agent: str = ""
    question: str = Field(default="", max_length=100)
    reason: str


class _Answer(_Line):
    kind: Literal["answer"]
    agent: str = ""
    question: str = Field(max_length=100)
    answer: Any


_AnyLine = _Run | _Request | _Turn | _Failure | _Answer | _End
LINE: TypeAdapter[_AnyLine] = TypeAdapter(Annotated[_AnyLine, Field(discriminator="kind")])


class Ledger:
    """The file, read once when a run begins or goes on."""

    def __init__(self, folder: Path, *, max_requests: int, max_tokens: int) -> None:
        """Read what an earlier process of this run wrote; RunError where the file is none that can be read."""
        self._path = folder / FILE
        self._max_requests, self._max_tokens = max_requests, max_tokens
        # As JSON: a document in memory takes many times its text.
        self._answers: dict[str, str] = {}
        self._requests = self._repairs = self._unread = self._size = 0
        self._input_tokens: int | None = 0
        self._output_tokens: int | None = 0
        self._budgeted = 0
        self._failures: list[str] = []
        self._failed: dict[str, str] = {}
        # By agent: the questions that got an answer, or none for good.
        self._settled: Counter[str] = Counter()
        self._has_begun = False
        self._read()

    @property
    def spent(self) -> Spent:
        """Return what was used up so far."""
        return Spent(
            requests=self._requests,
            input_tokens=self._input_tokens,
            output_tokens=self._output_tokens,
            repairs=self._repairs,
            failures=tuple(self._failures),
            unread_lines=self._unread,
        )

    def begin(self, architecture: str) -> None:
        """Note which model is planned for, once."""
        if not self._has_begun:
            self._write({"kind": "run", "architecture": architecture[:MAX_NAME]})

    def end(self) -> None:
        """Note that the run came to its end: a record without that is cut short."""
        self._write({"kind": "end"})

    def num_settled(self, agent: str) -> int:
        """Return how many questions of an agent got an answer, or none for good."""
        return self._settled[agent]

    def spend(self) -> None:
        """Note a request that is about to be made; AdvisorError where the budget allows none.

        A turn whose server counted no tokens is taken for a quarter of its characters.
        """
        if self._requests >= self._max_requests:
            raise AdvisorError(f"the budget of {self._max_requests} requests is spent: raise advisor_requests")
        if self._budgeted >= self._max_tokens:
            raise AdvisorError(f"the budget of {self._max_tokens} tokens is spent: raise advisor_tokens")
        self._write({"kind": "request"})

    def answer(self, key: str) -> Any:
        """Return the answer that was accepted to this question, None where there is none."""
        return parse_json(self._answers.get(key, "null"))

    def note_turn(self, **said: Any) -> None:
        """Note what was said in a turn, and its tokens; long texts are cut, and in a large file left out, which is said."""
        texts = {name: said.pop(name) for name in ("asked", "said", "calls") if name in said}
        written = (
            {"left_out": f"{', '.join(texts)}: the file has {MAX_WRITTEN:,} bytes"}
            if self._size >= MAX_WRITTEN
            else _shortened(texts)
        )
        characters = min(_characters(texts), MAX_TOKENS)
        self._write({"kind": "turn", **_shortened(said), "characters": characters, **written})

    def accept(self, key: str, agent: str, answer: Any) -> None:
        """Keep an answer for good."""
        self._write({"kind": "answer", "agent": agent, "question": key, "answer": answer})

    def failure(self, key: str) -> str | None:
        """Return why this question got no answer, None where it got one, or was never asked."""
        return self._failed.get(key)

    def note_failure(self, agent: str, reason: str, key: str = "") -> None:
        """Note that a question got no answer that could be used; with its key where asking it again would bring no other."""
        self._write({"kind": "failure", "agent": agent, "question": key, "reason": reason[:MAX_REASON]})

    def _write(self, entry: dict[str, Any]) -> None:
        # ASCII: half of a surrogate pair can't be written otherwise, and some line ends are no line ends in JSON.
        line = json.dumps(entry, ensure_ascii=True, allow_nan=False)
        append_line(self._path, line)
        self._size += len(line) + 1
        self._take(LINE.validate_python(entry))

    def _take(self, entry: _AnyLine) -> None:
        match entry:
            case _Request():
                self._requests += 1
            case _Turn(input_tokens=read, output_tokens=written):
                self._input_tokens = _sum(self._input_tokens, read)
                self._output_tokens = _sum(self._output_tokens, written)
                counted = _sum(read, written)
                self._budgeted += entry.characters // CHARACTERS_A_TOKEN if counted is None else counted
                self._repairs += bool(entry.complaint)
            case _Failure(agent=agent, question=question, reason=reason):
                self._failures = [*self._failures, reason[:MAX_REASON]][-MAX_FAILURES:]
                if question:
                    self._failed[question] = reason[:MAX_REASON]
                self._settled[agent] += 1
            case _Answer(agent=agent, question=question, answer=answer):
                self._answers[question] = json.dumps(answer)
                self._settled[agent] += 1
            case _Run():
                self._has_begun = True
            case _End():
                pass

    def _read(self) -> None:
        try:
            if self._path.is_symlink():
                raise FileRefusedError(self._path, "it is a link")
            with open_regular(self._path, max_bytes=None) as stream:
                for line in lines_of(stream):
                    self._take_line(line)
                self._size = stream.seek(0, 2)
        except FileNotFoundError:
            return
        except OSError as error:
            raise RunError(
                f"{str(self._path)!r} can't be read ({error.strerror}): move it away, and the language model is asked again"
            ) from error

    def _take_line(self, line: bytes | None) -> None:
        try:
            # A line that is too long is None, and None is no line.
            entry = LINE.validate_python(parse_json(line, max_bytes=MAX_LINE) if line else None)
        except (DocumentError, ValidationError):
            self._unread += 1
            return
        self._take(entry)


def note_end(folder: Path) -> None:
    """Note in the ledger of a run's folder, where there is one, that the run came to its end."""
    if (folder / FILE).exists():
        Ledger(folder, max_requests=0, max_tokens=0).end()


def read_spent(folder: Path) -> Spent:
    """Return what the run of a folder has used up."""
    return Ledger(folder, max_requests=0, max_tokens=0).spent


def key_of(model: str, texts: tuple[str, ...], schema: dict[str, Any]) -> str:
    """Return the hash of a question: who is asked, what, and by which schema the answer is wanted."""
    document = json.dumps([model, *texts, schema], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:20]


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _shortened(value: Any) -> Any:
    """Return a document with its texts cut, each of which says so, and no key in any."""
    if isinstance(value, str):
        told = redacted(value)
        return told if len(told) <= MAX_TEXT else f"{told[:MAX_TEXT]} ({len(told) - MAX_TEXT} characters more)"
    if isinstance(value, dict):
        return {name: _shortened(held) for name, held in cast("dict[str, Any]", value).items()}
    return [_shortened(held) for held in cast("list[Any]", value)] if isinstance(value, list) else value


def _characters(value: Any) -> int:
    if isinstance(value, dict):
        value = list(cast("dict[str, Any]", value).values())
    if isinstance(value, list):
        return sum(_characters(held) for held in cast("list[Any]", value))
    return len(value) if isinstance(value, str) else 0


def lines_of(stream: BinaryIO) -> Iterator[bytes | None]:
    """Yield lines, None for one that is too long or lies behind what is read."""
    left = MAX_READ
    while line := stream.readline(MAX_LINE):
        if (left := left - len(line)) < 0:
            yield None
            return
        if len(line) == MAX_LINE and not line.endswith(b"\n"):
            while left >= 0 and (rest := stream.readline(MAX_LINE)) and not rest.endswith(b"\n"):
                left -= len(rest)
            yield None
        elif line.strip():
            yield line
