"""How many threads a model's work is split into, and what is the same machine and installation."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from profiling_agent.jobs.runner import job_key
from profiling_agent.jobs.tasks import HeadlineTask
from profiling_agent.lib.machine import (
    LIBRARIES,
    available_cores,
    available_threads,
    cpu_quota,
    environment,
    quota_threads,
)
from profiling_agent.schemas import ArtifactRef, Environment, Gpu

ALLOWED = sorted(os.sched_getaffinity(0))
ASK = """
import json
from profiling_agent.jobs.runner import job_key
from profiling_agent.jobs.tasks import SurveyShapeTask
from profiling_agent.lib.machine import environment
assert not SurveyShapeTask.uses_runtimes
print(json.dumps([environment().libraries, job_key(SurveyShapeTask(model="nowhere"))]))
"""


def described(folder: Path, cores: dict[int, tuple[int, int]]) -> Path:
    """Return a folder as the kernel's, with the processor and the core that each logical one is part of."""
    for cpu, (package, core) in cores.items():
        (topology := folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    return folder


def test_second_threads_of_a_core_are_none_of_ours(tmp_path: Path):
    both = described(tmp_path / "one", dict.fromkeys(ALLOWED, (0, 3)))
    # The same number on another processor is another core; what this process may not use counts for nothing.
    apart = described(tmp_path / "each", {cpu: (cpu, 0) for cpu in ALLOWED} | {max(ALLOWED) + 1: (99, 0)})

    assert available_cores(both) == available_threads(both, tmp_path) == 1
    assert available_cores(apart) == available_threads(apart, tmp_path) == len(ALLOWED)


def test_where_the_system_does_not_tell_each_is_a_core(tmp_path: Path):
    assert available_threads(tmp_path, tmp_path) == len(ALLOWED)


def test_what_ray_sets_for_each_of_its_tasks_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    assert available_threads(tmp_path, tmp_path) == len(ALLOWED)


def held(folder: Path, files: dict[str, str]) -> tuple[Path, Path]:
    """Return a folder of control groups that holds these files, and the file that says which is ours: /app/one."""
    (own := folder / "own").write_text("1:name=systemd:/other\n0::/app/one\n")
    for name, text in files.items():
        (path := folder / "groups" / name).parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return folder / "groups", own


@pytest.mark.parametrize(
    ("files", "quota"),
    [
        ({"app/one/cpu.max": "800000 100000"}, 8),
        ({"app/one/cpu.max": "75000 50000"}, 1.5),
        ({"app/one/cpu.max": "max 100000", "app/cpu.max": "400000 100000", "cpu.max": "800000 100000"}, 4),
        # In a container the own group is the root, whatever it is called outside.
        ({"cpu.max": "200000 100000"}, 2),
        # Somebody else's.
        ({"app/other/cpu.max": "100000 100000"}, None),
        ({"app/one/cpu.max": "max 100000"}, None),
        ({"app/one/cpu.max": ""}, None),
        ({}, None),
    ],
)
def test_the_narrowest_quota_on_the_way_up_counts(tmp_path: Path, files: dict[str, str], quota: float | None):
    assert cpu_quota(*held(tmp_path, files)) == quota


@pytest.mark.parametrize(
    ("quota", "most"), [("1000", 1), ("50000", 1), ("100000", 1), ("150000", 2), ("100000000", 1000), ("max", 10**6)]
)
def test_no_more_threads_than_a_quota_has_time_for_and_no_more_than_there_are_cores(
    tmp_path: Path, quota: str, most: int
):
    groups, own = held(tmp_path, {"app/one/cpu.max": f"{quota} 100000"})

    threads = available_threads(tmp_path, groups, own)
    assert threads == min(most, len(ALLOWED))
    # A library that is told nothing takes as many as there are cores.
    assert quota_threads(tmp_path, groups, own) == (threads if most < len(ALLOWED) else None)
    assert available_cores(tmp_path) == len(ALLOWED)


def test_a_machine_has_whole_gigabytes_whatever_its_kernel_keeps():
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    assert environment().memory_bytes % 2**30 == 0
    assert 0 <= environment().memory_bytes - physical < 2**30


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


def test_an_environment_written_before_there_were_gpus_opens():
    old = environment().model_dump(mode="json", exclude={"gpu"})

    assert Environment.model_validate(old).gpu is None


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
