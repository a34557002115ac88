"""Ledger: what a run has asked and been told, in its folder; it replays answers, so that nothing is paid for twice.

`llm.jsonl` has one line for each turn with a model and each answer that was accepted; keys are never part of either.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any, cast

from profiling_agent.errors import AdvisorError
from profiling_agent.records import Spent

FILE = "llm.jsonl"
# What is read back of each kind of line; lines without it are somebody else's.
NEEDED = {
    "request": set[str](),
    "turn": {"input_tokens", "output_tokens", "complaint"},
    "failure": {"reason"},
    "answer": {"question", "answer"},
}


class Ledger:
    """The file, read once when a run begins or goes on."""

    def __init__(self, folder: Path, *, max_requests: int, max_tokens: int) -> None:
        """Read what an earlier process of this run wrote; a line that was cut off by its end is left out."""
        self._path = folder / FILE
        self._max_requests, self._max_tokens = max_requests, max_tokens
        self._answers: dict[str, Any] = {}
        self.spent = Spent()
        for entry in _entries(self._path):
            self._take(entry)
        if self._path.exists() and not self._path.read_bytes().endswith(b"\n"):
            # The line that a kill cut off must not take the next one with it.
            with self._path.open("a", encoding="utf-8") as stream:
                stream.write("\n")

    def spend(self) -> None:
        """Note a request that is about to be made; AdvisorError where the budget allows none."""
        if self.spent.requests >= self._max_requests:
            raise AdvisorError(f"the budget of {self._max_requests} requests is spent: raise advisor_requests")
        tokens = (self.spent.input_tokens or 0) + (self.spent.output_tokens or 0)
        if tokens >= self._max_tokens:
            raise AdvisorError(f"the budget of {self._max_tokens} tokens is spent: raise advisor_tokens")
        self._write({"kind": "request"})

    def answer(self, key: str) -> Any:
        """Return the answer that was accepted to this question, None where there is none."""
        return self._answers.get(key)

    def note_turn(self, **said: Any) -> None:
        """Note what was said in a turn, and its tokens."""
        self._write({"kind": "turn", **said})

    def accept(self, key: str, agent: str, answer: Any) -> None:
        """Keep an answer for good."""
        self._write({"kind": "answer", "agent": agent, "question": key, "answer": answer})

    def note_failure(self, agent: str, reason: str) -> None:
        """Note that a question got no answer that could be used."""
        self._write({"kind": "failure", "agent": agent, "reason": reason})

    def _write(self, entry: dict[str, Any]) -> None:
        # ASCII: half of a surrogate pair can't be written otherwise, and some line ends are no line ends in JSON.
        line = json.dumps(entry, ensure_ascii=True, allow_nan=False) + "\n"
        with self._path.open("a", encoding="utf-8") as stream:
            stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        spent = self.spent
        if entry["kind"] == "request":
            self.spent = spent.model_copy(update={"requests": spent.requests + 1})
        elif entry["kind"] == "turn":
            self.spent = spent.model_copy(
                update={
                    "input_tokens": _sum(spent.input_tokens, entry["input_tokens"]),
                    "output_tokens": _sum(spent.output_tokens, entry["output_tokens"]),
                    "repairs": spent.repairs + bool(entry["complaint"]),
                }
            )
        elif entry["kind"] == "failure":
            self.spent = spent.model_copy(update={"failures": (*spent.failures, str(entry["reason"]))})
        elif entry["kind"] == "answer":
            self._answers[entry["question"]] = entry["answer"]


def read_spent(folder: Path) -> Spent:
    """Return what the run of a folder has used up."""
    return Ledger(folder, max_requests=0, max_tokens=0).spent


def key_of(model: str, texts: tuple[str, ...], schema: dict[str, Any]) -> str:
    """Return the hash of a question: who is asked, what, and by which schema the answer is wanted."""
    document = json.dumps([model, *texts, schema], sort_keys=True)
    return hashlib.sha256(document.encode()).hexdigest()[:20]


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


def _is_ours(entry: dict[str, Any]) -> bool:
    return NEEDED.get(str(entry.get("kind")), {""}) <= entry.keys()


def _entries(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []
    if not path.exists():
        return found
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            entry: Any = json.loads(line)
        except ValueError:
            continue
        if isinstance(entry, dict) and _is_ours(cast("dict[str, Any]", entry)):
            found.append(entry)
    return found
