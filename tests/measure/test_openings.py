"""The ledger of openings, over as many runs as a user makes."""

import json
from pathlib import Path

import pytest

from profiling_agent.measure.predictions import VARIABLE, note_opening, share

IMAGES = [bytes([number]) for number in range(50)]


@pytest.fixture
def ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(VARIABLE, str(tmp_path))
    return tmp_path / "heldout" / "model.json"


def test_shares_add_up_to_one_however_many_there_are():
    shares = [share(number) for number in range(1, 100_000)]
    assert shares[0] == 0.8
    assert shares == sorted(shares, reverse=True)
    assert 0.9999 < sum(shares) < 1


@pytest.mark.usefixtures("ledger")
def test_each_candidate_is_another_opening_and_the_same_one_again_is_not():
    numbers = [note_opening("model", name, IMAGES).number for name in ("a", "b", "a", "c", "b")]
    assert numbers == [1, 2, 1, 3, 2]


@pytest.mark.usefixtures("ledger")
def test_another_model_and_other_images_have_openings_of_their_own():
    assert note_opening("model", "a", IMAGES[:20]).number == 1
    assert note_opening("another", "b", IMAGES[:20]).number == 1
    assert note_opening("model", "b", IMAGES[20:]).number == 1
    assert note_opening("model", "c", IMAGES[19:21]).number == 3


@pytest.mark.usefixtures("ledger")
def test_whoever_begins_afresh_says_why_and_it_stays_said():
    note_opening("model", "a", IMAGES)
    note_opening("model", "b", IMAGES)
    begun = note_opening("model", "c", IMAGES, fresh="new photographs")
    after = note_opening("model", "d", IMAGES)
    assert (begun.number, begun.fresh) == (1, "new photographs")
    assert (after.number, after.fresh) == (2, "new photographs")


@pytest.mark.parametrize("text", ["", "{", '{"tests": 7}', '{"tests": [{"candidate": "a"}]}', "[" * 100_000])
def test_a_damaged_ledger_is_set_aside_and_said(ledger: Path, text: str):
    note_opening("model", "a", IMAGES)
    ledger.write_text(text)
    opening = note_opening("model", "b", IMAGES)
    assert opening.number == 1
    assert opening.note is not None
    assert "damaged" in opening.note
    assert ledger.with_suffix(".damaged").read_text() == text
    assert note_opening("model", "c", IMAGES).number == 2


def test_what_a_power_loss_left_half_written_is_swept_up(ledger: Path):
    ledger.parent.mkdir()
    (ledger.parent / ".tmp-model.json-x1").write_text("{")
    note_opening("model", "a", IMAGES)
    assert sorted(path.name for path in ledger.parent.iterdir()) == ["ledgers.lock", "model.json"]


@pytest.mark.parametrize("data", ["file", "~nobody-of-that-name/data"])
def test_where_nothing_can_be_kept_the_run_goes_on_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, data: str
):
    (tmp_path / "file").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv(VARIABLE, data)
    opening = note_opening("model", "a", IMAGES, fresh="new photographs")
    assert (opening.number, opening.share, opening.fresh) == (1, share(1), "new photographs")
    assert opening.note is not None
    assert VARIABLE in opening.note


def test_a_ledger_holds_no_image_and_no_path(ledger: Path):
    note_opening("model", "a", IMAGES)
    held = json.loads(ledger.read_text())
    assert [sorted(test) for test in held["tests"]] == [["candidate", "fresh", "images"]]
    assert len(held["tests"][0]["images"]) == 8 * len(IMAGES)
