"""Jobs go to a bucket and come back whole: a real server that speaks S3, on this machine."""

import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import fsspec
import pytest
from cluster.test_ray_engine import jobs_on
from ray_cluster import ray_cluster
from toy_job import CopyTask, NoteTask

from profiling_agent.cluster.archive import Archive
from profiling_agent.errors import RunError
from profiling_agent.jobs.store import RESULT, holds, write_hashes

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(
        not (find_spec("s3fs") and find_spec("moto") and find_spec("flask_cors")),
        reason="there is no S3 server: pip install s3fs 'moto[s3]' flask flask-cors",
    ),
]
SERVE = """
import sys
from werkzeug.serving import make_server
from moto.server import DomainDispatcherApplication, create_backend_app
server = make_server("127.0.0.1", 0, DomainDispatcherApplication(create_backend_app), threaded=True)
print(server.server_port, flush=True)
server.serve_forever()
"""


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    """Serve an empty bucket; its keys are the environment's, as those of a machine are."""
    command = [sys.executable, "-W", "ignore", "-c", SERVE]
    with (
        pytest.MonkeyPatch.context() as patch,
        subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process,
    ):
        assert process.stdout is not None
        endpoint = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        for name, value in {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "me",
            "AWS_SECRET_ACCESS_KEY": "secret",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            patch.setenv(name, value)
        urllib.request.urlopen(urllib.request.Request(f"{endpoint}/jobs", method="PUT"), timeout=10).close()
        yield "s3://jobs/team"
        process.kill()


def made(jobs: Path, key: str) -> Path:
    folder = jobs / key
    (folder / "model").mkdir(parents=True)
    (folder / RESULT).write_text("{}")
    (folder / "model" / "weights").write_bytes(os.urandom(300_000))
    write_hashes(folder)
    return folder


def test_a_job_goes_to_a_bucket_and_comes_back_as_it_was(bucket: str, tmp_path: Path):
    folder = made(tmp_path / "here", "prune-1")

    Archive(bucket, "run-1").put(tmp_path / "here", "prune-1")
    Archive(bucket, "run-1").get(tmp_path / "there", "prune-1")

    assert holds(tmp_path / "there" / "prune-1")
    weights = tmp_path / "there" / "prune-1" / "model" / "weights"
    assert weights.read_bytes() == (folder / "model" / "weights").read_bytes()


def test_a_job_that_is_not_in_the_bucket_or_was_changed_there_is_refused(bucket: str, tmp_path: Path):
    made(tmp_path / "here", "prune-1")
    archive = Archive(bucket, "run-2")
    with pytest.raises(RunError):
        archive.get(tmp_path / "there", "prune-1")
    archive.put(tmp_path / "here", "prune-1")
    there = fsspec.filesystem("s3")
    (weights,) = there.glob("jobs/team/run-2/**/weights")
    there.pipe_file(weights, b"another")

    with pytest.raises(RunError, match="prune-1"):
        archive.get(tmp_path / "there", "prune-1")

    assert not (tmp_path / "there" / "prune-1").exists()


@pytest.mark.skipif(find_spec("ray") is None, reason="the extra ray isn't installed")
@pytest.mark.usefixtures("token")
def test_machines_hand_each_other_jobs_through_a_bucket(bucket: str, slot: dict[str, float], tmp_path: Path):
    # Begun after the bucket, so that its machines know the keys.
    with (
        ray_cluster(slot, 2, tmp_path / "log", tmp_path / "caches") as cluster,
        jobs_on(cluster.address, tmp_path / "run", bucket) as jobs,
    ):
        note = jobs.run(NoteTask(text="twelve"))
        copied = jobs.run(CopyTask(source=note.file, times=2))
        read = jobs.path(copied.file).read_text()

    assert read == "twelvetwelve"
    assert fsspec.filesystem("s3").glob("jobs/team/run-*/jobs/copy*/result.json")
