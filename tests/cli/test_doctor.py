"""`doctor` on this machine, with what may be wrong on another."""

import json
import os
import subprocess
import sys
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from chat_server import Said, chat_server, error, in_turn
from commands import call
from conftest import World
from crashing_library import break_library

from profiling_agent.cli.doctor import Finding, check_cpu, check_device, examine
from profiling_agent.jobs.runner import scratch_jobs
from profiling_agent.lib.machine import environment
from profiling_agent.request import Request
from profiling_agent.schemas import RUNTIMES

QUICK = ("software", "CPU", "memory", "disk", "noise", "language model")


def looked(tmp_path: Path, **asked: Any) -> dict[str, Finding]:
    """Return what needs no process of its own, by name."""
    request = Request.model_validate({"output": str(tmp_path / "runs")} | asked)
    return {finding.name: finding for finding in islice(examine(request), len(QUICK))}


def test_what_is_quick_to_find_comes_first_and_a_machine_that_is_fit_has_no_problem(tmp_path: Path):
    found = looked(tmp_path)

    assert tuple(found) == QUICK
    assert "torch" in found["software"].seen
    assert found["disk"].state == "ok"
    assert str(tmp_path) in found["disk"].seen
    assert found["language model"].seen == "the built-in rules plan: no language model was requested"
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize(
    ("cpu_flags", "state", "advice"),
    [
        (("avx2",), "note", "no int8 instructions (VNNI)"),
        (("avx2", "avx_vnni"), "ok", ""),
    ],
)
def test_a_processor_is_told_by_who_can_use_its_int8_instructions(cpu_flags: tuple[str, ...], state: str, advice: str):
    here = environment().model_copy(update={"cpu_flags": cpu_flags, "num_threads": 2})
    found = check_cpu(here)

    assert ", 2 threads, " in found.seen
    assert ", 2 threads (a quota of 1.5 CPUs), " in check_cpu(here, 1.5).seen
    assert found.state == state
    assert advice in found.advice
    assert ", ".join(cpu_flags) in found.seen


def test_an_output_folder_that_can_not_be_made_is_a_problem_with_advice(tmp_path: Path):
    (tmp_path / "file").write_text("in the way")

    for output in (tmp_path / "file" / "deep" / "runs", Path("/proc/runs")):
        disk = looked(tmp_path, output=str(output))["disk"]
        assert (disk.state, disk.advice) == ("problem", "choose another --output")


def test_a_language_model_is_asked_for_one_word(tmp_path: Path):
    with chat_server(in_turn(Said(content="ready"), error(404))) as server:
        there = looked(tmp_path, llm="openai:scripted", base_url=server.url)["language model"]
        lacked = looked(tmp_path, llm="openai:another", base_url=server.url)["language model"]

    assert (there.state, there.seen) == ("ok", "openai:scripted plans beside the built-in rules")
    assert lacked.state == "problem"
    assert "check the address, the model's name and the key" in lacked.seen
    assert "--llm none" in lacked.advice


NO_CUDA = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device")


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=[pytest.mark.gpu, NO_CUDA])])
def test_a_small_model_goes_through_profile_prune_and_evaluate_on_a_device(device: str):
    with scratch_jobs() as jobs:
        finding = check_device(jobs, device)

    assert finding.state == "ok"
    assert "4 units pruned" in finding.seen
    assert "after compensation" in finding.seen


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_without_a_cuda_device_auto_is_the_cpu():
    with scratch_jobs() as jobs:
        finding = check_device(jobs, "auto")

    assert (finding.state, finding.seen) == ("ok", "the CPU: there is no CUDA device")


@pytest.mark.slow
def test_a_library_built_for_another_torch_is_told_and_no_runtime_or_model_is_blamed(tmp_path: Path, world: World):
    (tmp_path / "site" / "torchvision").mkdir(parents=True)
    (tmp_path / "site" / "torchvision" / "__init__.py").write_text(
        '__version__ = "0.28.0"\nraise RuntimeError("operator torchvision::nms does not exist")\n'
    )
    information = tmp_path / "site" / "torchvision-0.28.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: torchvision\nVersion: 0.28.0\n")
    problem = "torchvision can't be imported, RuntimeError ('operator torchvision::nms does not exist')"
    command = "pip uninstall -y torchvision && pip install torchvision torch=="
    settings = {**os.environ, "PYTHONPATH": str(tmp_path / "site")}

    def end(*arguments: object) -> subprocess.CompletedProcess[str]:
        start = [sys.executable, "-c", "from profiling_agent.cli.main import main; main()"]
        line = [*start, *map(str, arguments), "--output", str(tmp_path / "runs")]
        return subprocess.run(line, env=settings, capture_output=True, text=True, check=False)

    doctor = end("doctor", "--json")
    assert doctor.returncode == 1
    *_, last = [Finding.model_validate(one) for one in json.loads(doctor.stdout)]
    assert (last.name, last.state, last.seen) == ("libraries", "problem", problem)
    assert last.advice.startswith(f"run: {command}")
    run = end("run", "--model", world.model, "--dataset", world.data)
    assert run.returncode == 2
    assert f"profiling-agent: {problem}; run: {command}" in run.stderr
    assert not (tmp_path / "runs").exists() or not list((tmp_path / "runs").iterdir())


@pytest.mark.slow
def test_a_runtime_or_device_that_was_asked_for_or_breaks_is_a_problem_and_a_missing_runtime_is_noted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    break_library("onnxruntime", tmp_path, monkeypatch)
    # What Python's import system takes for "not there".
    monkeypatch.setitem(sys.modules, "openvino", None)

    asked = ("--llm", "openai:x", "--base-url", "http://127.0.0.1:9/v1", "--device", "cuda")
    said = call("doctor", "--output", str(tmp_path / "runs"), *asked, "--json")

    assert said.exit_code == 1
    found = {one["name"]: Finding.model_validate(one) for one in json.loads(said.stdout)}
    assert tuple(found) == (*QUICK, *(name for name in RUNTIMES if name != "graphed"), "device")
    assert found["eager"].state == "ok"
    assert "runs a tiny model in" in found["eager"].seen
    assert found["openvino"].state == "note"
    assert "pip install profiling-agent[openvino]" in found["openvino"].advice
    assert found["onnxruntime"].state == found["language model"].state == "problem"
    assert "SIGILL" in found["onnxruntime"].seen
    if not torch.cuda.is_available():
        assert found["device"].state == "problem"
        assert "no CUDA device" in found["device"].seen
    assert all(one.advice for one in found.values() if one.state != "ok")
