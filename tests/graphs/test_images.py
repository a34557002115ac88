"""What a whole run did with its images, counted from its jobs."""

import json
import subprocess
import sys
from pathlib import Path

from architecture import ROOT

from profiling_agent.data.prepared import PIXELS
from profiling_agent.reporting.results import read_report


def test_each_image_is_decoded_once_and_answered_once_by_a_model_and_no_array_is_left(finished: Path):
    script = ROOT / "benchmarks" / "images_evaluated.py"
    ended = subprocess.run([sys.executable, script, finished], check=True, capture_output=True, text=True)

    counted, report = json.loads(ended.stdout), read_report(finished)
    acquired, best = report.acquired, report.heldout.model.path
    baseline = report.variants[0].evaluation.model.path
    # Fewer than 512 of each: everything is one shard.
    splits = {split.name: split.num_images for split in (acquired.calibration, acquired.search, acquired.heldout)}
    assert max(splits.values()) <= 512
    assert counted["decoded"] == splits
    assert counted["evaluated_twice"] == 0
    for split in ("search", "heldout"):
        assert counted["evaluated"][f"{baseline} {split}"] == counted["evaluated"][f"{best} {split}"] == splits[split]
    assert list(finished.glob(f"jobs/*/{PIXELS}")) == []
