"""The page of the paper's tables has a place for each, and is filled with what was made."""

import paper_tables
import pytest

from profiling_agent.reproduce.paper import TABLE_NAMES
from profiling_agent.reproduce.table import Study


def study(name, line: str = "data: ours") -> Study:
    return Study(name=name, title="t", rows=(), contradicted=(), differences=(line,), missing=())


def test_the_page_has_a_place_for_every_table_and_holds_what_was_made_last():
    page = paper_tables.PAGE.read_text(encoding="utf-8")

    assert paper_tables.filled(page, paper_tables.read(paper_tables.FOLDER)) == page


def test_a_table_is_put_in_its_place_and_another_in_its_stead():
    page = paper_tables.PAGE.read_text(encoding="utf-8")

    once = paper_tables.filled(page, {name: study(name, f"data: of {name}") for name in TABLE_NAMES})
    again = paper_tables.filled(once, {"table3": study("table3", "data: newer")})

    assert all(once.count(f"- data: of {name}\n") == 1 for name in TABLE_NAMES)
    assert once.index("### Table 3") < once.index("data: of table3") < once.index("### Table 4")
    assert "data: newer" in again
    assert "data: of" not in again
    assert again.count("Not made yet.") == len(TABLE_NAMES) - 1


def test_a_page_without_a_place_is_refused():
    with pytest.raises(SystemExit, match="no place for table1"):
        paper_tables.filled("# nothing\n", {})


def test_only_what_lies_in_a_folder_is_read(tmp_path):
    (tmp_path / "table2.json").write_text(study("table2").model_dump_json())

    assert paper_tables.read(tmp_path) == {"table2": study("table2")}
