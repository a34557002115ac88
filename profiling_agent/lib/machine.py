"""Machine: memory, processor, GPU, busy threads, and the environment that measurements depend on.

Busy cores: next to one spinning process, on two cores, a batch of 32 small images took 839 ms instead of 20. Threads that sleep while they
wait take only twice as long there, but slightly longer on a quiet machine too, so nothing that is timed waits like that.
"""

import hashlib
import json
import math
import os
import platform
import resource
import runpy
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from profiling_agent.errors import JobError
from profiling_agent.lib.timm_config import PACKAGES as TIMM_PACKAGES
from profiling_agent.schemas import Environment, Gpu

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# The kernel's description of each logical processor.
CPU_FOLDER = Path("/sys/devices/system/cpu")
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
# Without one of these files there is no NVIDIA driver; the last is for Linux on Windows (WSL).
DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
PROBE_S = 120.0
# torch describes the GPU without NVML, but only in a process that then holds a context on it.
PROBE = """
import json, torch
if torch.cuda.is_available():
    found = torch.cuda.get_device_properties(0)
    print(json.dumps([found.name, f"{found.major}.{found.minor}", found.total_memory, None]))
"""
LIBRARIES = (
    "datasets",
    "google-re2",
    "langgraph",
    "numpy",
    "pillow",
    "ptflops",
    "pydantic",
    "safetensors",
    "scipy",
    "torch",
    "torch-pruning",
    "transformers",
)
# Optional libraries that a runtime's speed depends on.
RUNTIME_LIBRARIES = ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf", "torchao")
# What idle OpenMP threads do, torch's among them; if it is set, we set the same for ONNX Runtime.
WAIT_POLICY, PASSIVE = "OMP_WAIT_POLICY", "PASSIVE"
# Samples of the load and the pause between them: a process that wakes up now and then isn't in all of them.
NUM_SAMPLES, PAUSE_S = 3, 0.01


def _read(path: Path) -> str:
    """Return the text of a file of the kernel's, empty if there is none."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


def total_bytes(groups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the machine's memory in bytes, or the control groups' limit if that is lower."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _memory_limits(groups, own))])


def available_bytes(groups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return how many bytes are available without swapping, at least 0."""
    remaining = (limit - used for limit, used in _memory_limits(groups, own))
    return max(min([psutil.virtual_memory().available, *remaining]), 0)


def _memory_limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) in bytes of this process's control group and its parents; droppable file caches aren't used."""
    for group in _own_groups(groups, own):
        limit, used = _read(group / "memory.max"), _read(group / "memory.current")
        if limit.isdecimal() and used.isdecimal():
            rows = (line.split() for line in _read(group / "memory.stat").splitlines())
            files = sum(int(row[1]) for row in rows if row[0] in ("inactive_file", "active_file"))
            yield int(limit), max(int(used) - files, 0)


def _own_groups(groups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group, of version 2, and of its parents.

    A folder may be missing: in a container only the last one exists, which is its own group.
    """
    name = next((line.removeprefix("0::") for line in _read(own).splitlines() if line.startswith("0::")), "")
    folder = groups / name.strip("/")
    yield from (group for group in (folder, *folder.parents) if group.is_relative_to(groups))


def cpu_quota(groups: Path = CGROUPS, own: Path = OWN_CGROUP) -> float | None:
    """Return the CPU quota of this process's control group and its parents, in processors; None if unlimited."""
    rows = (_read(group / "cpu.max").split() for group in _own_groups(groups, own))
    # The quota and its period, or "max" and the period.
    return min((int(row[0]) / int(row[1]) for row in rows if row and row[0].isdecimal()), default=None)


def available_cores(cpus: Path = CPU_FOLDER) -> int:
    """Return how many physical cores this process may use, regardless of quotas."""

    def core(cpu: int) -> tuple[str, str]:
        topology = cpus / f"cpu{cpu}" / "topology"
        return _read(topology / "physical_package_id"), _read(topology / "core_id") or f"cpu {cpu}"

    return len({core(cpu) for cpu in os.sched_getaffinity(0)})


def available_threads(cpus: Path = CPU_FOLDER, groups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int:
    """Return the number of threads for a model's work: one per usable physical core, within a container's CPU quota.

    ONNX Runtime and torch (with MKL) use one a core by default: a second thread of a core shares its multipliers, and gains nothing. More
    threads than the quota's processors use it up early in each period, and then all of them stall. `OMP_NUM_THREADS` is ignored: Ray sets
    it, and a run that is resumed without it would count as another machine's.
    """
    cores, quota = available_cores(cpus), cpu_quota(groups, own)
    return cores if quota is None else min(cores, math.ceil(quota))


def quota_threads(cpus: Path = CPU_FOLDER, groups: Path = CGROUPS, own: Path = OWN_CGROUP) -> int | None:
    """Return how many threads a container's quota allows, if fewer than the cores that libraries count; else None."""
    threads = available_threads(cpus, groups, own)
    return threads if threads < available_cores(cpus) else None


@cache
def nvml() -> tuple[Any, Any] | None:
    """Return the NVML module and the handle of the first visible GPU; None without nvidia-ml-py or a driver."""
    if find_spec("pynvml") is None:
        return None
    module: Any = import_module("pynvml")
    try:
        module.nvmlInit()
        first = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0].strip()
        if first.startswith(("GPU-", "MIG-")):
            return module, module.nvmlDeviceGetHandleByUUID(first)
        return module, module.nvmlDeviceGetHandleByIndex(int(first))
    except (module.NVMLError, ValueError):
        return None


@cache
def find_gpu() -> Gpu | None:
    """Return the GPU that torch calls "cuda"; None if torch is built without CUDA or there is no driver."""
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec else None
    cuda = runpy.run_path(str(Path(folders[0]) / "version.py")).get("cuda") if folders else None
    has_driver = any(Path(driver).exists() for driver in DRIVER_FILES)
    properties = (_query_nvml() or _query_torch()) if cuda and has_driver else None
    if cuda is None or properties is None:
        return None
    name, capability, memory_bytes, driver = properties
    cudnn = f"nvidia-cudnn-cu{cuda.partition('.')[0]}"
    return Gpu(
        name=name,
        compute_capability=capability,
        # In whole GiB, since drivers reserve different shares of it.
        memory_bytes=-(-memory_bytes // 2**30) * 2**30,
        driver=driver,
        cuda=cuda,
        cudnn=_installed_versions([cudnn]).get(cudnn),
    )


def _query_nvml() -> tuple[str, str, int, str | None] | None:
    if (library := nvml()) is None:
        return None
    module, handle = library
    try:
        major, minor = module.nvmlDeviceGetCudaComputeCapability(handle)
        memory_bytes = int(module.nvmlDeviceGetMemoryInfo(handle).total)
        return module.nvmlDeviceGetName(handle), f"{major}.{minor}", memory_bytes, module.nvmlSystemGetDriverVersion()
    except module.NVMLError:
        return None


def _query_torch() -> tuple[str, str, int, str | None] | None:
    command = [sys.executable, "-P", "-c", PROBE]
    with suppress(OSError, subprocess.SubprocessError, ValueError):
        completed = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROBE_S)
        name, capability, memory_bytes, driver = json.loads(completed.stdout)
        return name, capability, memory_bytes, driver
    return None


def _read_cpuinfo(field: str) -> str:
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def cpu_vendor() -> str:
    """Return the processor's vendor ("GenuineIntel", "AuthenticAMD"), or an empty string if unknown."""
    return _read_cpuinfo("vendor_id")


@cache
def code_version() -> str:
    """Return a hash of the package's source, so that a changed stage never reuses an old job."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


@cache
def environment(device: str = "cpu") -> Environment:
    """Return the fingerprint of this machine and installation, for measurements on `device`."""
    flags = set(_read_cpuinfo("flags").split())
    timm = _installed_versions(TIMM_PACKAGES)
    return Environment(
        cpu=_read_cpuinfo("model name") or platform.processor() or platform.machine(),
        cpu_flags=tuple(flag for flag in CPU_FLAGS if flag in flags),
        num_threads=available_threads(),
        # In whole GiB: another kernel on the same machine reserves a few pages more or fewer.
        memory_bytes=math.ceil(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30) * 2**30,
        system=f"{platform.system()} {platform.machine()}",
        device=device,
        python=platform.python_version(),
        # Without timm, torchvision affects nothing.
        libraries={name: metadata.version(name) for name in LIBRARIES} | (timm if "timm" in timm else {}),
        runtimes=_installed_versions(RUNTIME_LIBRARIES),
        code_version=code_version(),
        gpu=None if device == "cpu" else find_gpu(),
    )


def _installed_versions(names: Sequence[str]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in names:
        with suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def peak_memory_bytes(pid: int | None = None) -> int:
    """Return a process's peak resident memory in bytes, by default this one's.

    Raises:
        JobError: this system doesn't report other processes' memory.
    """
    status = Path(f"/proc/{pid or 'self'}/status")
    if status.exists():
        # Linux passes a parent's ru_maxrss on to its child; VmHWM starts anew with the program.
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    if pid is not None:
        raise JobError("only Linux (/proc) reports the peak memory of another process: measure memory there")
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def own_memory_bytes(pid: int) -> int:
    """Return the bytes that a process holds resident and shares with no other; JobError if it is gone."""
    try:
        return psutil.Process(pid).memory_full_info().uss
    except psutil.Error as error:
        raise JobError(f"the memory of process {pid} can't be read: it is gone") from error


def is_busy() -> bool:
    """Return whether more threads of others run, in every sample, than the spare cores have room for.

    Call it only while no worker of this process computes. False if the system doesn't show it, as for others in a container that use our
    quota.
    """
    allowed = len(os.sched_getaffinity(0))
    num_free = num_spare(os.cpu_count() or allowed, allowed, available_cores(), available_threads())
    for sample in range(NUM_SAMPLES):
        if sample:
            time.sleep(PAUSE_S)
        # Running and runnable threads of the whole machine, this one included.
        running = _read(Path("/proc/loadavg")).split()[3:4] or ["1"]
        if int(running[0].partition("/")[0]) - 1 <= num_free:
            return False
    return True


def num_spare(num_all: int, num_allowed: int, num_cores: int, num_threads: int) -> int:
    """Return how many threads of others fit next to `num_threads` of ours, each on one of our `num_cores`.

    They fit on all processors except those of our threads' cores, and on half of these cores' second threads. If a quota allows fewer
    threads than cores, the load is still counted on the whole machine: other tenants use the cores that the quota leaves idle.
    """
    num_ours = num_allowed * num_threads // num_cores
    return num_all - num_ours + (num_ours - num_threads) // 2


def waits_passively() -> bool:
    """Return whether this process was started to sleep while it waits."""
    return os.environ.get(WAIT_POLICY, "").upper() == PASSIVE
