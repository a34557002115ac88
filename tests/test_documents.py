"""JSON of somebody else's, and text that shows as it reads."""

from pathlib import Path

import pytest
from pydantic import Field

from profiling_agent.documents import DocumentError, clean, inert, parse_json, parse_record, read_json, read_record
from profiling_agent.records import Record


class Named(Record):
    name: str = Field(max_length=10)
    count: int = 0


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "no JSON"),
        ("{", "line 1, column 2"),
        ("[" * 200 + "]" * 200, "nested deeper than 100"),
        ("[" * 100_000 + "]" * 100_000, "nested deeper than 100"),
        ('{"a":' * 200 + "1" + "}" * 200, "nested deeper than 100"),
        ("9" * 20, "whole number of 20 digits"),
        ("9" * 100_000, "whole number of 100000 digits"),
        ("1e400", "beyond those of float64"),
        ("NaN", "NaN"),
        ("-Infinity", "-Infinity"),
        (b"\xff\xfe{", "UTF"),
        ("[" + "0," * 600 + "0]", "larger than 1,000 bytes"),
    ],
)
def test_a_document_out_of_bounds_is_named(text: str | bytes, says: str):
    with pytest.raises(DocumentError, match=says):
        parse_json(text, max_bytes=1000 if "larger" in says else 10**6)


def test_a_document_within_bounds_is_read(tmp_path: Path):
    (tmp_path / "d.json").write_text('{"name": "a", "count": 3}')

    assert parse_json("[" * 100 + "]" * 100)
    assert read_json(tmp_path / "d.json") == {"name": "a", "count": 3}
    assert read_record(Named, tmp_path / "d.json", under=tmp_path) == Named(name="a", count=3)


def test_what_a_document_says_is_quoted_for_its_owner_alone():
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


def test_text_of_a_strangers_opens_no_link_and_fetches_no_picture():
    said = inert("![x](http://evil) [y](javascript:1) <img src=x> \x1b[2J a < b")

    assert said == "! [x] (http://evil) [y] (javascript:1) &lt;img src=x> \\x1b[2J a &lt; b"
    assert inert(said) == said
