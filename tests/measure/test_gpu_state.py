"""Turns on a GPU: their length, samples, and those that are void as the GPU was slowed down. States come from a script."""

import itertools
import json
from pathlib import Path

import pytest

from profiling_agent.measure.session import CONTEXT_BYTES, MAX_VOID_TURNS, SessionLimits, TimedProcess, run_session
from profiling_agent.measure.worker import MAX_SAMPLES, NO_NVML, GpuState, Start, gpu_runs, take_turn, warm
from profiling_agent.processes.child import child_command

# Answers each sample with the next state of its arguments, and the number of the sample as its time.
SCRIPT = """
import json, sys
from profiling_agent.measure.worker import GpuState
from profiling_agent.measure.worker import Reply, SampleRequest, Start
from profiling_agent.processes.child import Parent
parent = Parent()
parent.receive(Start)
parent.send(Reply(kind="ready"))
states = json.loads(sys.argv[1])
for number, state in enumerate(states, start=1):
    runs = parent.receive(SampleRequest).runs
    found = None if state is None else GpuState.model_validate(state)
    parent.send(Reply(kind="times", samples_ms=(float(number),) * runs, device_bytes=7, gpu=found))
parent.receive(SampleRequest)
"""
THERMAL, POWER_CAP = {"reasons": 0x20 | 0x01}, {"reasons": 0x04}


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "scripted_gpu.py").write_text(SCRIPT)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))

    def start(*states: object) -> TimedProcess:
        command = child_command("scripted_gpu", json.dumps(states))
        return TimedProcess(command, Start(batch_size=1, device="cuda"), cool_s=0.0)

    return start


def test_a_turn_under_a_thermal_slowdown_is_measured_again(scripted):
    with scripted(POWER_CAP, THERMAL, THERMAL, POWER_CAP) as process:
        process.wait_until_ready()
        # A power cap is the ordinary state of a GPU at work.
        assert process.take_sample(2) == [1.0, 1.0]
        assert not process.notes
        assert process.take_sample(2) == [4.0, 4.0]
        assert list(process.notes) == [
            "turns under a slowdown of the GPU were measured again: software thermal slowdown"
        ]


def test_a_gpu_that_never_cools_down_is_noted_and_measured_all_the_same(scripted):
    with scripted(*[THERMAL] * (MAX_VOID_TURNS + 1)) as process:
        process.wait_until_ready()
        assert process.take_sample(1) == [MAX_VOID_TURNS + 1.0]
        assert list(process.notes)[-1] == "the GPU was slowed down all the time: software thermal slowdown"


def test_without_nvml_there_is_a_note_and_with_neighbours_another(scripted):
    with scripted(None, {"neighbours": ["python (12)"]}) as process:
        process.wait_until_ready()
        process.take_sample(1)
        process.take_sample(1)
        assert list(process.notes) == [NO_NVML, "other programs used the GPU: python (12)"]


def test_notes_of_all_processes_are_those_of_the_session(scripted):
    with scripted(*[None] * 9) as first, scripted(*[None] * 9) as second:
        limits = SessionLimits(seconds_per_model=0)
        assert run_session({0: first, 1: second}, limits=limits).notes == (NO_NVML,)


def test_reasons_are_bits_and_only_slowdowns_void():
    assert GpuState(reasons=0xC8).slowdowns == (
        "hardware slowdown",
        "hardware thermal slowdown",
        "hardware power brake",
    )
    assert GpuState(reasons=0x105).slowdowns == ()


def test_a_turn_takes_50_ms_and_20_passes_and_no_more_than_a_second():
    assert gpu_runs(0.5) == 100
    assert gpu_runs(10.0) == 20
    assert gpu_runs(100.0) == 10
    assert gpu_runs(3000.0) == 1
    assert gpu_runs(0.0) > 1000
    limits = SessionLimits(memory_bytes=10 * CONTEXT_BYTES)
    assert (limits.runs_of_turn(0.5), limits.on("cuda").runs_of_turn(0.5)) == (10, 100)
    assert limits.on("cpu") is limits


def test_long_turns_keep_medians_of_consecutive_passes():
    times = itertools.count(1)
    # 100 passes in 20 parts of five: their medians are 3, 8, 13 and so on.
    assert take_turn(lambda: float(next(times)), 100) == [3.0 + 5 * part for part in range(MAX_SAMPLES)]
    assert take_turn(lambda: 2.0, 3) == [2.0] * 3


def test_the_warm_up_takes_as_long_as_it_is_to():
    assert warm(lambda: 30.0, 100.0) == 4
