"""Evidence in the cache is used where it is of the same units and young, and is worth nothing otherwise."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import made
import pytest

from profiling_agent.measure.latency_table import LatencyTable
from profiling_agent.profiling import evidence
from profiling_agent.profiling.evidence import evidence_path, keep_evidence, read_evidence, timed
from profiling_agent.pruning.widths import aligned_widths

UNITS = made.profile().units
KLS = {unit.name: [0.01 * step for step in range(len(aligned_widths(unit.width, unit.step)))] for unit in UNITS}
EVIDENCE = made.evidence(UNITS, KLS)


def test_what_is_kept_is_read_back_by_whoever_depends_on_the_same(tmp_path: Path):
    path = evidence_path(tmp_path / "cache", {"model": "a", "seed": 0})
    assert read_evidence(path, UNITS) is None
    keep_evidence(path, EVIDENCE)

    assert read_evidence(evidence_path(tmp_path / "cache", {"seed": 0, "model": "a"}), UNITS) == EVIDENCE
    assert read_evidence(evidence_path(tmp_path / "cache", {"model": "a", "seed": 1}), UNITS) is None


def cut_short(path: Path) -> None:
    path.write_text(path.read_text()[:-100])


def emptied(path: Path) -> None:
    path.write_text("")


def binary(path: Path) -> None:
    path.write_bytes(b"\x00\xff" * 100)


def a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def an_order_with_a_channel_twice(path: Path) -> None:
    path.write_text(path.read_text().replace('"order":[0,1,', '"order":[1,1,', 1))


def a_width_of_none(path: Path) -> None:
    path.write_text(path.read_text().replace('"keep":', '"keep":9', 1))


def of_another_unit(path: Path) -> None:
    path.write_text(path.read_text().replace(UNITS[0].name, "elsewhere"))


@pytest.mark.parametrize(
    "damage",
    [cut_short, emptied, binary, a_folder, an_order_with_a_channel_twice, a_width_of_none, of_another_unit],
)
def test_what_is_damaged_or_of_others_is_measured_again(tmp_path: Path, damage: Callable[[Path], None]):
    path = evidence_path(tmp_path, {})
    keep_evidence(path, EVIDENCE)
    assert read_evidence(path, UNITS) == EVIDENCE
    damage(path)

    assert read_evidence(path, UNITS) is None
    keep_evidence(path, EVIDENCE)


@pytest.mark.parametrize("shift_s", [-31 * 24 * 3600.0, 3600.0])
def test_what_is_old_or_of_a_time_to_come_is_measured_again(tmp_path: Path, shift_s: float):
    path = evidence_path(tmp_path, {})
    kept = evidence._Kept(taken=time.time() + shift_s, evidence=EVIDENCE)
    path.write_text(kept.model_dump_json())

    assert read_evidence(path, UNITS) is None


def test_what_a_busy_machine_timed_is_kept_and_has_the_times_of_whoever_reads_it(tmp_path: Path):
    slow = EVIDENCE.units[0].model_copy(update={"is_unsteady": True, "latency_ms": 500.0})
    keep_evidence(
        path := evidence_path(tmp_path, {}), EVIDENCE.model_copy(update={"units": (slow, *EVIDENCE.units[1:])})
    )
    first = UNITS[0]
    widths = aligned_widths(first.width, first.step)
    table = LatencyTable({first.name: {first.width: 2.0} | {width: 2.0 * width / first.width for width in widths}})

    known = read_evidence(path, UNITS)
    assert known is not None
    now = timed(known, UNITS, table)

    assert (now.units[0].latency_ms, now.units[0].is_unsteady) == (2.0, False)
    assert [option.latency_saved_ms for option in now.units[0].options] == [
        pytest.approx(2.0 * (1 - option.keep / first.width)) for option in now.units[0].options
    ]
    assert [option.kl for option in now.units[0].options] == [option.kl for option in slow.options]
    # What this run didn't time has no time, whatever an earlier one saw.
    assert now.units[1].latency_ms is None


def test_the_oldest_make_way(tmp_path: Path):
    for number in range(evidence.MAX_FILES + 3):
        keep_evidence(path := evidence_path(tmp_path, {"number": number}), EVIDENCE)
        os.utime(path, (number, number))
    keep_evidence(evidence_path(tmp_path, {"number": "last"}), EVIDENCE)

    assert len(list(tmp_path.glob("*.json"))) == evidence.MAX_FILES
    assert not evidence_path(tmp_path, {"number": 3}).exists()
    assert read_evidence(evidence_path(tmp_path, {"number": "last"}), UNITS) == EVIDENCE


def test_a_cache_that_can_not_be_written_costs_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("")
    keep_evidence(evidence_path(tmp_path / "file" / "evidence", {}), EVIDENCE)
