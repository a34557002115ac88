"""The README's picture of a report: made by its script, of a run whose numbers are among the recorded ones."""

import subprocess
import sys
from pathlib import Path

from PIL import Image
from report_picture import MAX_BYTES, WIDTH

ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "report.png"


def test_the_picture_is_small_enough_for_a_readme():
    assert PICTURE.stat().st_size <= MAX_BYTES
    with Image.open(PICTURE) as picture:
        assert picture.width == WIDTH
    assert f"({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_a_run_that_has_no_report_gives_no_picture_and_one_line(tmp_path: Path):
    program = [sys.executable, str(ROOT / "benchmarks" / "report_picture.py"), str(tmp_path)]

    ended = subprocess.run([*program, "--output", str(tmp_path / "x.png")], capture_output=True, text=True, check=False)

    assert ended.returncode == 2
    assert len(ended.stderr.strip().splitlines()) == 1
    assert "is no run folder" in ended.stderr
    assert not list(tmp_path.iterdir())
