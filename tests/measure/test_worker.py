"""The timed worker, the headline of a model, and the state of the GPU next to its measurements."""

import itertools
import json

import psutil
import pytest
import zoo

from profiling_agent.errors import JobError
from profiling_agent.measure.worker import (
    MAX_RUNS,
    MAX_SAMPLES,
    MAX_VOID_TURNS,
    NO_NVML,
    TimedProcess,
    WorkerSetup,
    gpu_runs,
    measure_headline,
    take_turn,
    warm,
)
from profiling_agent.runtimes.registry import ModelSession
from profiling_agent.runtimes.torch_session import TorchSession

SETUP = WorkerSetup(batch_size=2, device="cpu")


def test_a_worker_that_hangs_is_ended():
    with (
        TimedProcess(["timed_toys:serve_never"], SETUP) as process,
        pytest.raises(JobError, match=r"said nothing for 0\.2 s"),
    ):
        process.wait_until_ready(timeout_s=0.2)

    assert not psutil.pid_exists(process.pid)


def test_the_peak_memory_on_a_device_is_known_once_a_model_was_timed():
    with TimedProcess(["timed_toys:serve_holding"], SETUP) as process:
        process.wait_until_ready()
        before = process.peak_bytes()
        process.take_sample(2)

        assert process.device_bytes == process.peak_bytes() == 300
        # Until then it is what the process holds resident.
        assert before is not None
        assert before > 10**6


THERMAL, POWER_CAP = 0x20 | 0x01, 0x04
AGAIN, ALWAYS = (
    f"{text}: software thermal slowdown"
    for text in ("turns under a slowdown of the GPU were measured again", "the GPU was slowed down all the time")
)


@pytest.mark.parametrize(
    ("states", "times", "notes"),
    [
        # A power cap is the ordinary state of a GPU at work; a turn under heat is measured again.
        ([POWER_CAP, THERMAL, THERMAL, POWER_CAP], [1.0, 4.0], [AGAIN]),
        # One that never cools down is measured all the same.
        ([THERMAL] * (MAX_VOID_TURNS + 1), [MAX_VOID_TURNS + 1.0], [AGAIN, ALWAYS]),
        ([None, 0], [1.0, 2.0], [NO_NVML]),
    ],
)
def test_disturbances_of_the_gpu_are_noted_and_slow_turns_repeated(
    states: list[int | None], times: list[float], notes: list[str]
):
    command, setup = ["timed_toys:serve_states", json.dumps(states)], WorkerSetup(batch_size=1, device="cuda")
    with TimedProcess(command, setup, cool_s=0.0) as process:
        process.wait_until_ready()
        assert [process.take_sample(2) for _ in times] == [[time] * 2 for time in times]
        assert list(process.notes) == notes


def test_a_turn_takes_50_ms_and_20_passes_and_no_more_than_a_second():
    assert [gpu_runs(pass_ms) for pass_ms in (0.5, 10.0, 100.0, 3000.0)] == [100, 20, 10, 1]
    assert gpu_runs(0.0) > 1000


def test_long_turns_keep_medians_of_consecutive_passes():
    times = itertools.count(1)
    # 100 passes in 20 parts of five: their medians are 3, 8, 13 and so on.
    assert take_turn(lambda: float(next(times)), 100) == [3.0 + 5 * part for part in range(MAX_SAMPLES)]
    assert take_turn(lambda: 2.0, 3) == [2.0] * 3
    assert warm(lambda: 30.0) == 4


def test_a_fast_model_is_timed_as_often_as_helps():
    model, passes = zoo.vit(), []
    model.register_forward_hook(lambda *_: passes.append(1))

    headline = measure_headline(TorchSession(model, device="cpu"), zoo.SPEC, batch_size=2)

    assert len(passes) == 2 + MAX_RUNS
    assert len(headline.latency.samples_ms) == MAX_RUNS
    assert headline.latency.batch_size == 2
    assert headline.peak_memory_bytes > 10**7


class OnADevice(ModelSession):
    """A session that runs on a device of its own."""

    def run(self, pixel_values):
        return pixel_values

    def bound(self, pixel_values):
        return lambda: 2000.0

    def peak_bytes(self):
        return 12345


def test_on_a_device_the_memory_is_the_devices():
    assert measure_headline(OnADevice(), zoo.SPEC, batch_size=2).peak_memory_bytes == 12345
