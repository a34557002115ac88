"""A sweep of four models here and on Ray clusters of several nodes of this machine: the same verdicts, and what Ray takes.

With 0 nodes Ray has no part in it. All nodes share this machine's cores, and with three of them three runs measure side by side.
`python benchmarks/sweep_nodes.py [--json FILE]`
"""

import os
import tempfile
import time
from pathlib import Path
from typing import Any

from checks import SHARED, Check, finish, parser_of, use_own_ledger

from profiling_agent import Request, optimize_many

MODELS = ("vit", "deit", "swin", "resnet")
OPTIONS = {"num_samples": 100, "num_sessions": 2, "runtimes": "eager", "max_iterations": 1}


def swept(output: Path, address: str | None) -> list[dict[str, Any]]:
    """Sweep the models; return a row for each, with the seconds of the whole sweep."""
    options: dict[str, Any] = OPTIONS | {"output": str(output), "dataset": f"{SHARED}/data/cifar10"}
    requests = [Request(model=f"{SHARED}/models/{name}-cifar10", **options) for name in MODELS]
    started = time.perf_counter()
    rows = optimize_many(requests, ray_address=address)
    seconds, figures = time.perf_counter() - started, list[dict[str, Any]]()
    for name, row in zip(MODELS, rows, strict=True):
        figures.append({"where": output.name, "model": name, "failure": row.failure, "sweep_seconds": seconds})
        if report := row.report:
            figures[-1] |= {"outcome": report.verdict.outcome, "top1": report.best.top1, "params": report.best.params}
            figures[-1]["speedup"] = report.race_result.speedup if report.race_result else None
    return figures


def main() -> int:
    """Sweep here and on clusters; return 1 where a check does not hold."""
    parser = parser_of(__doc__)
    arguments, rows = parser.parse_args(), list[dict[str, Any]]()
    os.environ |= {"RAY_worker_niceness": "0", "RAY_memory_monitor_refresh_ms": "0"}
    from ray.cluster_utils import Cluster

    with tempfile.TemporaryDirectory() as scratch:
        for number in (0, 1, 3):
            use_own_ledger()
            cluster: Any = Cluster()
            for node in range(number):
                cache = {"PROFILING_AGENT_CACHE": f"{scratch}/caches/{number}-{node}"}
                cluster.add_node(num_cpus=2, object_store_memory=80 * 2**20, include_dashboard=False, env_vars=cache)
            rows += swept(Path(scratch) / f"{number} nodes", cluster.address if number else None)
            cluster.shutdown()
    alike = sum(row.get("outcome") == rows[index % len(MODELS)].get("outcome") for index, row in enumerate(rows))
    return finish([Check.at_least("runs with the verdict of 0 nodes", alike, len(rows))], rows, arguments.json)


if __name__ == "__main__":
    raise SystemExit(main())
