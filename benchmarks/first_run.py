"""A new user's path, timed: a clean clone, `make run`, a verdict and an HTML report, no question asked.

    python benchmarks/first_run.py [--json FILE]

With an empty cache of our own, so that the embedded model is trained as well; pip's cache is left as it is.
"""

import os
import subprocess
import tempfile
import time
from pathlib import Path

from checks import ROOT, Check, finish, parser_of

from profiling_agent.reporting.report import read_report


def timed(command: list[str], folder: Path, environment: dict[str, str]) -> float:
    """Return the seconds that a command takes in `folder`; nobody answers, should it ask."""
    started = time.perf_counter()
    subprocess.run(command, cwd=folder, env=environment, stdin=subprocess.DEVNULL, check=True)
    return time.perf_counter() - started


def main() -> int:
    """Clone, install, run; return 1 where a check does not hold."""
    parser = parser_of(__doc__)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        clone = Path(scratch) / "clone"
        environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        environment |= {f"PROFILING_AGENT_{name.upper()}": str(Path(scratch) / name) for name in ("cache", "data")}
        subprocess.run(["git", "clone", "--quiet", str(ROOT), str(clone)], check=True)
        setup_s = timed(["make", "install"], clone, environment)
        run_s = timed(["make", "run"], clone, environment)
        (run,) = (path for path in (clone / "runs").iterdir() if path.is_dir())
        report, page = read_report(run), (run / "report.html").stat().st_size
    row = {
        "setup_s": setup_s,
        "run_s": run_s,
        "verdict": report.verdict.outcome,
        "attempts": len(report.attempts),
        "page_bytes": page,
    }
    print(
        f"set-up {setup_s:.0f} s, run {run_s:.0f} s: {row['verdict']} after {row['attempts']} plans, "
        f"report.html of {page / 1e6:.1f} MB"
    )
    check = Check.at_most("minutes from a clean clone to the verdict", (setup_s + run_s) / 60, 15)
    return finish([check], [row], asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
