"""Real workers: processes that load a saved model, run when they are asked, and leave nothing behind."""

import math
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
import zoo
from transformers import ViTForImageClassification

from profiling_agent.errors import JobError
from profiling_agent.lib.io import file_sha256
from profiling_agent.measure.race import Track, hold_one, pool
from profiling_agent.measure.session import SessionLimits, TimedProcess, worker_command
from profiling_agent.measure.worker import Start
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.runtimes.artifact import model_bytes
from profiling_agent.runtimes.torch_artifact import save_model
from profiling_agent.schemas import ArtifactRef, QuantizationRecommendation, Variant

START = Start(batch_size=2, device="cpu", num_threads=1)
BROOD = """
import sys, time
from pathlib import Path
from profiling_agent.measure.session import TimedProcess, worker_command
from profiling_agent.measure.worker import SampleRequest, Start
child = TimedProcess(worker_command(Path(sys.argv[1])), Start(batch_size=2, device="cpu", num_threads=1))
child.wait_until_ready()
child._child.send(SampleRequest(runs=10**9))
print(child.pid, flush=True)
time.sleep(600)
"""

# What a model's pass says that it holds of a device, each time that it is asked.
HOLDING = """
from profiling_agent.measure.worker import serve
class Pass:
    held = 0
    def __call__(self):
        self.held += 100
        return 1.0
    def peak_bytes(self):
        return self.held
serve(lambda start: Pass())
"""


def ref(folder: Path) -> ArtifactRef:
    sha256 = file_sha256(folder / "recipe.json")
    return ArtifactRef(path=folder.name, sha256=sha256, size_bytes=model_bytes(folder), kind="model")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    quantized = quantize_model(zoo.vit(), [QuantizationRecommendation(layer="all", dtype="qint8")]).model
    for name, model in {"baseline": zoo.vit(), "quantized": quantized}.items():
        save_model(model, root / name, spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    return root


BRIEF = SessionLimits(seconds_per_turn=0.01, seconds_per_model=0)


@pytest.mark.slow
def test_sessions_that_are_held_one_by_one_are_pooled(root: Path):
    config = zoo.vit().config
    config.num_hidden_layers, config.intermediate_size = 12, 1024
    large = zoo.randomised(ViTForImageClassification(config))
    save_model(large, root / "large", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    entries = [(Variant.BASELINE, ref(root / "baseline")), (Variant.PRUNED, ref(root / "large"))]
    track = Track(root=root, batch_size=8, num_threads=1)
    sessions = [hold_one(entries, track, number, limits=BRIEF) for number in range(2)]
    result = pool(sessions, ["one died"])
    slower = result.results[1]
    assert (result.num_sessions, result.void) == (2, ("one died",))
    assert slower.turns == sessions[0].results[1].turns + sessions[1].results[1].turns
    assert slower.speedup == pytest.approx(math.sqrt(math.prod(slower.by_session)), rel=0.01)
    assert slower.speedup < 0.5
    assert all(len(one.peak_bytes) == 2 and min(one.peak_bytes) > 10**7 for one in result.results)


def test_a_worker_that_can_not_load_says_why(root: Path, tmp_path: Path):
    with (
        TimedProcess(worker_command(tmp_path / "nowhere"), START) as process,
        pytest.raises(JobError, match=r"nowhere.*there is no such folder"),
    ):
        process.wait_until_ready()


def test_a_worker_that_hangs_is_ended():
    command = [sys.executable, "-c", "import time; time.sleep(600)"]
    before = {child.pid for child in psutil.Process().children()}

    with TimedProcess(command, START) as process, pytest.raises(JobError, match=r"said nothing for 0\.2 s"):
        process.wait_until_ready(timeout_s=0.2)

    assert {child.pid for child in psutil.Process().children()} <= before


def test_a_worker_that_is_killed_between_samples_is_noticed(root: Path):
    with TimedProcess(worker_command(root / "baseline"), START) as process:
        process.wait_until_ready()
        os.kill(process.pid, signal.SIGKILL)

        with pytest.raises(JobError, match="exit status -9"):
            process.take_sample(10**9)


def test_a_worker_in_the_middle_of_a_sample_dies_with_its_parent(root: Path):
    parent = subprocess.Popen([sys.executable, "-c", BROOD, str(root / "baseline")], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    with parent, parent.stdout:
        worker = psutil.Process(int(parent.stdout.readline()))
        os.kill(parent.pid, signal.SIGKILL)

    deadline = time.monotonic() + 30
    while worker.is_running() and worker.status() != psutil.STATUS_ZOMBIE and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE


def test_what_a_model_holds_of_a_device_is_known_once_it_was_timed():
    with TimedProcess([sys.executable, "-c", HOLDING], START) as process:
        process.wait_until_ready()
        before = process.peak_bytes()
        process.take_sample(2)

        assert process.device_bytes == process.peak_bytes() == 300
        # Until then it is what the process holds resident.
        assert before is not None
        assert before > 10**6
