"""What is said between a run, the process that it joins a cluster with, and the machines: records, as JSON."""

from typing import Literal

from pydantic import Field

from profiling_agent.jobs.engine import Batch
from profiling_agent.records import Record

# Where the processes of each machine print, in the run folder.
NODE_LOGS = "nodes"


class Join(Record):
    """Join the cluster at `address`, or start one in `folder`; machines of `kind` are wanted that see the file `sign` say `text`.

    Those whose ids are `known` were looked at before.
    """

    address: str | None
    folder: str
    kind: str
    sign: str
    text: str
    known: tuple[str, ...] = ()


class Submit(Record):
    """Do a batch of the run in `root`, or where machines don't share it of the run `run` in an archive; what is said of it has its number."""

    number: int
    root: str
    run: str
    archive: str | None = None
    batch: Batch


class Said(Record):
    """What becomes of it.

    joined: to the machines `nodes`, by their ids `machines`. refused: nothing can be done here, or none of this batch, as `error` says. gone: the cluster, by its
    own words. progress: as a stage tells it. ended: the job `key`, with an `error` or without. over: no more of the batch is said.
    """

    kind: Literal["joined", "refused", "gone", "progress", "ended", "over"]
    number: int = -1
    text: str = ""
    nodes: tuple[str, ...] = ()
    machines: tuple[str, ...] = ()
    done: int = 0
    total: int = 0
    key: str = ""
    seconds: float = Field(default=0.0, ge=0)
    at: float = 0.0
    node: str = ""
    tries: int = 1
    error: str = ""
