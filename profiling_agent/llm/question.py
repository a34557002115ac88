"""Questions and advice: what agents ask and get, without the library that asks. Stages import this and no more."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from pydantic import BaseModel

from profiling_agent.records import Record

# An answer that can't be used goes back with what is wrong with it, this often.
MAX_REPAIRS = 2
Answer = TypeVar("Answer", bound=BaseModel)
Check = Callable[[Answer], str | None]


class Question(Record):
    """Who asks, the instructions, and the evidence."""

    agent: str
    instructions: str
    evidence: str


class Tool(Protocol):
    """A function of ours that a model may call: its name and docstring are what the model reads."""

    __name__: str

    def __call__(self, *args: Any, **kwargs: Any) -> str:
        """Return the evidence, or in words what was wrong with the call."""
        ...


@dataclass(frozen=True)
class Advice(Generic[Answer]):
    """An answer that is valid; `complaint` is what is still wrong with it by the asker's own check."""

    value: Answer
    complaint: str | None
    repairs: int
    is_replayed: bool


class Asks(Protocol):
    """Whoever answers questions."""

    @property
    def name(self) -> str:
        """Return the name that reports give."""
        ...

    def ask(
        self,
        question: Question,
        answer_type: type[Answer],
        *,
        check: Check[Answer] | None = None,
        tools: Sequence[Tool] = (),
        max_repairs: int = MAX_REPAIRS,
    ) -> Advice[Answer]:
        """Return a valid answer; AdvisorError where there is none."""
        ...


MAX_NAME = 200


def quoted(text: str, max_length: int = MAX_NAME) -> str:
    """Return somebody else's text as a JSON string of one line."""
    return json.dumps(text if len(text) <= max_length else text[:max_length] + "...", ensure_ascii=True)
