"""Recorded model: what a language model answered in an earlier run, given again in its order; no key, no server, no request.

A run on another machine measures other times, so that its questions aren't the same, and who is asked the same question again may answer in another way. What
was said to an agent's first question is what is said to it now, and is held against this run's evidence as any answer is.
"""

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError

from profiling_agent.documents import DocumentError, clean, parse_json
from profiling_agent.errors import AdvisorError, RequestError
from profiling_agent.files import expanded, open_regular
from profiling_agent.llm.endpoint import RECORDED
from profiling_agent.llm.ledger import MAX_LINE, MAX_NAME, Ledger, key_of, lines_of
from profiling_agent.llm.question import MAX_REPAIRS, Advice, Answer, Check, Question, Tool, quoted
from profiling_agent.llm.reply import MAX_TOKENS
from profiling_agent.records import Record

# A run has asked a handful of questions; of an answer no more than a plan may hold is of use.
MAX_STEPS, MAX_ANSWER, MAX_ANSWERS = 1_000, 50_000, 1_000_000
# How a planner's question begins, whatever has become of the rest of it since.
MODEL = re.compile(r'^Model: ("(?:[^"\\]|\\.)*"), (\d+) params', re.MULTILINE)
NAMED = "name the llm.jsonl of a run that a language model has planned for, as advisor=recorded:FILE"


class Step(Record):
    """What came of one question: an answer as JSON, or why there was none."""

    agent: str
    answer: str | None = None
    failure: str = ""


class Recording(Record):
    """The answers of one run, in their order, and what they cost then; tokens are None where a server did not count them."""

    file: str
    model: str = Field(description="the language model")
    architecture: str | None = Field(default=None, description="the model that it planned for, as a JSON string")
    params: int | None = Field(default=None, ge=0, lt=2**63)
    steps: tuple[Step, ...]
    requests: int = 0
    input_tokens: int | None = 0
    output_tokens: int | None = 0

    @property
    def name(self) -> str:
        """Return the name that reports give."""
        return f"{self.model}, recorded"

    def check(self, architecture: str, params: int | None = None) -> None:
        """Raise RequestError where the answers were given for another model; `architecture` is a JSON string."""
        is_other = None not in (self.params, params) and self.params != params
        if self.architecture in (None, architecture) and not is_other:
            return
        has = "" if self.params is None else f" of {self.params} params"
        wanted = "" if params is None else f" of {params} params"
        raise RequestError(
            f"{self.file!r} was recorded for {self.architecture}{has}, and this run's model is {architecture}{wanted}: "
            "give it the model that it was recorded with, or another advisor"
        )


class _Entry(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class _Run(_Entry):
    kind: Literal["run"]
    architecture: str = Field(max_length=MAX_NAME)


class _Turn(_Entry):
    kind: Literal["turn"]
    model: str = Field(max_length=MAX_NAME)
    asked: tuple[dict[str, Any], ...] = Field(default=(), strict=False)
    input_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)
    output_tokens: int | None = Field(default=None, ge=0, le=MAX_TOKENS)


class _Failure(_Entry):
    kind: Literal["failure"]
    agent: str = Field(max_length=MAX_NAME)
    reason: str


class _Answer(_Entry):
    kind: Literal["answer"]
    agent: str = Field(max_length=MAX_NAME)
    answer: dict[str, Any]


class _Mark(_Entry):
    kind: Literal["request", "end"]


_Line = _Run | _Turn | _Failure | _Answer | _Mark
LINE: TypeAdapter[_Line] = TypeAdapter(_Line)


def recorded_file(advisor: str) -> str | None:
    """Return the file that `advisor` names as a record; None where it names none, RequestError where the name is left out."""
    if not advisor.startswith(RECORDED):
        return None
    if file := advisor.removeprefix(RECORDED).strip():
        return file
    raise RequestError(f"advisor is {advisor!r} and names no file: {NAMED}")


def read_recording(file: str) -> Recording:
    """Return what a run's `llm.jsonl` holds, read round bad lines as a ledger is; RequestError where it is no such file, or was cut short."""
    try:
        with open_regular(expanded(file), max_bytes=None) as stream:
            lines = list(_entries(lines_of(stream)))
    except OSError as error:
        raise RequestError(f"the record {file!r} can't be read ({error.strerror}): {NAMED}") from error
    whole = [line for line in lines if line is not None]
    steps = tuple(_steps(whole))
    turns = [line for line in whole if isinstance(line, _Turn)]
    if why := _cut_short(lines):
        raise RequestError(f"{file!r} is cut short, or no record ({why}): {NAMED}, all of it")
    if sum(len(step.answer or "") for step in steps) > MAX_ANSWERS:
        raise RequestError(f"{file!r} holds answers of more than {MAX_ANSWERS:,} characters: {NAMED}")
    if not steps or not turns:
        raise RequestError(f"{file!r} holds no answers of a language model: {NAMED}")
    architecture, params = _planned_for(whole)
    return Recording(
        file=file,
        model=clean(turns[-1].model),
        architecture=architecture,
        params=params,
        steps=steps[:MAX_STEPS],
        requests=sum(isinstance(line, _Mark) and line.kind == "request" for line in whole),
        input_tokens=_total([turn.input_tokens for turn in turns]),
        output_tokens=_total([turn.output_tokens for turn in turns]),
    )


def _entries(lines: Iterable[bytes | None]) -> Iterator[_Line | None]:
    """Yield what each line says; of the questions only that which names the model is held, as there may be tens of megabytes of them."""
    is_named = False
    for line in lines:
        entry = _entry(line)
        if isinstance(entry, _Turn) and (is_named or not _model_of(entry)):
            entry = entry.model_copy(update={"asked": ()})
        is_named = is_named or (isinstance(entry, _Turn) and bool(entry.asked))
        yield entry


def _entry(line: bytes | None) -> _Line | None:
    """Return what a line says; None for one that is too long, or that no run writes."""
    try:
        return LINE.validate_python(parse_json(line, max_bytes=MAX_LINE)) if line else None
    except (DocumentError, ValidationError):
        return None


def _steps(lines: Sequence[_Line]) -> Iterator[Step]:
    for line in lines:
        if isinstance(line, _Failure):
            yield Step(agent=line.agent, failure=clean(line.reason)[:MAX_NAME])
        elif isinstance(line, _Answer):
            yield Step(agent=line.agent, answer=json.dumps(line.answer)[:MAX_ANSWER])


def _cut_short(lines: Sequence[_Line | None]) -> str:
    """Return what is missing at the end; nothing where all is there. Records that say nothing of their beginning say nothing of their end."""
    last = lines[-1] if lines else None
    if last is None:
        return "its last line is none that a run writes"
    if isinstance(last, _Mark) and last.kind == "request":
        return "its last request has no answer"
    if isinstance(last, _Turn):
        return "nothing came of its last turn"
    is_told = any(isinstance(line, _Run) for line in lines)
    return "its run did not come to an end" if is_told and not isinstance(last, _Mark) else ""


def _planned_for(lines: Sequence[_Line]) -> tuple[str | None, int | None]:
    """Return the architecture, as a JSON string, and the params of the model that was planned for, as far as the questions or the first line say."""
    for line in lines:
        if isinstance(line, _Turn) and (found := _model_of(line)):
            return found[1], int(found[2][:18])
    begun = next((line for line in lines if isinstance(line, _Run)), None)
    return (quoted(begun.architecture) if begun else None), None


def _model_of(turn: _Turn) -> re.Match[str] | None:
    """Return what names the model in a turn's question, and its params."""
    found = (MODEL.search(str(message.get("text", ""))) for message in turn.asked)
    return next(filter(None, found), None)


def _total(counts: Sequence[int | None]) -> int | None:
    known = [count for count in counts if count is not None]
    return sum(known) if len(known) == len(counts) else None


class Recorded:
    """A recording in a language model's place; what it gives is kept in the run's own ledger, so that a resumed run goes on where it was."""

    def __init__(self, recording: Recording, ledger: Ledger, architecture: str) -> None:
        """Answer from `recording` for a model of this architecture, from the first question on that `ledger` has nothing of."""
        self._recording, self._ledger, self._architecture = recording, ledger, architecture

    @property
    def name(self) -> str:
        """Return the name that reports give."""
        return self._recording.name

    def ask(
        self,
        question: Question,
        answer_type: type[Answer],
        *,
        check: Check[Answer] | None = None,
        tools: Sequence[Tool] = (),
        max_repairs: int = MAX_REPAIRS,
    ) -> Advice[Answer]:
        """Return what was answered to the agent's question of this number; it calls no tools and mends nothing.

        Raises:
            RequestError: it was recorded for another model.
            AdvisorError: there was no answer then, it is none to this question, or there are no more.
        """
        del tools, max_repairs
        if found := MODEL.search(question.evidence):
            self._recording.check(found[1], int(found[2][:18]))
        # Not before: what is refused leaves nothing.
        self._ledger.begin(self._architecture)
        key = key_of(self.name, (question.instructions, question.evidence), answer_type.model_json_schema())
        if why := self._ledger.failure(key):
            raise AdvisorError(why)
        if (known := self._ledger.answer(key)) is None:
            step = self._step(question.agent)
            value, failure = _value(step, answer_type)
            if value is None:
                said = f"{self.name}: {failure}"
                self._ledger.note_failure(question.agent, said, key)
                raise AdvisorError(said)
            self._keep(question, step, key, value.model_dump(mode="json"))
        else:
            value = answer_type.model_validate(known)
        return Advice(value=value, complaint=check(value) if check else None, repairs=0, is_replayed=True)

    def _step(self, agent: str) -> Step:
        steps = [step for step in self._recording.steps if step.agent == agent]
        number = self._ledger.num_settled(agent)
        if number < len(steps):
            return steps[number]
        return Step(
            agent=agent, failure=f"the {len(steps)} answers that {self._recording.file!r} has for {agent} are used up"
        )

    def _keep(self, question: Question, step: Step, key: str, answer: Any) -> None:
        asked = [{"role": "system", "text": question.instructions}, {"role": "human", "text": question.evidence}]
        told: dict[str, Any] = {"agent": question.agent, "model": self._recording.model, "mode": "recorded"}
        told |= {"asked": asked, "said": step.answer, "calls": [], "num_calls": 0, "complaint": None}
        self._ledger.note_turn(**told, input_tokens=0, output_tokens=0)
        self._ledger.accept(key, question.agent, answer)


def _value(step: Step, answer_type: type[Answer]) -> tuple[Answer | None, str]:
    if step.answer is None:
        return None, step.failure
    try:
        return answer_type.model_validate(parse_json(step.answer)), ""
    except (DocumentError, ValidationError):
        return None, f"its answer to {step.agent} is none that this version knows"
