"""The machine: memory, fingerprint, quiet libraries and third-party code."""

import errno
import importlib
import json
import logging
import os
import subprocess
import sys
import threading
import warnings
from concurrent.futures import ThreadPoolExecutor
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType

import psutil
import pytest
import torch
import zoo
from torch import nn

from profiling_agent.data.models import verify
from profiling_agent.errors import PruningError, QuantizationError, ShapeUnresolvedError
from profiling_agent.jobs.runner import job_key
from profiling_agent.jobs.tasks import HeadlineTask
from profiling_agent.lib.logs import TELEMETRY, checked_logits, hide_telemetry, muted, third_party_errors
from profiling_agent.lib.machine import (
    LIBRARIES,
    available_bytes,
    available_cores,
    available_threads,
    cpu_quota,
    environment,
    quota_threads,
    total_bytes,
)
from profiling_agent.pruning.units import find_units
from profiling_agent.quantization.quantize import run
from profiling_agent.schemas import ArtifactRef, Environment, Gpu

GIB = 2**30


def held(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Return a folder of control groups that holds these files, and the file that says which is ours: /app/one."""
    (own := folder / "own").write_text("1:name=systemd:/other\n0::/app/one\n")
    for name, text in files.items():
        (path := folder / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder / "groups", own


def memory(group: str, limit: str, used: int, files: int = 0) -> dict[str, str]:
    dropped = f"inactive_file {files // 2}\nactive_file {files - files // 2}"
    stat = f"anon {used - files}\n{dropped}"
    return {f"{group}/memory.max": limit, f"{group}/memory.current": str(used), f"{group}/memory.stat": stat}


@pytest.mark.parametrize(
    ("files", "total", "available"),
    [
        # What is used counts, and files that can be dropped don't.
        (memory("app/one", str(GIB), GIB // 2, files=GIB // 4), GIB, GIB // 2 + GIB // 4),
        # The narrowest limit on the way up counts, and more may be used above than is allowed.
        (
            memory("app/one", "max", 1000) | memory("app", str(GIB // 8), 1000) | memory(".", str(GIB // 4), GIB),
            GIB // 8,
            0,
        ),
    ],
)
def test_a_limit_of_a_container_counts(tmp_path: Path, files: dict[str, str], total: int, available: int):
    groups, own = held(tmp_path, files)

    assert (total_bytes(groups, own), available_bytes(groups, own)) == (total, available)


@pytest.mark.parametrize("limit", ["max", None])
def test_without_a_limit_the_machine_counts(tmp_path: Path, limit: str | None):
    groups, own = held(tmp_path, memory("app/one", limit, 1000) if limit is not None else {})

    assert total_bytes(groups, own) == psutil.virtual_memory().total
    assert 0 < available_bytes(groups, own) <= psutil.virtual_memory().total


ALLOWED = sorted(os.sched_getaffinity(0))
ASK = """
import json
from profiling_agent.jobs.runner import job_key
from profiling_agent.jobs.tasks import SurveyShapeTask
from profiling_agent.lib.machine import environment
print(json.dumps([environment().libraries, job_key(SurveyShapeTask(model="nowhere"))]))
"""


def described(folder: Path, cores: dict[int, tuple[int, int]]) -> Path:
    """Return a folder as the kernel's, with the processor and the core that each logical one is part of."""
    for cpu, (package, core) in cores.items():
        (topology := folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    return folder


def test_second_threads_of_a_core_are_none_of_ours(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    # Ray sets it for each of its tasks, which changes nothing.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    both = described(tmp_path / "one", dict.fromkeys(ALLOWED, (0, 3)))
    # The same number on another processor is another core; what this process may not use counts for nothing.
    apart = described(tmp_path / "each", {cpu: (cpu, 0) for cpu in ALLOWED} | {max(ALLOWED) + 1: (99, 0)})

    assert available_cores(both) == available_threads(both, tmp_path) == 1
    # Where the system doesn't describe them, each is a core.
    for cpus in (apart, tmp_path):
        assert available_cores(cpus) == available_threads(cpus, tmp_path) == len(ALLOWED)


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"app/one/cpu.max": "800000 100000"}, 8),
        ({"app/one/cpu.max": "max 100000", "app/cpu.max": "400000 100000", "cpu.max": "800000 100000"}, 4),
        # In a container the own group is the root, whatever it is called outside.
        ({"cpu.max": "200000 100000"}, 2),
        ({"app/one/cpu.max": "max 100000"}, None),
        ({}, None),
    ],
)
def test_the_narrowest_quota_on_the_way_up_counts(tmp_path: Path, files: dict[str, str], quota: float | None):
    assert cpu_quota(*held(tmp_path, files)) == quota


@pytest.mark.parametrize(("quota", "most"), [("50000", 1), ("150000", 2), ("max", 10**6)])
def test_no_more_threads_than_a_quota_has_time_for_and_no_more_than_there_are_cores(
    tmp_path: Path, quota: str, most: int
):
    groups, own = held(tmp_path, {"app/one/cpu.max": f"{quota} 100000"})

    threads = available_threads(tmp_path, groups, own)
    assert threads == min(most, len(ALLOWED))
    # A library that is told nothing takes as many as there are cores.
    assert quota_threads(tmp_path, groups, own) == (threads if most < len(ALLOWED) else None)
    assert available_cores(tmp_path) == len(ALLOWED)


def found(folder: Path, **versions: str) -> tuple[dict[str, str], str]:
    """Return the libraries, and the key of a job that has no part in any runtime, where packages of these versions are installed besides."""
    for name, version in versions.items():
        (package := folder / f"{name}-{version}.dist-info").mkdir(parents=True)
        (package / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    told = os.environ | {"PYTHONPATH": str(folder)}
    ended = subprocess.run([sys.executable, "-c", ASK], env=told, capture_output=True, text=True, check=True)
    libraries, key = json.loads(ended.stdout)
    return libraries, key


def test_another_timm_or_torchvision_is_another_installation_whose_jobs_are_done_again(tmp_path: Path):
    versions = {"first": ("1.0", "0.1"), "timm": ("2.0", "0.1"), "torchvision": ("1.0", "0.2")}

    told = {name: found(tmp_path / name, timm=timm, torchvision=vision) for name, (timm, vision) in versions.items()}

    assert {name: (one["timm"], one["torchvision"]) for name, (one, _) in told.items()} == versions
    assert len({key for _, key in told.values()}) == 3


@pytest.mark.skipif(find_spec("timm") is not None, reason="timm is installed")
def test_without_timm_neither_has_a_part_in_anything(tmp_path: Path):
    alone, beside = found(tmp_path / "none"), found(tmp_path / "torchvision", torchvision="0.1")

    assert alone == beside
    assert set(alone[0]) == set(LIBRARIES)


A100 = Gpu(
    name="NVIDIA A100-SXM4-80GB",
    compute_capability="8.0",
    memory_bytes=80 * 2**30,
    driver="580.1",
    cuda="13.0",
    cudnn="9.15",
)


def test_a_gpu_is_part_of_the_machine_s_name_and_its_driver_of_the_versions():
    here = environment()
    there = here.model_copy(update={"device": "cuda", "gpu": A100})

    assert there.machine == f"NVIDIA A100-SXM4-80GB (compute capability 8.0, 80 GiB), {here.machine}"
    assert there.versions == here.versions | {"NVIDIA driver": "580.1", "CUDA": "13.0", "cuDNN": "9.15"}
    assert Environment.model_validate_json(there.model_dump_json()) == there


def test_keys_of_jobs_differ_by_gpu_where_the_job_uses_one():
    model = ArtifactRef(path="model", sha256="0" * 64, size_bytes=1, kind="model")
    here, there = environment("cuda"), environment("cuda").model_copy(update={"gpu": A100})

    def key(device: str, gpu: Environment) -> str:
        return job_key(
            HeadlineTask(model=model, batch_size=1, device=device), lambda name: gpu if name != "cpu" else environment()
        )

    assert key("cuda", here) != key("cuda", there)
    assert key("cpu", here) == key("cpu", there)
    assert key("cuda", here) == job_key(HeadlineTask(model=model, batch_size=1, device="cuda"))


NAMES = ("profiling_agent_test.one", "profiling_agent_test.two")


def test_what_is_printed_logged_and_warned_of_is_as_it_was_after_two_threads_have_muted_it(
    monkeypatch: pytest.MonkeyPatch,
):
    for name in ("stdout", "stderr"):
        # Put back by pytest, so that no other test is mute if this one fails.
        monkeypatch.setattr(sys, name, getattr(sys, name))
    streams, filters = (sys.stdout, sys.stderr), list(warnings.filters)
    loggers = [logging.getLogger(name) for name in NAMES]
    for logger, level in zip(loggers, (logging.INFO, logging.NOTSET), strict=True):
        logger.setLevel(level)
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()

    def first() -> None:
        with muted(*NAMES):
            first_in.set()
            # How long the second thread has to come in, unless it is made to wait.
            second_in.wait(0.2)
        first_out.set()

    def second() -> None:
        first_in.wait(30)
        with muted(*NAMES):
            second_in.set()
            first_out.wait(30)

    with ThreadPoolExecutor(2) as pool:
        for done in [pool.submit(first), pool.submit(second)]:
            done.result()

    assert (sys.stdout, sys.stderr) == streams
    assert list(warnings.filters) == filters
    assert [logger.level for logger in loggers] == [logging.INFO, logging.NOTSET]


def test_the_package_that_reports_is_hidden(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(sys.modules, TELEMETRY, ModuleType(TELEMETRY))

    hide_telemetry()

    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(TELEMETRY)


class Strange(nn.Module):
    """A model whose forward pass is a function of its layer and the images."""

    def __init__(self, inside, forward):
        super().__init__()
        self.inside, self.does = inside, forward

    def forward(self, pixel_values):
        return self.does(self.inside, pixel_values)


def raising(error):
    def forward(_inside, _x):
        raise error

    return Strange(nn.Linear(8, 3), forward)


RAISED = [KeyError("no such\nkey"), ZeroDivisionError("by zero"), StopIteration(), OSError(2, "gone")]


@pytest.mark.parametrize("error", RAISED, ids=lambda error: type(error).__name__)
def test_what_a_forward_pass_raises_is_a_refusal_that_names_it(error):
    name, model = type(error).__name__, raising(error)

    with pytest.raises(QuantizationError, match=name) as refused:
        run(model, torch.zeros(1, 3, 32, 32))
    reason = find_units(model, zoo.SPEC, {}).refusals["inside"]

    assert refused.value.__cause__ is error
    assert reason.startswith(f"untraceable: {name} (")
    assert "\n" not in str(refused.value) + reason


FAILING = {
    "a torch module": lambda inside, x: inside(x),
    "a kernel": lambda inside, x: x @ torch.zeros(5, 5, device=x.device),
    "the standard library": lambda inside, x: next(iter(())),
    "no logits": lambda inside, x: x,
}


@pytest.mark.parametrize("forward", FAILING.values(), ids=FAILING)
def test_a_forward_pass_that_fails_in_a_library_is_untraceable(forward):
    reason = find_units(Strange(nn.Linear(8, 3), forward), zoo.SPEC, {}).refusals["inside"]

    assert reason.startswith("untraceable: ")


def test_errors_raised_on_purpose_go_through():
    with pytest.raises(QuantizationError, match="as it is"), third_party_errors(PruningError):
        raise QuantizationError("as it is")


@pytest.mark.parametrize(
    "error", [MemoryError(), torch.OutOfMemoryError("CUDA out of memory"), OSError(errno.ENOSPC, "No space left")]
)
def test_a_lack_of_memory_or_disk_is_no_refusal(error: Exception):
    with pytest.raises(type(error)) as raised:
        checked_logits(raising(error), torch.zeros(1), PruningError)

    assert raised.value is error


def test_the_reason_why_a_module_was_not_imported_is_named():
    wanted = ModuleNotFoundError("Could not import module 'Net'")
    wanted.__cause__ = RuntimeError("operator torchvision::nms does not exist")

    with pytest.raises(ShapeUnresolvedError, match=r"RuntimeError \('operator torchvision::nms does not exist'\)"):
        verify(raising(wanted), zoo.SPEC)
