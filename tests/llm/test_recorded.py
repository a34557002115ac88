"""A transcript in place of a language model."""

import json
from pathlib import Path

import pytest
from pydantic import BaseModel

from profiling_agent.errors import AdvisorError, RequestError
from profiling_agent.llm.transcript import FILE, Question, Recorded, Transcript, open_recording

FIRST = Question(agent="analysis", instructions="Answer in JSON.", evidence="?")
NEXT, LAST = (
    FIRST.model_copy(update={"agent": "iterative_pruning", "evidence": evidence})
    for evidence in ("1 attempt", "2 attempts")
)


class Ratio(BaseModel):
    ratio: float


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """Return a transcript as an earlier version wrote it, with a line that a kill cut off."""
    lines = [
        {"kind": "run", "architecture": "ViT"},
        {"kind": "request"},
        {
            "kind": "turn",
            "model": "openai:m",
            "complaint": None,
            "input_tokens": 5,
            "output_tokens": 1,
            "characters": 9,
        },
        {"kind": "answer", "agent": "analysis", "question": "a", "answer": {"ratio": 0.5}},
        {"kind": "answer", "agent": "iterative_pruning", "question": "b", "answer": {"ratio": 0.25}},
        {"kind": "failure", "agent": "iterative_pruning", "question": "c", "reason": "openai:m gave no answer"},
        {"kind": "end"},
    ]
    path = tmp_path / "recorded.jsonl"
    path.write_text('{"kind": "tur\n' + "".join(f"{json.dumps(line)}\n" for line in lines))
    return path


def replayed(record: Path, folder: Path) -> Recorded:
    return Recorded(open_recording(str(record)), Transcript(folder / FILE))


def test_each_agent_gets_its_answers_in_order_and_a_resumed_run_goes_on_where_it_was(record: Path, tmp_path: Path):
    assert replayed(record, tmp_path).name == "openai:m, recorded"
    assert replayed(record, tmp_path).ask(NEXT, Ratio, check=lambda _: "too much").complaint == "too much"
    assert replayed(record, tmp_path).ask(FIRST, Ratio).value.ratio == 0.5
    # The same questions again, as of a run that was cut before its next checkpoint.
    assert replayed(record, tmp_path).ask(NEXT, Ratio).value.ratio == 0.25
    for _ in range(2):
        with pytest.raises(AdvisorError, match="openai:m, recorded: openai:m gave no answer"):
            replayed(record, tmp_path).ask(LAST, Ratio)
    with pytest.raises(AdvisorError, match="its 1 answers for analysis are used up"):
        replayed(record, tmp_path).ask(FIRST.model_copy(update={"evidence": "more"}), Ratio)
    # What it cost was paid for by the run that asked.
    assert Transcript(tmp_path / FILE).spent.requests == 0
    assert Transcript(tmp_path / FILE).spent.input_tokens == 0


def test_a_replayed_run_is_a_recording_itself(record: Path, tmp_path: Path):
    replayed(record, tmp_path).ask(FIRST, Ratio)
    (tmp_path / "again").mkdir()

    assert replayed(tmp_path / FILE, tmp_path / "again").ask(FIRST, Ratio).value.ratio == 0.5


def test_an_answer_of_another_form_is_none(record: Path, tmp_path: Path):
    class Other(BaseModel):
        share: float

    with pytest.raises(AdvisorError, match="its answer is not valid in this version"):
        replayed(record, tmp_path).ask(FIRST, Other)


def test_a_file_without_answers_is_one_line(tmp_path: Path):
    (tmp_path / "empty.jsonl").write_text("")
    for name in ("empty.jsonl", "nowhere.jsonl", "."):
        with pytest.raises(RequestError, match=r"has no answers of a language model: give the llm.jsonl"):
            open_recording(str(tmp_path / name))
