"""The subgraphs of the deployment search and the verdict: what they show, and where a killed one goes on."""

import asyncio
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from interrupted import edited, finished_jobs, held_locks, processes_of

from profiling_agent import build_graph
from profiling_agent.graph.checkpoints import RunSaver
from profiling_agent.reporting.report import read_report
from profiling_agent.schemas import Status
from profiling_agent.workspace import LOCK


def standing(finished: Path, folder: Path, stage: str) -> Path:
    """Return a copy of a finished run that stands before a stage, with its jobs."""
    return edited(finished, folder, {"request": {"output": str(folder)}}, until=stage)


def config_of(run: Path) -> Any:
    return {"configurable": {"thread_id": run.name}}


def streamed(run: Path, stage: str) -> list[tuple[str, Any]]:
    """Go on to the end of a stage; return its steps with what they changed."""
    graph = build_graph(RunSaver(run.parent))
    parts: Any = graph.stream(
        None, config_of(run), stream_mode="updates", subgraphs=True, durability="sync", interrupt_after=[stage]
    )
    return [step for path, part in parts if path for step in part.items()]


def test_each_deployment_is_a_step_that_shows_what_was_found_of_it(finished: Path, tmp_path: Path):
    run = standing(finished, tmp_path, "deployment_search")
    steps = streamed(run, "deployment_search")

    search = read_report(finished).deployment_search
    assert search is not None
    (found,) = search.options
    names = ["measure_baseline", "try_deployment", "race_deployments", "measure_deployment"]
    assert [name for name, _ in steps] == names
    tried, measured = steps[1][1], steps[3][1]
    assert tried.keys() == {"options", "untried", "took_s", "spent_s"}
    assert tried["options"]["eager dynamic"].deployed == found.deployed
    assert measured["options"] == {"eager dynamic": found}
    assert (found.status, found.reason[:5]) == (Status.ACCEPTED, "top-1")
    # None of it is in the run's own state.
    assert not {"options", "untried"} & build_graph(RunSaver(tmp_path)).get_state(config_of(run)).values.keys()


def test_each_finalist_is_a_step_until_the_verdict(finished: Path, tmp_path: Path):
    steps = streamed(standing(finished, tmp_path, "verdict"), "verdict")

    names, report = [name for name, _ in steps], read_report(finished)
    assert [*dict.fromkeys(names)][-4:] == ["race_candidates", "time_finalist", "test_finalist", "decide"]
    tests = [update["tested"][-1] for name, update in steps if name == "test_finalist"]
    assert tests[-1].test.candidate == report.heldout or not tests[-1].test.keeps_accuracy
    assert steps[-1][1]["final"].verdict == report.verdict


def test_a_drawing_has_the_steps():
    nodes = build_graph().get_graph(xray=True).nodes

    assert {"deployment_search:try_deployment", "verdict:test_finalist", "analysis:think"} <= nodes.keys()


# Kills itself, as `kill -9` would, when a step has ended.
KILLED = """
import os, signal, sys
from pathlib import Path
from profiling_agent import build_graph
from profiling_agent.graph.checkpoints import RunSaver
run, config = Path(sys.argv[1]), {"configurable": {"thread_id": Path(sys.argv[1]).name}}
options = {"stream_mode": "updates", "subgraphs": True, "durability": "sync"}
for path, part in build_graph(RunSaver(run.parent)).stream(None, config, **options):
    if path and sys.argv[2] in part:
        os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("stage", "step", "repeated"),
    [
        ("deployment_search", "race_deployments", {"measure_baseline", "try_deployment"}),
        ("verdict", "time_finalist", {"measure_candidate", "race_candidates"}),
    ],
)
def test_a_stage_that_is_killed_goes_on_inside_and_repeats_no_finished_step(
    finished: Path, tmp_path: Path, stage: str, step: str, repeated: set[str]
):
    run = standing(finished, tmp_path, stage)
    done = finished_jobs(run)
    ended = subprocess.run([sys.executable, "-c", KILLED, run, step], check=False)
    assert ended.returncode == -signal.SIGKILL

    names = [name for name, _ in streamed(run, stage)]

    assert names
    # The checkpoint of the step itself may not have been written yet.
    assert not repeated & {*names}
    assert finished_jobs(run) == done
    values: Any = build_graph(RunSaver(tmp_path)).get_state(config_of(run)).values
    assert values["initial_journal"].deployment_search == read_report(finished).deployment_search
    assert stage != "verdict" or values["verdict"] == read_report(finished).verdict


@pytest.mark.parametrize(("stage", "kind"), [("deployment_search", "deploy"), ("verdict", "session")])
def test_a_cancel_in_a_step_ends_its_child_and_the_thread_goes_on_inside(
    finished: Path, tmp_path: Path, stage: str, kind: str
):
    run = standing(finished, tmp_path, stage)
    for folder in run.glob(f"jobs/{kind}-*"):
        shutil.rmtree(folder)

    async def cancelled() -> float:
        graph = build_graph(RunSaver(tmp_path))
        running = asyncio.create_task(graph.ainvoke(None, config_of(run), durability="sync"))
        while not processes_of(run):
            await asyncio.sleep(0.01)
        began = time.monotonic()
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        return time.monotonic() - began

    assert asyncio.run(cancelled()) < 2
    assert not held_locks(run / LOCK)
    names = [name for name, _ in streamed(run, stage)]
    assert names[0] == ("try_deployment" if stage == "deployment_search" else "time_finalist")
