import subprocess
import sys

import zoo

from profiling_agent.measure.throughput import MAX_RUNS, measure_headline
from profiling_agent.runtimes.torch_session import TorchSession


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


class OnADevice:
    """A session that runs on a device of its own."""

    fixed_size: int | None = None

    def run(self, pixel_values):
        return pixel_values

    def bound(self, pixel_values):
        return lambda: 2000.0

    def peak_bytes(self):
        return 12345


def test_of_a_device_the_memory_is_the_devices():
    assert measure_headline(OnADevice(), zoo.SPEC, batch_size=2).peak_memory_bytes == 12345
    assert measure_headline(TorchSession(zoo.vit(), device="cpu"), zoo.SPEC, batch_size=2).peak_memory_bytes > 10**7
