"""Sweeps: what a file asks for, finished, cut and failing runs, the command, and a Ray cluster that loses a node."""

import json
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
import pytest
from commands import call
from conftest import World
from interrupted import decisions, predictions_of, processes_of

from profiling_agent import Request, optimize_many
from profiling_agent.errors import RequestError, StorageError
from profiling_agent.reporting.render import render_sweep
from profiling_agent.reporting.report import read_report
from profiling_agent.sweep import PAGE, SweepRow, read_sweep, with_run_id
from profiling_agent.workspace import MANIFEST, create_workspace

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
WHOLE = """
models: [./a-vit, {model: org/resnet, revision: main}]
datasets:
  - dataset: ./data
    split: test
contracts:
  - {max_accuracy_drop: 0.01}
  - {max_accuracy_drop: 0.02, max_size_ratio: 0.25, objective: size}
seeds: [0, 7]
request: {batch_size: 8, time_budget: 20m}
"""
LEAST = "models: [a]\ndatasets: [b]\n"


def read(folder: Path, text: str):
    (folder / "sweep.yaml").write_text(text)
    return read_sweep(folder / "sweep.yaml", "out")


def test_every_combination_is_a_run_in_the_order_of_the_file(tmp_path: Path):
    requests = read(tmp_path, WHOLE)

    assert [(one.model, one.max_accuracy_drop, one.seed) for one in requests] == [
        (model, lost, seed) for model in ("./a-vit", "org/resnet") for lost in (0.01, 0.02) for seed in (0, 7)
    ]
    assert {(one.split, one.batch_size, one.time_budget, one.output) for one in requests} == {("test", 8, "20m", "out")}
    assert [one.objective for one in requests[:4]] == ["speed", "speed", "size", "size"]
    assert [one.revision for one in requests] == [None] * 4 + ["main"] * 4
    run_ids = {str(one.run_id) for one in requests}
    assert len(run_ids) == 8
    assert all(run_id.startswith(("a-vit-data-s", "resnet-data-s")) for run_id in run_ids)
    # A run keeps its name when the file asks for more.
    larger = WHOLE.replace("[0, 7]", "[3, 0, 7]").replace("contracts:\n", "contracts:\n  - {min_speedup: 2.0}\n")
    assert run_ids < {one.run_id for one in read(tmp_path, larger)}
    assert read(tmp_path, LEAST) == (with_run_id(Request(model="a", dataset="b", output="out")),)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("models: [a]\n", "datasets: Field required"),
        ("[a, b]", "can't be used"),
        (f"{LEAST}colour: red\n", "colour: Extra inputs are not permitted"),
        (f"{LEAST}contracts: [{{max_drop: 0.1}}]\n", "unknown term 'max_drop': did you mean 'max_accuracy_drop'?"),
        ("models: [{revision: main}]\ndatasets: [b]\n", "model: String should have at least 1 character"),
        (f"{LEAST}contracts: [{{min_speedup: 0.5}}]\n", "the run of a on b, contract {'min_speedup': 0.5}, seed 0"),
        ("models: !!python/object/apply:os.system [id]\n", "could not determine a constructor"),
        ("models: [a\n", "line 2, column 1"),
    ],
)
def test_a_file_that_can_not_be_used_is_refused(tmp_path: Path, text: str, message: str):
    with pytest.raises(RequestError) as raised:
        read(tmp_path, text)

    assert message in str(raised.value)


def test_a_finished_run_is_read_back_and_one_that_fails_is_a_row_with_its_reason(world: World, finished: Path):
    complete = world.request(finished.parent)
    gone = world.request(finished.parent, run_id="gone").model_copy(update={"model": str(finished / "nowhere")})
    before = (finished / "report.json").stat().st_mtime_ns
    heard: list[str] = []

    first, second = optimize_many([gone, complete], lambda event: heard.append(event.stage))

    assert first.report is None
    assert "nowhere" in first.failure
    # A request that can't be carried out leaves nothing behind, so that the next call tries it again.
    assert not (finished.parent / "gone").exists()
    assert (second.failure, second.report) == ("", read_report(finished))
    assert (finished / "report.json").stat().st_mtime_ns == before
    assert heard.count("sweep") == 2
    page = (finished.parent / PAGE).read_text()
    assert "1 have a verdict, 1 failed, 0 are still to be done" in page
    (row,) = optimize_many([world.request(finished.parent, seed=1)])
    assert row.failure == "run 'quick' was begun with another seed: choose another run_id"


def test_runs_that_are_no_sweep_or_have_no_place_are_refused(tmp_path: Path):
    one = Request(run_id="one")
    for requests in ([], [one, Request(run_id="one", seed=1)], [one, one], [one, Request(output="x", seed=1)]):
        with pytest.raises(RequestError, match="lie in one output, each with a run_id of its own: none is there twice"):
            optimize_many(requests)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="can't be written"):
        optimize_many([Request(model=str(tmp_path), output=str(tmp_path / "file"))])


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="no chromium: apt-get install chromium")
def test_a_browser_filters_the_table_of_the_page(finished: Path, tmp_path: Path):
    from playwright.sync_api import sync_playwright

    row = SweepRow(request=Request(run_id="quick"), report=read_report(finished))
    other = row.model_copy(update={"request": Request(run_id="quick", model="another-model")})
    (tmp_path / PAGE).write_text(render_sweep([row, other], 2))
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        page = browser.new_page()
        page.goto((tmp_path / PAGE).as_uri())
        page.fill("input[data-filters]", "ANOTHER-model")
        assert [each.is_visible() for each in page.locator("#table-runs tbody tr").all()] == [False, True]
        browser.close()


def sheet(folder: Path, world: World, *, contracts: list[Any], seeds: tuple[int, ...] = (0,), **terms: Any) -> Path:
    request = {"batch_size": 16, "num_sessions": 2, "runtimes": "eager", "iterate": False, "selection": "paper"} | terms
    combined = {"models": [str(world.model)], "datasets": [str(world.data)], "contracts": contracts, "seeds": seeds}
    # JSON is YAML.
    (folder / "sweep.yaml").write_text(json.dumps({**combined, "request": request}))
    return folder / "sweep.yaml"


@pytest.mark.slow
def test_the_command_goes_on_with_what_was_cut_and_reads_back_what_is_there(tmp_path: Path, world: World):
    contract = {"max_accuracy_drop": 0.03, "min_speedup": 900.0}
    file, output = sheet(tmp_path, world, contracts=[contract], num_samples=60, quantize_dtype="none"), tmp_path / "out"
    (request,) = read_sweep(file, str(output))
    run = output / str(request.run_id)
    # Cut on another machine before its first checkpoint: the request is all that is there, and it begins again.
    create_workspace(request, run.name)
    (run / "mine").touch()
    manifest = json.loads((run / MANIFEST).read_text())
    (run / MANIFEST).write_text(json.dumps(manifest | {"machine": "another"}))

    ended = call("sweep", file, "--output", output, "--json")

    (row,) = json.loads(ended.stdout)
    assert not (run / "mine").exists()
    assert (row["request"]["run_id"], row["failure"]) == (run.name, "")
    # Nothing meets the contract: the run has a verdict all the same.
    assert row["report"]["verdict"]["outcome"] != "MET"
    assert f'href="{run.name}/report.html"' in (output / PAGE).read_text()

    again = call("sweep", file, "--output", output)

    assert (ended.exit_code, again.exit_code) == (1, 1), again.stderr
    # A narrow terminal breaks the name.
    assert run.name[:13] in again.stdout


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[tuple[Any, list[Any]]]:
    """Give a Ray cluster of three nodes, each with a cache, and so a machine lock, of its own."""
    if find_spec("ray") is None:
        pytest.skip("the extra ray isn't installed")
    (tmp_path / "token").write_text(secrets.token_hex(32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RAY_AUTH_MODE", "token")
        patch.setenv("RAY_AUTH_TOKEN_PATH", str(tmp_path / "token"))
        patch.setenv("RAY_worker_niceness", "0")
        patch.setenv("RAY_memory_monitor_refresh_ms", "0")
        from ray.cluster_utils import Cluster

        cluster = Cluster()
        options: dict[str, Any] = {"num_cpus": 2, "object_store_memory": 80 * 2**20, "include_dashboard": False}
        caches = [{"PROFILING_AGENT_CACHE": str(tmp_path / "caches" / name)} for name in "012"]
        yield cluster, [cluster.add_node(**options, env_vars=cache) for cache in caches]
        cluster.shutdown()


def node_of(run: Path) -> int | None:
    """Return the number of the node that works on a run, by the environment of the process that holds it."""
    for process in processes_of(run):
        with suppress(psutil.Error):
            return int(Path(process.environ()["PROFILING_AGENT_CACHE"]).name)
    return None


@pytest.mark.slow
@pytest.mark.matrix
def test_a_sweep_on_three_nodes_decides_what_one_here_does_though_a_node_is_lost(
    world: World, nodes: tuple[Any, list[Any]], tmp_path: Path
):
    cluster, started = nodes
    file = sheet(tmp_path, world, contracts=[{"max_accuracy_drop": 0.03}], seeds=(0, 1, 2))
    output, here = tmp_path / "there", tmp_path / "here"
    program = [sys.executable, "-m", "profiling_agent.cli.main", "sweep", file.name, "--output", output.name, "--json"]
    options = ["--ray", cluster.address]
    local = optimize_many(read_sweep(file, str(here)))
    seen, lost = set[int](), None

    with subprocess.Popen([*program, *options], cwd=tmp_path, stdout=subprocess.PIPE, text=True) as sweep:
        while sweep.poll() is None:
            working = {run.name: node for run in output.glob("*/") if (node := node_of(run)) is not None}
            seen |= set(working.values())
            for run_id, node in working.items():
                # The head is the cluster: it is another one that dies, amid a run.
                if lost is None and node > 0 and len(list((output / run_id).glob("jobs/*/result.json"))) > 3:
                    lost = run_id
                    cluster.remove_node(started[node], allow_graceful=False)
            time.sleep(0.2)
        assert sweep.stdout is not None
        rows = json.loads(sweep.stdout.read())

    assert seen == {0, 1, 2}
    assert lost is not None
    assert [row["failure"] for row in rows] == [""] * 3
    for row, expected in zip(rows, local, strict=True):
        run_id = str(expected.request.run_id)
        assert row["request"]["run_id"] == run_id
        assert expected.report is not None
        assert decisions(read_report(output / run_id)) == decisions(expected.report)
        assert predictions_of(output / run_id) == predictions_of(here / run_id)
        assert sorted(path.name for path in (output / run_id).iterdir()) >= ["best", "checkpoints.sqlite"]


@pytest.mark.slow
def test_a_cluster_that_is_not_there_and_runs_that_fail_on_nodes(nodes: tuple[Any, list[Any]], tmp_path: Path):
    cluster, _ = nodes
    code = (
        "import sys\nfrom profiling_agent import Request, optimize_many\n"
        "rows = optimize_many([Request(model=name, output='out') for name in ('./a', './b')], ray_address=sys.argv[1])\n"
        "print(*(row.failure for row in rows), sep='\\n')"
    )
    there, none = (
        subprocess.run([sys.executable, "-c", code, address], cwd=tmp_path, capture_output=True, text=True, check=False)
        for address in (cluster.address, "127.0.0.1:1")
    )

    assert ["'./a'" in there.stdout, "'./b'" in there.stdout, len(there.stdout.splitlines())] == [True, True, 2]
    assert "RequestError: no Ray cluster at '127.0.0.1:1'" in none.stderr
