"""Files, documents and the cache: written whole or not at all."""

import errno
import os
import sqlite3
import sys
from contextlib import closing
from pathlib import Path

import pytest
from full_disk import at_most

from profiling_agent.errors import AcquisitionError, StorageError
from profiling_agent.lib.io import (
    CACHE_VARIABLE,
    DocumentError,
    FileRefusedError,
    appearing,
    append_line,
    cache_folder,
    cached,
    clean,
    expanded,
    inert,
    inside,
    parse_json,
    parse_record,
    remove_partial_files,
    storage_problem,
    write_text,
)
from profiling_agent.schemas import Opening
from profiling_agent.workspace import storage_errors


def test_what_is_written_is_read_and_nothing_else_stays(tmp_path: Path):
    write_text(tmp_path / "a", "one")
    write_text(tmp_path / "a", "zwei \udcff")
    append_line(tmp_path / "log", "first")
    append_line(tmp_path / "log", "second")

    assert (tmp_path / "a").read_text() == "zwei \\udcff"
    assert (tmp_path / "log").read_text() == "first\nsecond\n"
    assert {path.name for path in tmp_path.iterdir()} == {"a", "log"}
    # As any file that a program makes, and readable for others where the user's mask allows it.
    assert (tmp_path / "a").stat().st_mode == (tmp_path / "log").stat().st_mode


@pytest.mark.parametrize("path", ["../secret", "/etc/passwd", "link", "folder/../../secret"])
def test_a_path_stays_in_its_folder(tmp_path: Path, path: str):
    (tmp_path / "secret").write_text("s")
    (tmp_path / "run" / "folder").mkdir(parents=True)
    (tmp_path / "run" / "link").symlink_to(tmp_path / "secret")

    with pytest.raises(FileRefusedError):
        inside(tmp_path / "run" / path, tmp_path / "run")


def test_a_folder_of_no_user_is_refused(monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(FileRefusedError):
        expanded("~nosuchuserhere/x")
    monkeypatch.setenv(CACHE_VARIABLE, "~nosuchuserhere/x")
    with pytest.raises(AcquisitionError, match=f"cache folder .* can't be written .*set {CACHE_VARIABLE}"):
        cached("thing", lambda folder: (folder / "whole").touch())


def test_a_folder_appears_whole_or_not_at_all(tmp_path: Path):
    def fill(name: str, *, fails: bool) -> None:
        with appearing(tmp_path / name) as folder:
            (folder / "part").write_text("p")
            (folder / "deeper").mkdir()
            (folder / "deeper" / "link").symlink_to("/nowhere")
            if fails:
                raise KeyError(name)

    fill("whole", fails=False)
    with pytest.raises(KeyError):
        fill("broken", fails=True)
    with pytest.raises(FileExistsError):
        fill("whole", fails=False)
    with pytest.raises(NotADirectoryError):
        fill("whole/part/below", fails=False)

    assert [path.name for path in tmp_path.iterdir()] == ["whole"]
    assert {path.name for path in (tmp_path / "whole").iterdir()} == {"part", "deeper"}


def test_a_folder_that_a_process_was_killed_over_is_swept(tmp_path: Path):
    killed = appearing(tmp_path / "cut")
    killed.__enter__()

    remove_partial_files(tmp_path, "other")
    assert list(tmp_path.iterdir())
    remove_partial_files(tmp_path, "cut")

    assert list(tmp_path.iterdir()) == []


def test_a_quota_is_told_from_damage_and_leaves_the_old_file(tmp_path: Path):
    write_text(tmp_path / "report.md", "old")
    append_line(tmp_path / "log", "old")

    with at_most(1000):
        with pytest.raises(OSError, match="too large") as full:
            write_text(tmp_path / "report.md", "n" * 5000)
        with pytest.raises(OSError):  # noqa: PT011 - a short write or an error, as the system likes
            append_line(tmp_path / "log", "n" * 5000)

    assert storage_problem(full.value) == "File too large"
    assert (tmp_path / "report.md").read_text() == "old"
    assert (tmp_path / "log").read_text() == "old\n"
    assert {path.name for path in tmp_path.iterdir()} == {"report.md", "log"}


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EACCES, errno.EIO])
def test_what_the_disk_has_against_it_is_one_line_with_the_way_on(tmp_path: Path, number: int):
    with (
        pytest.raises(StorageError, match=rf"\({os.strerror(number)}\).*profiling-agent resume"),
        storage_errors(tmp_path),
    ):
        raise OSError(number, os.strerror(number), "file")


@pytest.mark.parametrize(
    "error", [FileNotFoundError(errno.ENOENT, "none"), FileRefusedError(Path("x"), "it is no path")]
)
def test_an_error_that_says_nothing_of_the_disk_goes_on(tmp_path: Path, error: OSError):
    assert storage_problem(error) is None
    with pytest.raises(type(error)), storage_errors(tmp_path):
        raise error


def test_what_sqlite_says_of_the_disk_is_told_from_damage(tmp_path: Path):
    with closing(sqlite3.connect(tmp_path / "db")) as connection:
        connection.execute("CREATE TABLE t (x)")
        connection.execute("PRAGMA max_page_count = 3")
        with pytest.raises(sqlite3.Error) as full:
            connection.executemany("INSERT INTO t VALUES (?)", [("x" * 4000,)] * 20)

    assert storage_problem(full.value) == "database or disk is full"
    assert storage_problem(sqlite3.DatabaseError("file is not a database")) is None


@pytest.mark.parametrize("text", ["", "{", '{"name": "a"', b"\xff\xfe{", b"\x00\xff"])
def test_what_is_no_json_is_one_line(text: str | bytes):
    with pytest.raises(DocumentError, match=r"^it is no JSON \(.+\)$"):
        parse_json(text)
    with pytest.raises(DocumentError, match=r"^it is no JSON \(.+\)$"):
        parse_record(Opening, text)


def test_what_moves_a_cursor_or_turns_text_round_shows_as_an_escape():
    assert clean("a\x1b[31mb\u202ec\u200bd\r\ne\ud800") == "a\\x1b[31mb\\u202ec\\u200bd\\r\\ne\\ud800"
    assert clean("a\n\tb\x07", layout=True) == "a\n\tb\\x07"
    assert clean("Žluťoučký kůň 漢字 👍") == "Žluťoučký kůň 漢字 👍"


def test_inert_text_opens_no_link_and_fetches_no_picture():
    said = inert("![x](http://evil) [y](javascript:1) <img src=x> \x1b[2J a < b")

    assert said == "! [x] (http://evil) [y] (javascript:1) &lt;img src=x> \\x1b[2J a &lt; b"
    assert inert(said) == said


def test_a_line_that_was_cut_off_does_not_take_the_next_one_with_it(tmp_path: Path):
    (tmp_path / "log").write_text('{"cut')

    append_line(tmp_path / "log", "next")

    assert (tmp_path / "log").read_text() == '{"cut\nnext\n'


def test_without_a_home_folder_the_error_names_the_variable_to_set(monkeypatch: pytest.MonkeyPatch):
    for name in (CACHE_VARIABLE, "HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    # Nor does the system list the user.
    monkeypatch.setitem(sys.modules, "pwd", None)

    with pytest.raises(FileRefusedError, match=f"set {CACHE_VARIABLE} to an absolute path"):
        cache_folder()
