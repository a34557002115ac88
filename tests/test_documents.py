"""JSON files as records, and text that shows as it reads."""

from pathlib import Path

import pytest
from pydantic import Field

from profiling_agent.lib.io import DocumentError, clean, inert, parse_json, parse_record, read_json, read_record
from profiling_agent.schemas import Record


class Named(Record):
    name: str = Field(max_length=10)
    count: int = 0


@pytest.mark.parametrize("text", ["", "{", '{"name": "a"', b"\xff\xfe{", b"\x00\xff"])
def test_what_is_no_json_is_one_line(text: str | bytes):
    with pytest.raises(DocumentError, match=r"^it is no JSON \(.+\)$"):
        parse_json(text)
    with pytest.raises(DocumentError, match=r"^it is no JSON \(.+\)$"):
        parse_record(Named, text)


def test_a_document_is_read(tmp_path: Path):
    (tmp_path / "d.json").write_text('{"name": "a", "count": 3}')

    assert read_json(tmp_path / "d.json") == {"name": "a", "count": 3}
    assert read_record(Named, tmp_path / "d.json") == Named(name="a", count=3)


def test_a_value_is_quoted_for_its_owner_alone():
    text = '{"name": "root:x:0:0:secret"}'

    with pytest.raises(DocumentError) as quoted:
        parse_record(Named, text, quotes=True)
    with pytest.raises(DocumentError) as silent:
        parse_record(Named, text)

    assert "root:x" in str(quoted.value)
    assert "root:x" not in str(silent.value)
    assert str(silent.value).startswith("name: ")


def test_what_moves_a_cursor_or_turns_text_round_shows_as_an_escape():
    assert clean("a\x1b[31mb\u202ec\u200bd\r\ne\ud800") == "a\\x1b[31mb\\u202ec\\u200bd\\r\\ne\\ud800"
    assert clean("a\n\tb\x07", layout=True) == "a\n\tb\\x07"
    assert clean("Žluťoučký kůň 漢字 👍") == "Žluťoučký kůň 漢字 👍"


def test_inert_text_opens_no_link_and_fetches_no_picture():
    said = inert("![x](http://evil) [y](javascript:1) <img src=x> \x1b[2J a < b")

    assert said == "! [x] (http://evil) [y] (javascript:1) &lt;img src=x> \\x1b[2J a &lt; b"
    assert inert(said) == said
