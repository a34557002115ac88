"""Typed questions to the LLM, and `llm.jsonl`, the transcript of a run, from which answers are replayed.

Nothing here imports LangChain, so that stages needn't. A line of the transcript is a JSON object with a `kind`:
`turn` (one request), `complaint`, `answer` or `failure`.
"""

import hashlib
import json
import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Generic, TypeVar, cast

from pydantic import BaseModel, ValidationError

from profiling_agent.errors import AdvisorError, RequestError
from profiling_agent.lib.io import append_line, expanded
from profiling_agent.schemas import Record, Spent

FILE, RECORDED = "llm.jsonl", "recorded:"
# Repairs of a question's unusable answers, and requests of a run.
MAX_REPAIRS, MAX_REQUESTS = 2, 500
# Estimate for servers that count no tokens.
CHARACTERS_A_TOKEN = 4
# Local servers require a key, and don't read it.
NO_KEY = "EMPTY"
# Everything that the OpenAI client reads from the environment and sends to its server.
SECRETS = ("OPENAI_API_KEY", "OPENAI_ADMIN_KEY", "OPENAI_CUSTOM_HEADERS")

Answer = TypeVar("Answer", bound=BaseModel)
Check = Callable[[Answer], str | None]
# A typed function with a docstring, which the model may call.
Tool = Callable[..., str]


def quoted(text: str, max_length: int = 200) -> str:
    """Return third-party text as a JSON string of one line."""
    return json.dumps(text if len(text) <= max_length else text[:max_length] + "...", ensure_ascii=True)


def redacted(text: str, environment: Mapping[str, str] = os.environ) -> str:
    """Replace keys from the environment by their variables' names: some servers quote keys in errors."""
    for name in SECRETS:
        if (key := environment.get(name, "")) not in ("", NO_KEY):
            text = text.replace(key, f"({name})")
    return text


class Transcript:
    """The file of one run: read once, then appended to."""

    def __init__(self, path: Path, *, max_tokens: int = 0) -> None:
        self._path, self._max_tokens, self._lines = path, max_tokens, list[dict[str, Any]]()
        lines = [line for line in path.read_bytes().split(b"\n") if line.strip()] if path.is_file() else []
        for line in lines:
            with suppress(ValueError):
                record: Any = json.loads(line)
                self._lines += [record] if isinstance(record, dict) and "kind" in record else []
        self._num_damaged = len(lines) - len(self._lines)

    @property
    def spent(self) -> Spent:
        """Return requests, tokens, repairs and failures so far."""
        turns = [turn for turn in self.of("turn") if turn.get("mode") != "recorded"]
        return Spent(
            requests=len(turns),
            input_tokens=_total(turns, "input_tokens"),
            output_tokens=_total(turns, "output_tokens"),
            repairs=len(self.of("complaint")),
            failures=tuple(str(line.get("reason")) for line in self.of("failure")),
            unread_lines=self._num_damaged,
        )

    def check_budget(self) -> None:
        """Raise AdvisorError if the run may make no further request."""
        turns, num_tokens = self.of("turn"), 0
        for turn in turns:
            count = _total([turn], "input_tokens", "output_tokens")
            num_tokens += len(json.dumps(turn)) // CHARACTERS_A_TOKEN if count is None else count
        if len(turns) >= MAX_REQUESTS:
            raise AdvisorError(f"the run has made {MAX_REQUESTS} requests, which is the most")
        if num_tokens >= self._max_tokens:
            raise AdvisorError(f"the budget of {self._max_tokens} tokens is spent: raise llm_tokens")

    def add(self, kind: str, **fields: Any) -> None:
        """Append a line, without keys."""
        text = redacted(json.dumps({"kind": kind, **fields}, ensure_ascii=True))
        append_line(self._path, text)
        self._lines.append(json.loads(text))

    def of(self, *kinds: str, **fields: Any) -> list[dict[str, Any]]:
        """Return the lines of these kinds with these fields."""
        return [line for line in self._lines if line["kind"] in kinds and fields.items() <= line.items()]


def _total(turns: Iterable[dict[str, Any]], *names: str) -> int | None:
    counts = [turn.get(name) for turn in turns for name in names]
    return None if None in counts else sum(cast("list[int]", counts))


class Question(Record):
    """An agent's question: its instructions and the evidence."""

    agent: str
    instructions: str
    evidence: str


@dataclass(frozen=True)
class Advice(Generic[Answer]):
    """A valid answer; `complaint` is what the question's check found wrong with it, or None."""

    value: Answer
    complaint: str | None
    repairs: int = 0


class LanguageModel(ABC):
    """LLM that answers typed questions; outcomes are recorded in the transcript and replayed from it."""

    def __init__(self, name: str, transcript: Transcript) -> None:
        self.name, self._transcript = name, transcript

    def ask(
        self,
        question: Question,
        answer_type: type[Answer],
        *,
        check: Check[Answer] | None = None,
        tools: Sequence[Tool] = (),
    ) -> Advice[Answer]:
        """Return a valid answer, or raise AdvisorError; earlier outcomes of the same question are replayed.

        A complaint of `check` goes back to the LLM as a validation error does.
        After MAX_REPAIRS the last valid answer is returned with its complaint.
        """
        key_parts = [self.name, question.instructions, question.evidence, answer_type.model_json_schema()]
        key = hashlib.sha256(json.dumps(key_parts, sort_keys=True).encode()).hexdigest()[:20]
        for line in self._transcript.of("answer", "failure", question=key):
            if line["kind"] == "failure":
                raise AdvisorError(str(line["reason"]))
            if (stored := validated(line["answer"], answer_type)) is not None:
                return Advice(stored, check(stored) if check else None)
        note = {"agent": question.agent, "question": key}
        try:
            advice = self._answer(question, answer_type, check or (lambda _: None), tools)
        except AdvisorError as error:
            self._transcript.add("failure", **note, reason=str(error))
            raise
        self._transcript.add("answer", **note, answer=advice.value.model_dump(mode="json"))
        return advice

    @abstractmethod
    def _answer(
        self, question: Question, answer_type: type[Answer], check: Check[Answer], tools: Sequence[Tool]
    ) -> Advice[Answer]: ...


def validated(document: Any, answer_type: type[Answer]) -> Answer | None:
    """Return a document as an answer, or None if it isn't one."""
    try:
        return answer_type.model_validate(document)
    except ValidationError:
        return None


def open_recording(file: str) -> Transcript:
    """Return the transcript of another run; raises RequestError if it has no answers."""
    recording = Transcript(expanded(file))
    if not recording.of("turn") or not recording.of("answer", "failure"):
        hint = f"give the {FILE} of a run that one planned, as in llm={RECORDED}runs/first/{FILE}"
        raise RequestError(f"{file!r} has no answers of a language model: {hint}")
    return recording


class Recorded(LanguageModel):
    """A transcript in place of a language model: each agent gets its recorded answers in order."""

    def __init__(self, recording: Transcript, transcript: Transcript) -> None:
        self._recording, self._model = recording, str(recording.of("turn")[-1].get("model"))
        super().__init__(f"{self._model}, recorded", transcript)

    def _answer(
        self, question: Question, answer_type: type[Answer], check: Check[Answer], tools: Sequence[Tool]
    ) -> Advice[Answer]:
        del tools
        agent = question.agent
        outcomes = self._recording.of("answer", "failure", agent=agent)
        number = len(self._transcript.of("answer", "failure", agent=agent))
        if number >= len(outcomes):
            raise AdvisorError(f"{self.name}: its {len(outcomes)} answers for {agent} are used up")
        value = validated(outcomes[number].get("answer"), answer_type)
        if value is None:
            reason = outcomes[number].get("reason", "its answer is not valid in this version")
            raise AdvisorError(f"{self.name}: {reason}")
        turn = {"model": self._model, "mode": "recorded", "input_tokens": 0, "output_tokens": 0}
        self._transcript.add("turn", agent=agent, **turn)
        return Advice(value, check(value))
