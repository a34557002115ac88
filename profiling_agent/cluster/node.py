"""A machine's side: what Ray runs there. The jobs themselves are done by the local engine, in processes of its own.

The engine stays in Ray's process for the run's next batch, with its warm worker; its children end with that process.
"""

import atexit
import os
import queue
import shutil
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from profiling_agent.cache import cache_folder
from profiling_agent.cluster.archive import Archive, needed_by, read_sign
from profiling_agent.cluster.kind import kind_of, node_name
from profiling_agent.cluster.wire import NODE_LOGS, Said, Submit
from profiling_agent.documents import first_line
from profiling_agent.errors import ProfilingAgentError
from profiling_agent.files import make_folders, read_text
from profiling_agent.holder import remove_left
from profiling_agent.jobs.engine import Ended
from profiling_agent.jobs.local import LocalEngine
from profiling_agent.processes.machine_lock import MACHINE
from profiling_agent.reproducibility import environment
from profiling_agent.workspace import Workspace

# Between two lines of progress; each is a message through the cluster.
MOMENT_S = 0.25

_engines: dict[Path, LocalEngine] = {}


def look(sign: str) -> tuple[str, str, int]:
    """Return this machine's kind, what it sees in a file or at an address, nothing where there is none, and its processes' niceness."""
    try:
        seen = read_sign(sign) if "://" in sign else read_text(Path(sign))
    except (OSError, ImportError, ValueError):
        seen = ""
    return kind_of(environment()), seen, os.getpriority(os.PRIO_PROCESS, 0)


def carry_out(asked: str) -> Iterator[str]:
    """Do a batch and tell of it while it is done: a `Submit` in, `Said` out, as JSON."""
    import ray

    doing = _Doing(Submit.model_validate_json(asked), node_name(ray.get_runtime_context().get_node_id()))
    threading.Thread(target=doing.work, daemon=True).start()
    while (one := doing.said.get()) is not None:
        yield one.model_dump_json()


class _Doing:
    """A batch that is done in a thread, with what there is to say of it."""

    def __init__(self, submit: Submit, node: str) -> None:
        self.said = queue.SimpleQueue[Said | None]()
        self._node, self._told_s = node, 0.0
        self._submit, self._archive, self._root = submit, None, Path(submit.root)

    def work(self) -> None:
        """Do it, and say at the end that it is over."""
        try:
            # Ray sets it for each task, so that its processes keep to a core; ours have the machine.
            os.environ.pop("OMP_NUM_THREADS", None)
            if self._submit.archive is not None:
                self._fetch(self._submit.archive)
            orders = [order.model_copy(update={"root": str(self._root)}) for order in self._submit.batch.orders]
            batch = self._submit.batch.model_copy(update={"orders": tuple(orders)})
            _engine(self._root, self._node).carry_out([batch], self._progress, self._end)
        except ProfilingAgentError as error:
            self.said.put(Said(kind="refused", error=type(error).__name__, text=f"{error} (on {self._node})"))
        # Nobody else hears of this thread's end.
        except Exception as error:  # noqa: BLE001
            text = f"{self._node} can't work there ({type(error).__name__}: {first_line(error)}): mend that, and resume"
            self.said.put(Said(kind="refused", error="RunError", text=text))
        finally:
            self.said.put(None)

    def _fetch(self, address: str) -> None:
        """Take what the batch reads from the archive."""
        self._archive, self._root = Archive(address, self._submit.run), _own_root(self._submit.run)
        for key in needed_by(self._submit.batch.orders):
            self._archive.get(self._root / "jobs", key)

    def _progress(self, message: str, done: int, total: int) -> None:
        if time.monotonic() - self._told_s >= MOMENT_S or done == total:
            self._told_s = time.monotonic()
            self.said.put(Said(kind="progress", text=message, done=done, total=total, node=self._node))

    def _end(self, ended: Ended) -> None:
        if self._archive is not None and ended.error is None:
            self._archive.put(self._root / "jobs", ended.key, anew=True)
        self.said.put(
            Said(
                kind="ended",
                key=ended.key,
                seconds=ended.seconds,
                at=ended.at,
                node=self._node,
                tries=ended.tries,
                error=type(ended.error).__name__ if ended.error else "",
                text=str(ended.error or ""),
            )
        )


def _own_root(run: str) -> Path:
    """Return this process's own folder for a run that is in an archive; those of processes that are gone are removed."""
    # The folder may be other machines' too.
    folder = cache_folder() / "cluster" / MACHINE
    remove_left(folder.glob("*"))
    root = folder / f"{run}-{os.getpid()}"
    if not root.exists():
        make_folders(root / "jobs")
        atexit.register(shutil.rmtree, root, ignore_errors=True)
    return root


def _engine(root: Path, node: str) -> LocalEngine:
    """Return this process's engine for a run."""
    if root not in _engines:
        make_folders(root / NODE_LOGS)
        _engines[root] = LocalEngine(Workspace(root), log=f"{NODE_LOGS}/{node.replace('/', '-')}.log")
    return _engines[root]
