"""Cost of the graph itself: its nodes, state and checkpoints, as a share of a default run.

    python benchmarks/overhead.py [--quick] [--json FILE]

The run is made once. Then its checkpoints are removed and it is driven again: every job answers from the run folder,
so what is left is the graph's own work and the little that stages do beside their jobs, an upper bound of it.
The paper gives no such number; the bound is ours.
"""

import tempfile
import time
from pathlib import Path

from checks import Check, finish, parser_of, use_own_ledger

from profiling_agent import Request, optimize, resume
from profiling_agent.workspace import Workspace

MAX_SHARE = 0.01
MAX_CHECKPOINT_BYTES = 5_000_000


def main() -> int:
    """Run, replay, compare; return 1 where a check does not hold."""
    parser = parser_of(__doc__)
    parser.add_argument("--quick", action="store_true", help="two iterations")
    asked = parser.parse_args()
    use_own_ledger()
    with tempfile.TemporaryDirectory() as output:
        request = Request(output=output, run_id="default", max_iterations=2 if asked.quick else 5)
        started = time.perf_counter()
        optimize(request)
        run_s = time.perf_counter() - started
        workspace = Workspace(Path(output) / "default")
        checkpoint_bytes = workspace.checkpoints.stat().st_size
        jobs_before = {job.name for job in workspace.jobs.iterdir()}
        for leftover in workspace.root.glob("checkpoints.sqlite*"):
            leftover.unlink()
        started = time.perf_counter()
        resume(workspace.root)
        replay_s = time.perf_counter() - started
        num_repeated = len({job.name for job in workspace.jobs.iterdir()} - jobs_before)
    print(f"run {run_s:.1f} s, replay {replay_s:.2f} s, checkpoints {checkpoint_bytes / 1e6:.2f} MB")
    checks = [
        Check.at_most("the graph's share of a default run", replay_s / run_s, MAX_SHARE),
        Check.at_most("bytes of checkpoints", checkpoint_bytes, MAX_CHECKPOINT_BYTES),
        Check.at_most("jobs done again in the replay", num_repeated, 0),
    ]
    return finish(checks, [{"run_s": run_s, "replay_s": replay_s, "checkpoint_bytes": checkpoint_bytes}], asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
