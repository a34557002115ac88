"""A slice of the bad-input benchmark: no case of it ends in anything but a line, or in no harm."""

import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[1] / "benchmarks" / "bad_inputs.py"


@pytest.mark.slow
def test_bad_inputs_of_every_kind_end_in_one_line(tmp_path: Path):
    command = [sys.executable, str(BENCHMARK), "--fixtures", str(tmp_path), "--seed", "7", "--count", "26"]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
