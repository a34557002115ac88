"""Machine: memory, processor, GPU, the environment that measurements depend on, and the lock of one job at a time."""

import hashlib
import json
import math
import os
import platform
import runpy
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil
from filelock import FileLock, Timeout

from profiling_agent.errors import JobError
from profiling_agent.lib.io import cache_folder
from profiling_agent.lib.logs import Progress, raise_if_stopped, silent
from profiling_agent.schemas import Environment, Gpu

CGROUPS, OWN_CGROUP = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# The kernel's description of each logical processor.
CPU_FOLDER = Path("/sys/devices/system/cpu")
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")
# Without one of these files there is no NVIDIA driver; the last is for Linux on Windows (WSL).
DRIVER_FILES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
PROBE_S = 120.0
PROBE = """
import json, torch
gpu = torch.cuda.get_device_properties(0)
print(json.dumps([gpu.name, gpu.major, gpu.minor, gpu.total_memory]))
"""
# How often a job that waits looks whether its turn has come.
POLL_S = 0.1
# What models of timm need.
TIMM_PACKAGES = ("timm", "torchvision")
LIBRARIES = (
    *("datasets", "google-re2", "langgraph", "numpy", "pillow", "ptflops", "pydantic", "safetensors", "scipy"),
    *("torch", "torch-pruning", "transformers", *TIMM_PACKAGES),
)
# Optional libraries that a runtime's speed depends on.
RUNTIME_LIBRARIES = ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf", "torchao")


def _read(path: Path) -> str:
    """Return the text of a file of the kernel's, empty if there is none."""
    with suppress(OSError):
        return path.read_text(encoding="utf-8", errors="replace").strip()
    return ""


# One queue per machine, as several machines may share the folder: by the id of this boot, which the machine's containers share.
QUEUE = f"machine-{_read(Path('/proc/sys/kernel/random/boot_id'))[:8] or platform.node()}"


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


def _own_groups(groups: Path, own: Path) -> list[Path]:
    """Return the folders of this process's control group, of version 2, and of its parents.

    A folder may be missing: in a container only the last one exists, which is its own group.
    """
    name = next((line.removeprefix("0::") for line in _read(own).splitlines() if line.startswith("0::")), "")
    folder = groups / name.strip("/")
    return [group for group in (folder, *folder.parents) if group.is_relative_to(groups)]


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

    A second thread of a core shares its multipliers and gains nothing. More threads than the quota's processors use it up
    early in each period, and then all of them stall. `OMP_NUM_THREADS` is ignored: Ray sets it, and a run that is resumed
    without it would count as another machine's.
    """
    cores, quota = available_cores(cpus), cpu_quota(groups, own)
    return cores if quota is None else min(cores, math.ceil(quota))


def cores_missing(seconds: float) -> float:
    """Return how many of the cores that a model's threads need other programs use; the caller's jobs rest for these `seconds`."""
    used, allowed = psutil.cpu_percent(seconds, percpu=True), os.sched_getaffinity(0)
    idle = sum(1 - percent / 100 for cpu, percent in enumerate(used) if cpu in allowed)
    return max(available_threads() - idle, 0.0)


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


def query_nvml(read: Callable[[Any, Any], Any]) -> Any:
    """Return what `read` gets from the NVML module and the GPU's handle; None without NVML, or if the GPU doesn't report it."""
    if (library := nvml()) is None:
        return None
    module, handle = library
    with suppress(module.NVMLError, AttributeError):
        return read(module, handle)
    return None


@cache
def find_gpu() -> Gpu | None:
    """Return the GPU that torch calls "cuda"; None if torch is built without CUDA or there is no driver."""
    # Not from torch, whose import takes seconds.
    cuda = runpy.run_path(str(metadata.distribution("torch").locate_file("torch/version.py")))["cuda"]
    if cuda is None or not any(map(os.path.exists, DRIVER_FILES)):
        return None
    described = query_nvml(
        lambda nvml, gpu: (
            nvml.nvmlDeviceGetName(gpu),
            *nvml.nvmlDeviceGetCudaComputeCapability(gpu),
            nvml.nvmlDeviceGetMemoryInfo(gpu).total,
        )
    )
    if described is None:
        # Torch describes it, but only in a process that then holds a context on it.
        command = [sys.executable, "-P", "-c", PROBE]
        try:
            ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROBE_S)
            described = json.loads(ended.stdout)
        except (OSError, subprocess.SubprocessError, ValueError):
            return None
    name, major, minor, memory_bytes = described
    cudnn = f"nvidia-cudnn-cu{cuda.partition('.')[0]}"
    return Gpu(
        name=name,
        compute_capability=f"{major}.{minor}",
        # In whole GiB, since drivers reserve different shares of it.
        memory_bytes=-(-memory_bytes // 2**30) * 2**30,
        driver=query_nvml(lambda nvml, _gpu: nvml.nvmlSystemGetDriverVersion()),
        cuda=cuda,
        cudnn=_installed_versions([cudnn]).get(cudnn),
    )


def cpu_field(field: str) -> str:
    """Return a field of the processor as the kernel describes it, or an empty string if unknown."""
    lines = _read(Path("/proc/cpuinfo")).splitlines()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


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
    flags = set(cpu_field("flags").split())
    return Environment(
        cpu=cpu_field("model name") or platform.machine(),
        cpu_flags=tuple(flag for flag in CPU_FLAGS if flag in flags),
        num_threads=available_threads(),
        # In whole GiB: another kernel on the same machine reserves a few pages more or fewer.
        memory_bytes=math.ceil(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30) * 2**30,
        system=f"{platform.system()} {platform.machine()}",
        device=device,
        python=platform.python_version(),
        libraries=_installed_versions(LIBRARIES),
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
    """Return a process's peak resident memory in bytes, by default this one's; JobError if it is gone."""
    # Linux passes a parent's ru_maxrss on to its child; VmHWM is that of the program only.
    lines = _read(Path(f"/proc/{pid or 'self'}/status")).splitlines()
    if (line := next((line for line in lines if line.startswith("VmHWM:")), None)) is None:
        raise JobError(f"the memory of process {pid} can't be read: it is gone")
    return int(line.split()[1]) * 1024


def own_memory_bytes(pid: int) -> int:
    """Return the bytes that a process holds resident and shares with no other; JobError if it is gone."""
    try:
        return psutil.Process(pid).memory_full_info().uss
    except psutil.Error as error:
        raise JobError(f"the memory of process {pid} can't be read: it is gone") from error


@contextmanager
def machine_lock(
    progress: Progress = silent, check: Callable[[], None] = raise_if_stopped, *, name: str = "profiling-agent"
) -> Generator[None]:
    """Wait until no other process of this user runs a job on this machine: first come, first served.

    Those that wait print `name`. `check` raises what ends the wait. Two runs at once wait for each other's threads: on two cores each
    took ten times as long instead of twice (docs/decisions/LOG.md, 2026-11-22).
    """
    try:
        queue = cache_folder() / QUEUE
        queue.mkdir(parents=True, exist_ok=True)
        with FileLock(queue / "lock"):
            ahead = sorted(queue.glob("*-*"))
            number = int(ahead[-1].name.partition("-")[0]) + 1 if ahead else 0
            # Locked as long as its process lives.
            ticket = FileLock(queue / f"{number:012}-{name}, process {os.getpid()}")
            ticket.acquire()
    except OSError:
        # A user who can't write a cache can't wait for others either; acquisition reports it if a cache is needed.
        yield
        return
    try:
        if ahead := [path for path in ahead if _is_held(path)]:
            progress(f"waiting for another job on this machine to end: {ahead[0].name.partition('-')[2]}", 0, 0)
        while ahead:
            raise_if_stopped()
            check()
            time.sleep(POLL_S)
            ahead = [path for path in ahead if _is_held(path)]
        yield
    finally:
        Path(ticket.lock_file).unlink(missing_ok=True)
        ticket.release()


def _is_held(ticket: Path) -> bool:
    """Return whether a ticket's process lives and still has it; delete that of a killed one."""
    try:
        with FileLock(ticket, timeout=0):
            ticket.unlink(missing_ok=True)
    except Timeout:
        return True
    return False
