"""Throughput, memory and the headline of models."""

import subprocess
import sys
from pathlib import Path

import in_process
import psutil
import pytest
import zoo

from profiling_agent.errors import JobError
from profiling_agent.measure.session import SessionLimits
from profiling_agent.measure.throughput import MAX_RUNS, measure_headline, memory_use, throughput
from profiling_agent.runtimes.registry import ModelSession
from profiling_agent.runtimes.torch_session import TorchSession
from profiling_agent.schemas import ArtifactRef

LIMITS = SessionLimits(seconds_per_turn=0.01, seconds_per_model=0)
NOWHERE = ArtifactRef(path="nowhere", sha256="0" * 64, size_bytes=1000, kind="model")


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("run")


@pytest.fixture(scope="module")
def saved(root: Path) -> ArtifactRef:
    return in_process.saved(root, "model", zoo.vit())


@pytest.mark.slow
def test_images_per_second_are_the_batch_over_the_median_pass(root: Path, saved: ArtifactRef):
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    rows, refused = throughput([NOWHERE, saved], root=root, batch_sizes=(1, 3), num_threads=1, limits=LIMITS)

    # A model that can't be run is refused, and the others are measured.
    assert list(refused) == [("nowhere", 1), ("nowhere", 3)]
    assert "there is no such folder" in refused["nowhere", 1]
    assert [(row.model, row.batch_size) for row in rows] == [(saved, 1), (saved, 3)]
    for row in rows:
        assert row.images_per_s == pytest.approx(row.batch_size * 1000 / row.latency.median_ms)
        assert 0 < row.low <= row.images_per_s <= row.high
        assert len(row.latency.samples_ms) >= LIMITS.min_repeats
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


@pytest.mark.slow
def test_memory_holds_the_interpreter_and_the_batch_but_not_the_machine(root: Path, saved: ArtifactRef):
    used = memory_use(saved, root=root, batch_size=2, num_threads=1)

    # A Python that has imported torch holds more than 50 MB; the model and its batch are a few hundred KB.
    assert 50e6 < used.peak_bytes < 2e9
    assert used.size_bytes == saved.size_bytes
    with pytest.raises(JobError, match=r"nowhere.*there is no such folder"):
        memory_use(NOWHERE, root=root, batch_size=2)


def test_a_fast_model_is_timed_as_often_as_helps_and_every_pass_is_counted():
    model, passes = zoo.vit(), []
    model.register_forward_hook(lambda *_: passes.append(1))

    headline = measure_headline(TorchSession(model, device="cpu"), zoo.SPEC, batch_size=2)

    assert headline.forward_passes == len(passes) == 2 + MAX_RUNS
    assert len(headline.latency.samples_ms) == MAX_RUNS
    assert headline.latency.batch_size == 2


# In a process of its own: what other tests leave behind, and free meanwhile, would hide the block.
PEAKS = """
from profiling_agent.lib.machine import peak_memory_bytes
before = peak_memory_bytes()
block = b"1" * int(256e6)
del block
print(peak_memory_bytes() - before)
"""


def test_the_peak_stays_when_the_memory_is_freed():
    child = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)

    assert 200e6 < int(child.stdout) < 300e6


class OnADevice(ModelSession):
    """A session that runs on a device of its own."""

    def run(self, pixel_values):
        return pixel_values

    def bound(self, pixel_values):
        return lambda: 2000.0

    def peak_bytes(self):
        return 12345


def test_of_a_device_the_memory_is_the_devices():
    assert measure_headline(OnADevice(), zoo.SPEC, batch_size=2).peak_memory_bytes == 12345
    assert measure_headline(TorchSession(zoo.vit(), device="cpu"), zoo.SPEC, batch_size=2).peak_memory_bytes > 10**7
