"""Whole runs on a Ray cluster: plans, predictions and verdict are those of this machine alone."""

import subprocess
import sys
import time
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from interrupted import decisions, finished_jobs, is_left_alone, predictions_of
from ray_cluster import RayCluster
from typer.testing import CliRunner
from world import write_data

from profiling_agent import optimize, resume
from profiling_agent.cli.main import app
from profiling_agent.reporting.results import read_report
from profiling_agent.sweep.many import optimize_many

pytestmark = pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray isn't installed")

# One runtime and one scheme: which of two equally fast deployments wins may differ from day to day.
ASKED: dict[str, Any] = {"runtimes": "eager", "quantize_dtype": "qint8", "max_iterations": 2}
# Of which half are searched on: three shards, one for each node.
NUM_TEST = 2_600


@pytest.fixture(scope="module")
def large(world: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The tiny model, and images enough to be evaluated in shards."""
    return replace(world, data=write_data(tmp_path_factory.mktemp("large") / "data", NUM_TEST))


@pytest.mark.slow
def test_a_run_on_three_nodes_decides_what_one_here_does(large: Any, cluster: RayCluster, tmp_path: Path):
    here = optimize(large.request(tmp_path, run_id="here", **ASKED))
    heard: list[str] = []
    there = optimize(
        large.request(tmp_path, run_id="there", engine="ray", ray_address=cluster.address, **ASKED),
        lambda event: heard.append(event.message),
    )

    assert decisions(there) == decisions(here)
    assert predictions_of(tmp_path / "there") == predictions_of(tmp_path / "here")
    assert here.nodes == {}
    # Which of the three does how many is left to Ray: a shard may be done before a further node has its process. test_ray_engine.py holds all three to it.
    assert there.nodes
    name, work = next(iter(there.nodes.items()))
    assert work.jobs
    for page in ("report.md", "report.html"):
        assert name in (tmp_path / "there" / page).read_text()
    assert any(message.startswith(f"{name}: ") for message in heard)
    assert not list((tmp_path / "there").rglob(".tmp-*"))


@pytest.mark.slow
def test_runs_side_by_side_come_to_what_they_do_one_after_the_other(world: Any, cluster: RayCluster, tmp_path: Path):
    told = {"engine": "ray", "ray_address": cluster.address}
    asked = ASKED | {"run_id": None, "iterate": False, "selection": "paper", "quantize_dtype": "none"}
    requests = [world.request(tmp_path / "beside", **asked, **told, seed=seed) for seed in (0, 1)]
    stages: set[str] = set()

    beside = optimize_many(requests, lambda event: stages.add(event.stage), num_at_once=2)
    (alone,) = optimize_many([world.request(tmp_path / "alone", **asked)])

    assert [row.failure for row in beside] == ["", ""]
    assert stages == {row.run_id for row in beside}
    # Named alike, whoever does the work.
    assert alone.run_id == beside[0].run_id
    both = (read_report(tmp_path / where / alone.run_id) for where in ("beside", "alone"))
    assert len({str(decisions(report)) for report in both}) == 1


@pytest.mark.slow
def test_a_run_that_is_killed_leaves_no_process_anywhere_and_goes_on_with_what_was_done(
    world: Any, cluster: RayCluster, tmp_path: Path
):
    asked = world.request(tmp_path, run_id="cut", iterate=False, **ASKED)
    flags = ("model", "dataset", "output", "run_id", "runtimes", "quantize_dtype", "max_iterations", "num_sessions")
    words = [word for name in flags for word in (f"--{name.replace('_', '-')}", str(getattr(asked, name)))]
    where = ["--no-iterate", "--engine", "ray", "--ray-address", cluster.address]
    command = [sys.executable, "-m", "profiling_agent.cli.main", "run", *words, *where, "--quiet"]
    run = tmp_path / "cut"
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL) as process:
        deadline = time.monotonic() + 120
        while not list(run.glob("jobs/evidence-*/result.json")):
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
        process.kill()
    alone, before = is_left_alone(run), finished_jobs(run)
    report = resume(run)
    after = finished_jobs(run)

    assert alone
    assert report.request.engine == "ray"
    assert {name: after[name] for name in before} == before
    assert len(after) > len(before)
    assert not list(run.rglob(".tmp-*"))


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--ray-address", "127.0.0.1:1"], "use engine=ray"),
        (["--engine", "ray", "--ray-address", "ray://host:1"], "clients can't measure"),
        (["--engine", "ray", "--ray-address", "local"], "on a machine of the cluster"),
        (["--engine", "ray", "--ray-store", "bucket"], "has to be an address"),
        (["--engine", "ray", "--device", "cuda"], "knows machines by their processors: use engine=local"),
        (["--engine", "ray", "--ray-store", "simplecache::s3://me:secret@bucket/x"], "without user, password or query"),
        (["--engine", "ray", "--ray-store", "s3://me:secret@bucket"], "without user, password or query"),
        (["--engine", "ray", "--ray-address", "127.0.0.1:1"], "there is no cluster to join at '127.0.0.1:1'"),
    ],
)
def test_a_wrong_place_is_one_line_and_leaves_nothing(flags: list[str], said: str, tmp_path: Path):
    ended = CliRunner().invoke(app, ["run", "--output", str(tmp_path / "runs"), "--quiet", *flags])

    assert ended.exit_code == 2
    assert said in " ".join(ended.output.split())
    assert "secret" not in ended.output
    assert not list((tmp_path / "runs").glob("*"))
