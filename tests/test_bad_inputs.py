"""A slice of the bad-input benchmark: no case of it ends in anything but a line, or in no harm."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bad_inputs.py"


def failures(tmp_path: Path, *asked: str) -> str:
    """Return what the benchmark says where a case failed."""
    command = [sys.executable, str(BENCHMARK), "--fixtures", str(tmp_path), "--seed", "7", *asked]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    return "" if ended.returncode == 0 else ended.stdout[-5000:] + ended.stderr[-2000:]


def test_bad_models_data_replies_and_ledgers_end_in_one_line(tmp_path: Path):
    kinds = ("model folders", "data sets", "model replies", "ledgers", "label maps")

    assert not failures(tmp_path, "--count", "30", *(word for kind in kinds for word in ("--kind", kind)))


@pytest.mark.slow
def test_bad_inputs_of_every_kind_end_in_one_line(tmp_path: Path):
    assert not failures(tmp_path, "--count", "150")
