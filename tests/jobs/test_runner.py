import io
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import psutil
import pytest
import zoo
from PIL import Image

from profiling_agent.data.images import write_rows
from profiling_agent.errors import ArtifactError, JobError, RunError
from profiling_agent.jobs.runner import Jobs, job_key
from profiling_agent.jobs.tasks import TABLE, EvaluateTask, PrepareTask, ProfileTask, SurveyShapeTask, prepared
from profiling_agent.lib.io import file_sha256
from profiling_agent.lib.progress import silent
from profiling_agent.runtimes.torch_artifact import save_model
from profiling_agent.schemas import ArtifactRef, Headline, LatencyStats, SplitInfo
from profiling_agent.workspace import Workspace

NUM_IMAGES = 6
BASELINE = Headline(
    latency=LatencyStats(batch_size=1, median_ms=1.0, low_ms=1.0, high_ms=1.0, samples_ms=(1.0,)),
    peak_memory_bytes=2**30,
    forward_passes=1,
)


def noise_png(rng: np.random.Generator) -> bytes:
    held = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (32, 32, 3), dtype=np.uint8)).save(held, format="PNG")
    return held.getvalue()


def evaluation(model: ArtifactRef, *, split: str = "split.parquet", batch_size: int = 4) -> EvaluateTask:
    file = ArtifactRef(path=split, sha256=split, size_bytes=1, kind="split")
    info = SplitInfo(name="search", source_split="test", num_images=NUM_IMAGES, file=file)
    return EvaluateTask(model=model, split=info, shard=0, batch_size=batch_size, device="cpu")


def copies() -> list[psutil.Process]:
    """Return the processes that do this one's jobs: children of what makes them as copies of itself."""
    return [copy for server in psutil.Process().children() for copy in server.children()]


@pytest.fixture(scope="module")
def baseline(tmp_path_factory: pytest.TempPathFactory) -> tuple[Workspace, ArtifactRef]:
    workspace = Workspace(tmp_path_factory.mktemp("run"))
    folder = workspace.jobs / "made" / "model"
    folder.parent.mkdir(parents=True)
    rng = np.random.default_rng(0)
    write_rows(
        workspace.root / "split.parquet",
        zip([noise_png(rng) for _ in range(NUM_IMAGES)], [0] * NUM_IMAGES, strict=True),
    )
    save_model(zoo.vit(), folder, spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    sha256 = file_sha256(folder / "recipe.json")
    return workspace, ArtifactRef(path="jobs/made/model", sha256=sha256, size_bytes=1, kind="model")


@pytest.fixture
def jobs(baseline: tuple[Workspace, ArtifactRef]):
    runner = Jobs(baseline[0])
    yield runner
    runner.close()


def test_a_job_is_done_once_and_leaves_a_whole_folder(jobs: Jobs, baseline: tuple[Workspace, ArtifactRef]):
    workspace, model = baseline
    task = evaluation(model)

    first = jobs.run(task)
    result = workspace.jobs / job_key(task) / "result.json"
    written = result.stat().st_mtime_ns
    again = jobs.run(task)

    assert again == first
    assert first.predictions.num_images == NUM_IMAGES
    assert workspace.path(first.predictions.files[0]).is_file()
    assert result.stat().st_mtime_ns == written
    assert not list(workspace.jobs.glob(".tmp-*"))


def test_what_a_stage_refuses_is_raised_here_and_the_worker_goes_on(
    jobs: Jobs, baseline: tuple[Workspace, ArtifactRef]
):
    workspace, model = baseline

    with pytest.raises(ArtifactError, match=r"no_such\.parquet"):
        jobs.run(evaluation(model, split="no_such.parquet"))

    assert jobs.run(evaluation(model, batch_size=3)).predictions.num_images == NUM_IMAGES
    assert not list(workspace.jobs.glob(".tmp-*"))


@pytest.mark.slow
def test_a_crash_is_a_jobs_result_and_the_next_job_gets_a_new_worker(
    jobs: Jobs, baseline: tuple[Workspace, ArtifactRef]
):
    workspace, model = baseline

    def kill(message: str, done: int, total: int) -> None:
        for child in copies():
            child.kill()

    jobs.progress = kill
    with pytest.raises(JobError, match=r"died with exit status -9 \(SIGKILL"):
        jobs.run(ProfileTask(model=model, batch_size=1, device="cpu", headline=BASELINE))
    jobs.progress = silent

    assert not list(workspace.jobs.glob(".tmp-*"))
    assert jobs.run(evaluation(model, batch_size=2)).predictions.num_images == NUM_IMAGES


def test_a_job_whose_process_is_killed_is_done_again_once_and_leaves_nothing(
    jobs: Jobs, baseline: tuple[Workspace, ArtifactRef]
):
    workspace, model = baseline
    killed: list[int] = []

    def kill(message: str, done: int, total: int) -> None:
        for child in copies() if not killed else ():
            killed.append(child.pid)
            child.kill()

    jobs.progress = kill
    profiled = jobs.run(ProfileTask(model=model, batch_size=2, device="cpu", headline=BASELINE))
    jobs.progress = silent

    assert killed
    assert workspace.path(profiled.profile).is_file()
    assert not list(workspace.jobs.glob(".tmp-*"))


def test_a_job_that_takes_too_long_is_ended(baseline: tuple[Workspace, ArtifactRef]):
    workspace, model = baseline
    jobs = Jobs(workspace, table={PrepareTask: replace(TABLE[PrepareTask], timeout_s=0.01)})

    with pytest.raises(JobError, match="longer than 0 s"):
        jobs.run(prepared(evaluation(model, split="late.parquet").split, workspace.path(model))[0])

    # What copies itself goes on until nobody needs it any more; the copy is gone.
    assert copies() == []
    jobs.close()
    assert not list(workspace.jobs.glob(".tmp-*"))


def test_a_job_that_there_is_no_memory_for_is_not_begun_and_goes_on_when_there_is(
    baseline: tuple[Workspace, ArtifactRef],
):
    workspace, model = baseline
    free = [10 * 2**30]
    jobs = Jobs(workspace, available=lambda: free[0])
    jobs.set_limits_from(BASELINE, "cpu")
    names = ("one.parquet", "two.parquet", "three.parquet")
    for name in names:
        (workspace.root / name).write_bytes((workspace.root / "split.parquet").read_bytes())
    one, two, three = (prepared(evaluation(model, split=name).split, workspace.path(model))[0] for name in names)
    free[0] = 2**30

    with pytest.raises(
        RunError, match=r"1\.0 GiB of memory are free, and a job on this model takes 1\.5 at least: end other"
    ):
        jobs.run(one)

    assert copies() == []
    # What a device allocates is no memory of the machine's.
    jobs.set_limits_from(BASELINE, "cuda")
    jobs.run(three)
    jobs.close()
    jobs = Jobs(workspace, available=lambda: free[0])
    jobs.set_limits_from(BASELINE, "cpu")
    free[0] = 2 * 2**30
    jobs.run(one)
    # What the worker holds is the run's own, and free for the next job.
    free[0] = int(1.5 * 2**30) - 2**20
    jobs.run(two)
    # A process of its own has no use for that, so that the worker makes way, which frees nothing here.
    with pytest.raises(RunError, match=r"1\.5 GiB of memory are free"):
        jobs.run(evaluation(model, split="one.parquet").model_copy(update={"isolated": True}))
    assert copies() == []
    jobs.close()


def test_a_folder_in_the_place_of_the_log_is_a_line(tmp_path: Path):
    workspace = Workspace(tmp_path / "run")
    (workspace.root / "worker.log").mkdir(parents=True)
    survey = SurveyShapeTask(model="nowhere")
    with pytest.raises(RunError, match=r"worker\.log' can't be written .*move it away"):
        Jobs(workspace).run(survey)


def test_a_key_covers_every_input(baseline: tuple[Workspace, ArtifactRef]):
    model = baseline[1]
    keys = {
        job_key(evaluation(changed, batch_size=batch_size))
        for changed in (model, model.model_copy(update={"sha256": "other"}))
        for batch_size in (1, 4)
    }

    assert len(keys) == 4


def test_a_worker_that_dies_leaves_what_it_was_a_copy_of(jobs: Jobs, baseline: tuple[Workspace, ArtifactRef]):
    model = baseline[1]

    jobs.run(evaluation(model, batch_size=5))
    (before,) = jobs.here._copied.values()
    for child in copies():
        child.kill()
    jobs.run(evaluation(model, batch_size=6))

    assert before is not None
    assert before.is_alive
    assert list(jobs.here._copied.values()) == [before]


@pytest.mark.slow
def test_where_a_library_takes_the_server_down_processes_are_started_anew(
    baseline: tuple[Workspace, ArtifactRef], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    # In the server alone, which imports what it is given by name first.
    (tmp_path / "sitecustomize.py").write_text(
        "import os, signal, sys\nif 'profiling_agent.processes' in sys.orig_argv: os.kill(os.getpid(), signal.SIGILL)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    workspace, model = baseline
    broken = Jobs(workspace)
    split = evaluation(model).split.model_copy(update={"name": "calibration"})

    assert broken.run(prepared(split, workspace.path(model))[0]).shape[0] == NUM_IMAGES
    assert copies() == []
    broken.close()


@pytest.mark.slow
@pytest.mark.parametrize("anew", [False, True])
def test_children_die_with_a_parent_that_is_killed(tmp_path: Path, anew: bool):
    code = (
        "import sys, time\n"
        "from pathlib import Path\n"
        "from profiling_agent.jobs.runner import Jobs\n"
        "from profiling_agent.workspace import Workspace\n"
        "jobs = Jobs(Workspace(Path(sys.argv[1])))\n"
        f"child = jobs.here._start({{}}, anew={anew})\n"
        "while child.pid is None:\n"
        "    time.sleep(0.1)\n"
        "print(child.pid, flush=True)\n"
        "time.sleep(60)"
    )
    parent = subprocess.Popen([sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = psutil.Process(int(parent.stdout.readline()))

    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()

    psutil.wait_procs([child], timeout=20)
    assert not child.is_running()
