"""Gateway: the process with which a run joins a Ray cluster, so that Ray's end is not the run's.

Batches come in and are handed to machines of the run's kind; what becomes of them goes out. A batch whose machine or process is lost
is handed to another, without what was done of it; a few times, then that is its result.
"""

import logging
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from typing import Any

import ray
from ray.exceptions import NodeDiedError, ObjectLostError, OutOfMemoryError, RayError, WorkerCrashedError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from profiling_agent.cluster import node
from profiling_agent.cluster.kind import SLOT, slot_of, start_line
from profiling_agent.cluster.wire import NODE_LOGS, Join, Said, Submit
from profiling_agent.documents import first_line
from profiling_agent.errors import ProfilingAgentError, RequestError, RunError
from profiling_agent.processes.serve import Parent

# What says nothing of the job, unless it goes on: its process or its machine is gone.
LOST = (WorkerCrashedError, NodeDiedError, ObjectLostError, OutOfMemoryError)
# How often a job may lose its machine: a job that takes it down does so each time.
MAX_TRIES = 3
LOOK_S = 2.0
# How long a run waits for a machine, once none of its kind is there any more.
PATIENCE_S = 60.0
# For the first process of each machine, which imports all of us; less than the run waits for this one.
LOOK_AT_S = 150.0
STORE_BYTES = 80 * 2**20


class Gateway:
    """A cluster that was joined."""

    def __init__(self, parent: Parent, join: Join) -> None:
        """Join it and look at its machines; RequestError where it won't do."""
        self._parent, self._join, self._slot = parent, join, slot_of(join.kind)
        self._speaking = threading.Lock()
        self._gone_since: float | None = None
        _connect(join, self._slot)
        self._do: Any = ray.remote(node.carry_out)
        self.fit = self._looked_at()

    def say(self, said: Said) -> None:
        """Tell the run."""
        with self._speaking:
            self._parent.send(said)

    def _machines(self) -> dict[str, str]:
        """Return the machines of the kind that are there, their names by their ids."""
        return {
            one["NodeID"]: one["NodeManagerHostname"]
            for one in ray.nodes()
            if one["Alive"] and self._slot in one["Resources"]
        }

    def _looked_at(self) -> dict[str, str]:
        """Return the machines that are fit, as `_machines` does; those that are known to be aren't looked at again."""
        machines = self._machines()
        if not machines:
            others = sorted(
                {name for one in ray.nodes() if one["Alive"] for name in one["Resources"] if name.startswith(SLOT)}
            )
            offered = f"it offers {', '.join(others)}" if others else "none of its machines was started for us"
            raise RequestError(
                f"the cluster has no machine of this one's kind, {self._join.kind} ({offered}): add some as this one, with `{start_line()}`"
            )
        look: Any = ray.remote(node.look)
        seen = {
            machine: look.options(
                num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(machine, soft=False)
            ).remote(self._join.sign)
            # A process on a machine would be in the times of what it does for another run.
            for machine in machines.keys() - set(self._join.known)
        }
        deadline = time.monotonic() + LOOK_AT_S
        fit = {machine: name for machine, name in machines.items() if machine not in seen}
        for machine, told in seen.items():
            name = machines[machine]
            try:
                kind, text, niceness = ray.get(told, timeout=max(deadline - time.monotonic(), 1.0))
            except RayError as error:
                left = self._machines()
                if left and machine not in left:
                    # Lost while it was looked at: the others do the work.
                    continue
                raise RequestError(
                    f"machine {name} can't work for us ({_line(error)}): install this version of profiling-agent there"
                ) from error
            if kind != self._join.kind:
                raise RequestError(
                    f"machine {name} was added as kind {self._join.kind} and is {kind}: on it, give the line that `profiling-agent doctor` prints"
                )
            if text != self._join.text:
                raise RequestError(
                    f"machine {name} doesn't see {self._join.sign!r}: choose an output folder that all machines share, or name a ray_store that they do"
                )
            if niceness:
                raise RequestError(
                    f"machine {name} runs its processes at niceness {niceness}, which makes its times its neighbours': start Ray there with RAY_worker_niceness=0"
                )
            fit[machine] = name
        return fit

    def serve(self) -> None:
        """Take batches until the run is gone."""
        while True:
            submit = self._parent.receive(Submit)
            threading.Thread(target=self._follow, args=(submit,), daemon=True).start()

    def _follow(self, submit: Submit) -> None:
        """Have a batch done, and tell of it."""
        try:
            for said in self._done(submit):
                self.say(said.model_copy(update={"number": submit.number}))
        except ProfilingAgentError as error:
            self.say(Said(kind="refused", number=submit.number, error=type(error).__name__, text=str(error)))
        # Whoever waits for this thread waits for ever: whatever goes wrong in it is told.
        except Exception as error:  # noqa: BLE001
            self.say(Said(kind="gone", number=submit.number, text=_line(error)))
        finally:
            self.say(Said(kind="over", number=submit.number))

    def _done(self, submit: Submit) -> Iterator[Said]:
        """Have a batch done by one machine, or by the next where that is lost."""
        left, lost = {order.key: order for order in submit.batch.orders}, 0
        while left:
            batch = submit.batch.model_copy(update={"orders": tuple(left.values())})
            try:
                for said in self._attempt(submit.model_copy(update={"batch": batch})):
                    yield said.model_copy(update={"tries": said.tries + lost})
                    if said.error:
                        return
                    if said.kind == "ended":
                        left.pop(said.key, None)
                        lost = 0
                if left:
                    raise RunError(
                        f"a machine said nothing of {next(iter(left))}: look into {NODE_LOGS}/ of the run, and resume"
                    )
            except LOST as error:
                lost += 1
                # It may have told of all, and be lost as it ended.
                if left and lost == MAX_TRIES:
                    text = f"the job lost its machine or process {lost} times ({_line(error)})"
                    yield Said(kind="ended", key=next(iter(left)), tries=lost, error="JobError", text=text)
                    return
                rest = f"{next(iter(left))} is done again elsewhere" if left else "nothing is done again"
                yield Said(kind="progress", text=f"a machine was lost, and {rest}")

    def _attempt(self, submit: Submit) -> Iterator[Said]:
        """Have one machine do a batch; raises what Ray does where it is lost."""
        # The whole slot: nothing else of ours runs beside a job, be it timed or not.
        placed = self._do.options(num_cpus=0, resources={self._slot: 1}, max_retries=0, num_returns="streaming")
        stream = placed.remote(submit.model_dump_json())
        while True:
            ready, _ = ray.wait([stream], timeout=LOOK_S)
            if not ready:
                self._check_machines()
                continue
            try:
                told = next(stream)
            except StopIteration:
                return
            yield Said.model_validate_json(ray.get(told))

    def _check_machines(self) -> None:
        """Raise where no machine of the kind has been there for a while; Ray itself would wait for ever, and say nothing."""
        if self._machines():
            self._gone_since = None
        elif self._gone_since is None:
            self._gone_since = time.monotonic()
        elif time.monotonic() - self._gone_since > PATIENCE_S:
            raise TimeoutError(f"it has had no machine of kind {self._join.kind} for {PATIENCE_S:.0f} s")


def _line(error: Exception) -> str:
    """Return what an error says, in a line: of one that was raised elsewhere, its cause."""
    return first_line(getattr(error, "cause", None) or error)[:300]


def _connect(join: Join, slot: str) -> None:
    """Join the cluster, or start one of this machine alone; RequestError where that can't be."""
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if join.address is None:
            ray.init(
                address="local",
                include_dashboard=False,
                resources={slot: 1},
                object_store_memory=STORE_BYTES,
                _temp_dir=join.folder,
                _node_ip_address="127.0.0.1",
                **quiet,
            )
        else:
            _check_listening(join.address)
            ray.init(address=join.address, **quiet)
    # Ray raises bare ones too.
    except Exception as error:
        if join.address is None:
            raise RequestError(f"Ray can't be started here ({_line(error)}): use engine=local") from error
        raise RequestError(
            f"there is no cluster to join at {join.address!r} ({_line(error)}): name a running one, whose machine this is"
        ) from error


def _check_listening(address: str) -> None:
    """Raise OSError where nobody listens, which Ray itself asks for a minute."""
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host, int(port)), timeout=LOOK_S).close()


def main() -> None:
    """Join, and serve the run until it is gone."""
    # A terminal's Ctrl-C is told to all of its processes; the run says what becomes of it.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    parent = Parent()
    join = parent.receive(Join)
    # Ray has every process import from where this one stands, where a user may have a file called numpy.py.
    os.chdir(join.folder)
    try:
        gateway = Gateway(parent, join)
    except ProfilingAgentError as error:
        parent.send(Said(kind="refused", error=type(error).__name__, text=str(error)))
        # Who isn't wanted any more ends by itself: Ray's own end takes seconds.
        parent.receive(Submit)
        return
    gateway.say(Said(kind="joined", nodes=tuple(gateway.fit.values()), machines=tuple(gateway.fit)))
    gateway.serve()


if __name__ == "__main__":
    main()
