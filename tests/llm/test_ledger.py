"""The ledger of a run that somebody wrote in: what can be read is, the rest is counted, and no resume fails for it."""

import json
import os
from pathlib import Path

import pytest

from profiling_agent.errors import AdvisorError, RunError
from profiling_agent.llm.ledger import FILE, MAX_WRITTEN, Ledger, read_spent

GOOD = [
    '{"kind": "request"}',
    '{"kind": "turn", "input_tokens": 7, "output_tokens": 3, "complaint": null, "characters": 40}',
    '{"kind": "answer", "agent": "analysis", "question": "abc", "answer": {"ratio": 0.25}}',
]
BAD_LINES = {
    "torn": b'{"kind": "turn", "input_tok',
    "no UTF-8": b'{"kind": "failure", "reason": "\xff\xfe"}',
    "a list": b"[]",
    "a kind of another type": b'{"kind": {}}',
    "an unknown kind": b'{"kind": "wish"}',
    "tokens in words": b'{"kind": "turn", "input_tokens": "lots", "output_tokens": 1, "complaint": null}',
    "negative tokens": b'{"kind": "turn", "input_tokens": -1000000000, "output_tokens": 1, "complaint": null}',
    "NaN tokens": b'{"kind": "turn", "input_tokens": NaN, "output_tokens": 1, "complaint": null}',
    "tokens of 30 digits": b'{"kind": "turn", "input_tokens": 1'
    + b"0" * 30
    + b', "output_tokens": 1, "complaint": null}',
    "true tokens": b'{"kind": "turn", "input_tokens": true, "output_tokens": 1, "complaint": null}',
    "negative characters": b'{"kind": "turn", "input_tokens": 1, "output_tokens": 1, "complaint": null, "characters": -9}',
    "a complaint of another type": b'{"kind": "turn", "input_tokens": 1, "output_tokens": 1, "complaint": [1]}',
    "a reason of another type": b'{"kind": "failure", "reason": {"a": 1}}',
    "no question": b'{"kind": "answer", "answer": 7}',
    "a question of another type": b'{"kind": "answer", "question": [1], "answer": 7}',
    "deep": b'{"kind": "answer", "question": "x", "answer": ' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "an answer beyond float64": b'{"kind": "answer", "question": "x", "answer": 1e999}',
    "huge": b'{"kind": "failure", "reason": "' + b"x" * (5 * 2**20) + b'"}',
}


@pytest.mark.parametrize("name", BAD_LINES)
def test_a_bad_line_is_read_round_and_counted(name: str, tmp_path: Path):
    lines = [GOOD[0].encode(), BAD_LINES[name], *(line.encode() for line in GOOD[1:])]
    (tmp_path / FILE).write_bytes(b"\n".join(lines) + b"\n")

    ledger = Ledger(tmp_path, max_requests=2, max_tokens=100)
    ledger.spend()

    assert ledger.answer("abc") == {"ratio": 0.25}
    assert ledger.spent == read_spent(tmp_path)
    spent = ledger.spent
    assert (spent.requests, spent.input_tokens, spent.output_tokens, spent.unread_lines) == (2, 7, 3, 1)


def test_a_line_without_an_end_is_read_no_further_than_a_ledger_may_be_long(tmp_path: Path):
    (tmp_path / FILE).write_text("\n".join(GOOD) + "\n")
    with (tmp_path / FILE).open("r+b") as stream:
        stream.truncate(2**40)
    spent = read_spent(tmp_path)
    assert (spent.requests, spent.unread_lines > 0) == (1, True)


def test_a_torn_last_line_doesnt_take_the_next_one_with_it(tmp_path: Path):
    (tmp_path / FILE).write_text("\n".join(GOOD)[:-9])
    ledger = Ledger(tmp_path, max_requests=9, max_tokens=100)
    ledger.accept("def", "analysis", 7)

    again = Ledger(tmp_path, max_requests=9, max_tokens=100)
    assert (again.answer("abc"), again.answer("def"), again.spent.unread_lines) == (None, 7, 1)


def _link(path: Path) -> None:
    path.with_name("elsewhere").write_text("\n".join(GOOD))
    path.symlink_to("elsewhere")


@pytest.mark.parametrize(
    ("make", "said"),
    [(os.mkfifo, "it is a FIFO"), (Path.mkdir, "it is a folder"), (_link, "it is a link")],
)
def test_a_ledger_that_is_no_file_is_refused_in_a_line(make, said: str, tmp_path: Path):
    make(tmp_path / FILE)

    with pytest.raises(RunError, match=said) as caught:
        read_spent(tmp_path)

    assert "\n" not in str(caught.value)
    assert "move it away" in str(caught.value)


def test_what_no_server_counted_is_taken_for_a_quarter_of_its_characters(tmp_path: Path):
    ledger = Ledger(tmp_path, max_requests=9, max_tokens=1_000)
    texts = {"asked": [{"role": "human", "text": "x" * 3_000}], "said": "y" * 1_000, "complaint": None}
    ledger.note_turn(**texts, input_tokens=None, output_tokens=None)

    for each in (ledger, Ledger(tmp_path, max_requests=9, max_tokens=1_000)):
        assert each.spent.input_tokens is None
        with pytest.raises(AdvisorError, match="budget of 1000 tokens"):
            each.spend()
    Ledger(tmp_path, max_requests=9, max_tokens=1_010).spend()


def test_one_turn_that_wasnt_counted_doesnt_make_the_others_free(tmp_path: Path):
    ledger = Ledger(tmp_path, max_requests=9, max_tokens=1_000)
    ledger.note_turn(asked=[], said="", complaint=None, input_tokens=None, output_tokens=5)
    ledger.note_turn(asked=[], said="", complaint=None, input_tokens=900, output_tokens=100)

    with pytest.raises(AdvisorError, match="budget of 1000 tokens"):
        ledger.spend()


def test_a_large_ledger_leaves_texts_out_and_says_so(tmp_path: Path):
    (tmp_path / FILE).write_bytes(b" " * MAX_WRITTEN + b"\n")
    ledger = Ledger(tmp_path, max_requests=9, max_tokens=1_000)
    ledger.note_turn(asked=[], said="x" * 400, calls=[], complaint=None, input_tokens=1, output_tokens=1)

    written = json.loads((tmp_path / FILE).read_text().splitlines()[-1])
    assert written["left_out"] == "asked, said, calls: the file has 33,554,432 bytes"
    assert written["characters"] == 400
    assert "said" not in written
    assert read_spent(tmp_path).input_tokens == 1


def test_a_failure_of_a_megabyte_is_kept_as_its_beginning(tmp_path: Path):
    ledger = Ledger(tmp_path, max_requests=9, max_tokens=1_000)
    ledger.note_failure("analysis", "x" * 10**6)

    assert ledger.spent.failures == read_spent(tmp_path).failures == ("x" * 500,)
