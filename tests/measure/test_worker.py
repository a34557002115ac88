"""The timed worker, and the state of the GPU next to its measurements."""

import itertools
import json
import math
from pathlib import Path

import psutil
import pytest
import zoo
from in_process import saved

from profiling_agent.errors import JobError
from profiling_agent.measure.race import Conditions, pool, run_one_session
from profiling_agent.measure.session import (
    CONTEXT_BYTES,
    MAX_VOID_TURNS,
    SessionLimits,
    TimedProcess,
    run_session,
    worker_command,
)
from profiling_agent.measure.worker import MAX_SAMPLES, NO_NVML, GpuState, WorkerSetup, gpu_runs, take_turn, warm
from profiling_agent.schemas import Variant

START = WorkerSetup(batch_size=2, device="cpu", num_threads=1)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("run")
    saved(root, "baseline", zoo.vit())
    return root


BRIEF = SessionLimits(seconds_per_turn=0.01, seconds_per_model=0)


@pytest.mark.slow
def test_sessions_that_run_one_by_one_are_pooled(tmp_path: Path):
    large = zoo.vit(num_hidden_layers=12, intermediate_size=1024)
    refs = [saved(tmp_path, name, model) for name, model in (("baseline", zoo.vit()), ("large", large))]
    entries = list(zip((Variant.BASELINE, Variant.PRUNED), refs, strict=True))
    track = Conditions(root=tmp_path, batch_size=8, num_threads=1)
    sessions = [run_one_session(entries, track, number, limits=BRIEF) for number in range(2)]
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
    with (
        TimedProcess(["timed_toys:serve_never"], START) as process,
        pytest.raises(JobError, match=r"said nothing for 0\.2 s"),
    ):
        process.wait_until_ready(timeout_s=0.2)

    assert not psutil.pid_exists(process.pid)


def test_what_a_model_holds_of_a_device_is_known_once_it_was_timed():
    with TimedProcess(["timed_toys:serve_holding"], START) as process:
        process.wait_until_ready()
        before = process.peak_bytes()
        process.take_sample(2)

        assert process.device_bytes == process.peak_bytes() == 300
        # Until then it is what the process holds resident.
        assert before is not None
        assert before > 10**6


THERMAL, POWER_CAP = {"reasons": 0x20 | 0x01}, {"reasons": 0x04}


def scripted(*states: object) -> TimedProcess:
    command = ["timed_toys:serve_states", json.dumps(states)]
    return TimedProcess(command, WorkerSetup(batch_size=1, device="cuda"), cool_s=0.0)


def test_a_turn_under_a_thermal_slowdown_is_measured_again():
    with scripted(POWER_CAP, THERMAL, THERMAL, POWER_CAP) as process:
        process.wait_until_ready()
        # A power cap is the ordinary state of a GPU at work.
        assert process.take_sample(2) == [1.0, 1.0]
        assert not process.notes
        assert process.take_sample(2) == [4.0, 4.0]
        assert list(process.notes) == [
            "turns under a slowdown of the GPU were measured again: software thermal slowdown"
        ]


def test_a_gpu_that_never_cools_down_is_noted_and_measured_all_the_same():
    with scripted(*[THERMAL] * (MAX_VOID_TURNS + 1)) as process:
        process.wait_until_ready()
        assert process.take_sample(1) == [MAX_VOID_TURNS + 1.0]
        assert list(process.notes)[-1] == "the GPU was slowed down all the time: software thermal slowdown"


def test_without_nvml_there_is_a_note_and_with_neighbours_another():
    with scripted(None, {"neighbours": ["python (12)"]}) as process:
        process.wait_until_ready()
        process.take_sample(1)
        process.take_sample(1)
        assert list(process.notes) == [NO_NVML, "other programs used the GPU: python (12)"]
    # Notes of all processes are those of the session.
    with scripted(*[None] * 9) as first, scripted(*[None] * 9) as second:
        assert run_session({0: first, 1: second}, limits=SessionLimits(seconds_per_model=0)).notes == (NO_NVML,)


def test_reasons_are_bits_and_only_slowdowns_void():
    names = ("hardware slowdown", "hardware thermal slowdown", "hardware power brake")
    assert GpuState(reasons=0xC8).slowdowns == names
    assert GpuState(reasons=0x105).slowdowns == ()


def test_a_turn_takes_50_ms_and_20_passes_and_no_more_than_a_second():
    assert [gpu_runs(pass_ms) for pass_ms in (0.5, 10.0, 100.0, 3000.0)] == [100, 20, 10, 1]
    assert gpu_runs(0.0) > 1000
    limits = SessionLimits(memory_bytes=10 * CONTEXT_BYTES)
    assert (limits.runs_of_turn(0.5), limits.on("cuda").runs_of_turn(0.5)) == (10, 100)
    assert limits.on("cpu") is limits


def test_long_turns_keep_medians_of_consecutive_passes():
    times = itertools.count(1)
    # 100 passes in 20 parts of five: their medians are 3, 8, 13 and so on.
    assert take_turn(lambda: float(next(times)), 100) == [3.0 + 5 * part for part in range(MAX_SAMPLES)]
    assert take_turn(lambda: 2.0, 3) == [2.0] * 3
    assert warm(lambda: 30.0, 100.0) == 4
