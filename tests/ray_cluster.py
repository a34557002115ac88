"""A Ray cluster of several nodes on this machine, as a process of its own that tests speak to by lines.

`python ray_cluster.py RESOURCES NUMBER CACHES` prints the address, then does what lines ask: `kill N` ends a node at once, `end` all of them.
"""

import json
import os
import subprocess
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

STORE_BYTES = 80 * 2**20


def main() -> None:
    """Start the nodes, the first of which is the head, and serve."""
    from ray.cluster_utils import Cluster

    resources, number, folder = json.loads(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
    wanted: dict[str, Any] = {"resources": resources, "object_store_memory": STORE_BYTES, "include_dashboard": False}
    cluster = Cluster()
    # As machines have it: each a cache, and with it a lock, of its own.
    caches = [{"PROFILING_AGENT_CACHE": f"{folder}/{place}"} if folder else {} for place in range(number)]
    nodes = [cluster.add_node(**wanted, env_vars=cache) for cache in caches]
    print(f"address {cluster.address}", flush=True)
    for line in sys.stdin:
        what, _, which = line.strip().partition(" ")
        if what == "end":
            break
        cluster.remove_node(nodes[int(which)], allow_graceful=False)
        print(f"killed {which}", flush=True)
    cluster.shutdown()


class RayCluster:
    """The process, as a test sees it."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        """Wait until its nodes are there."""
        self._process = process
        self.address = self._told("address")

    def _told(self, what: str) -> str:
        said: IO[str] | None = self._process.stdout
        assert said is not None, "the pipe was asked for"
        for line in said:
            if line.startswith(f"{what} "):
                return line.split()[1]
        raise AssertionError(f"the cluster ended with {self._process.wait()} before it said {what!r}")

    def kill(self, number: int) -> None:
        """End a node with all of its processes, at once."""
        self._say(f"kill {number}")
        self._told("killed")

    def _say(self, line: str) -> None:
        asked = self._process.stdin
        assert asked is not None, "the pipe was asked for"
        asked.write(f"{line}\n")
        asked.flush()

    def end(self) -> None:
        """End all of it."""
        if self._process.poll() is None:
            self._say("end")
            self._process.wait(60)


@contextmanager
def ray_cluster(
    resources: Mapping[str, float], number: int, log: Path, caches: Path | None = None
) -> Generator[RayCluster]:
    """Give a cluster of so many nodes that offer these resources; the environment's token is asked of whoever joins.

    With `caches` each node has a cache of its own there, and doesn't wait for the others as they are on one machine.
    """
    # Ray's own folder is deep, and the names of sockets are short.
    command = [sys.executable, __file__, json.dumps(dict(resources)), str(number), str(caches or "")]
    told = os.environ | {"RAY_worker_niceness": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, env=told, text=True
        )
        try:
            cluster = RayCluster(process)
            yield cluster
            cluster.end()
        finally:
            process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None:
                    pipe.close()


if __name__ == "__main__":
    main()
