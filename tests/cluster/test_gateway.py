"""What becomes of a batch whose machine is lost: done again by the next, a few times, and told once."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from toy_job import DoubleTask

from profiling_agent.cluster.wire import Said, Submit
from profiling_agent.jobs.engine import Batch
from profiling_agent.jobs.runner import Jobs, job_key
from profiling_agent.jobs.table import JobRow
from profiling_agent.workspace import Workspace

if not find_spec("ray"):
    pytest.skip("the extra ray isn't installed", allow_module_level=True)

from ray.exceptions import WorkerCrashedError

from profiling_agent.cluster.__main__ import MAX_TRIES, Gateway


class Machines(Gateway):
    """Machines that say what they are told to, attempt by attempt, or are lost."""

    def __init__(self, *attempts: tuple[Said | Exception, ...]) -> None:
        self.attempts = iter(attempts)
        self.asked: list[list[str]] = []

    def _attempt(self, submit: Submit) -> Iterator[Said]:
        self.asked.append([order.key for order in submit.batch.orders])
        for each in next(self.attempts):
            if isinstance(each, Exception):
                raise each
            yield each


LOST = WorkerCrashedError()


def submit(root: Path) -> Submit:
    jobs = Jobs(Workspace(root), table={DoubleTask: JobRow(handler="toy_job:double", torch=False)})
    orders = tuple(jobs._order(DoubleTask(number=number)) for number in (1, 2))
    return Submit(number=0, root=str(root), run="run", batch=Batch(orders=orders, timeout_s=60.0))


ONE, TWO = (job_key(DoubleTask(number=number)) for number in (1, 2))


def ended(key: str) -> Said:
    return Said(kind="ended", key=key)


def test_what_was_done_is_not_done_again_where_a_machine_is_lost(tmp_path: Path):
    machines = Machines((ended(ONE), LOST), (ended(TWO),))

    said = [one for one in machines._done(submit(tmp_path)) if one.kind == "ended"]

    assert machines.asked == [[ONE, TWO], [TWO]]
    assert [(one.key, one.tries, one.error) for one in said] == [(ONE, 1, ""), (TWO, 2, "")]


def test_a_job_that_loses_its_machine_each_time_is_a_result(tmp_path: Path):
    machines = Machines(*[(LOST,)] * MAX_TRIES)

    *_, last = machines._done(submit(tmp_path))

    assert (last.key, last.error, last.tries) == (ONE, "JobError", MAX_TRIES)
    assert f"lost its machine or process {MAX_TRIES} times" in last.text


def test_a_machine_that_is_lost_once_it_told_of_all_costs_nothing(tmp_path: Path):
    machines = Machines((ended(ONE), ended(TWO), LOST))

    said = [*machines._done(submit(tmp_path))]

    assert [one.key for one in said if one.kind == "ended"] == [ONE, TWO]
    assert not any(one.error for one in said)
