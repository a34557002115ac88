"""This machine: memory, processor, GPU, threads in use, and the fingerprint that a number depends on.

Busy cores: next to one spinning process, on two cores, a batch of 32 small images has taken 839 ms instead of 20. Threads that sleep while they
wait take twice as long there, but on a quiet machine a little longer too, so nothing that is timed waits like that.

VNNI instructions add int8 products in 32 bits. Without them two products are added in 16 bits, where 8 bits on both sides saturate: one of them
is given 7.
"""

import contextlib
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
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import psutil

from profiling_agent.errors import JobError
from profiling_agent.lib.timm_config import PACKAGES as TIMM_PACKAGES
from profiling_agent.schemas import Environment, Gpu, RuntimeName

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
FILES = ("inactive_file", "active_file")


def total_bytes(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return how much memory there is, or may be used here."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits(groups, own))])


def available_bytes(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return how much memory can be had without swapping, at least 0."""
    left = (limit - used for limit, used in _limits(groups, own))
    return max(min([psutil.virtual_memory().available, *left]), 0)


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) of this process's control group and those above it; files that the kernel would drop aren't used."""
    for group in own_groups(groups, own):
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and used is not None:
            words = (line.split() for line in _lines(group / "memory.stat"))
            files = sum(int(pair[1]) for pair in words if len(pair) == 2 and pair[0] in FILES and pair[1].isdecimal())
            yield limit, max(used - files, 0)


def own_groups(groups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group, of version 2, and of those above it.

    A folder may not be there: in a container, what lies outside isn't, and its own group is the last.
    """
    name = next((line.removeprefix("0::") for line in _lines(own) if line.startswith("0::")), "")
    folder = groups / name.strip("/")
    for group in (folder, *folder.parents):
        yield group
        if group == groups:
            break


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []


# Without one of these there is no NVIDIA driver; the last is that of Windows' Linux.
DRIVERS = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/dxg")
PROBE_S = 120.0
# Torch knows the GPU without NVML, but only in a process that then holds a context on it.
PROBE = """
import json, torch
if torch.cuda.is_available():
    found = torch.cuda.get_device_properties(0)
    print(json.dumps([found.name, f"{found.major}.{found.minor}", found.total_memory]))
"""


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
    """Return the GPU that torch's "cuda" is; None where torch is built without CUDA or there is no driver."""
    cuda = _cuda_of_torch()
    if cuda is None or not any(Path(driver).exists() for driver in DRIVERS):
        return None
    found = _by_nvml() or _by_torch()
    if found is None:
        return None
    name, capability, memory_bytes, driver = found
    # In whole GiB, since drivers keep a different share of it for themselves.
    memory_bytes = -(-memory_bytes // 2**30) * 2**30
    return Gpu(
        name=name,
        compute_capability=capability,
        memory_bytes=memory_bytes,
        driver=driver,
        cuda=cuda,
        cudnn=_cudnn(cuda),
    )


def _by_nvml() -> tuple[str, str, int, str | None] | None:
    opened = nvml()
    if opened is None:
        return None
    module, handle = opened
    try:
        major, minor = module.nvmlDeviceGetCudaComputeCapability(handle)
        memory_bytes = int(module.nvmlDeviceGetMemoryInfo(handle).total)
        return module.nvmlDeviceGetName(handle), f"{major}.{minor}", memory_bytes, module.nvmlSystemGetDriverVersion()
    except module.NVMLError:
        return None


def _by_torch() -> tuple[str, str, int, str | None] | None:
    command = [sys.executable, "-P", "-c", PROBE]
    try:
        ended = subprocess.run(command, capture_output=True, text=True, check=True, timeout=PROBE_S)
        name, capability, memory_bytes = json.loads(ended.stdout)
    except (OSError, subprocess.SubprocessError, ValueError):
        return None
    return name, capability, memory_bytes, None


def _cuda_of_torch() -> str | None:
    spec = find_spec("torch")
    folders = spec.submodule_search_locations if spec else None
    return runpy.run_path(str(Path(folders[0]) / "version.py")).get("cuda") if folders else None


def _cudnn(cuda: str) -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(f"nvidia-cudnn-cu{cuda.partition('.')[0]}")
    return None


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
# Libraries that a runtime's speed depends on and that need not be installed.
RUNTIME_LIBRARIES = ("onnx", "onnxscript", "onnxruntime", "openvino", "nncf", "torchao")
# Of each logical processor what the kernel knows.
CPUS = Path("/sys/devices/system/cpu")
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")


def _cpuinfo(field: str) -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_bytes().decode(errors="replace").splitlines() if path.exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith(field)), "")


def cpu_vendor() -> str:
    """Return who made the processor, as it says itself ("GenuineIntel", "AuthenticAMD"), or nothing where it doesn't."""
    return _cpuinfo("vendor_id")


@cache
def code_version() -> str:
    """Return a hash over the package's own source, so that a changed stage never answers from an old job."""
    digest = hashlib.sha256()
    root = Path(__file__).parents[1]
    for path in sorted(root.rglob("*.py")):
        digest.update(path.relative_to(root).as_posix().encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:16]


def available_threads(cpus: Path = CPUS, groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return how many threads a model's work is split into: one for each physical core that this process may use, and no more than a container's quota has time for.

    As many as there are cores do ONNX Runtime and torch (with MKL) take by themselves: a second thread of a core shares its multipliers, and gains nothing.
    More threads than the quota has processors use it up early in each period, and all stand still for the rest of it. `OMP_NUM_THREADS`
    isn't asked: Ray sets it, and a run that is resumed without it would be another machine's.
    """
    cores, quota = available_cores(cpus), cpu_quota(groups, own)
    return cores if quota is None else min(cores, math.ceil(quota))


def quota_threads(cpus: Path = CPUS, groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int | None:
    """Return how many threads a container's quota has time for, where libraries, which ask for cores alone, would take more; None where they wouldn't."""
    threads = available_threads(cpus, groups, own)
    return threads if threads < available_cores(cpus) else None


def available_cores(cpus: Path = CPUS) -> int:
    """Return how many physical cores this process may use, whatever time it may have of them."""
    return len({_core(cpus / f"cpu{cpu}" / "topology", cpu) for cpu in os.sched_getaffinity(0)})


def _core(topology: Path, cpu: int) -> tuple[str, ...]:
    """Return which core of which processor a logical one is part of; one of its own where the system doesn't tell."""
    try:
        return tuple(
            (topology / name).read_text(encoding="utf-8").strip() for name in ("physical_package_id", "core_id")
        )
    except (OSError, UnicodeDecodeError):
        return (str(cpu),)


def cpu_quota(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> float | None:
    """Return how many processors' time this process's control group and those above it leave it, more than 0; None where that has no bound."""
    quotas = (_quota(group / "cpu.max") for group in own_groups(groups, own))
    return min((quota for quota in quotas if quota is not None), default=None)


def _quota(file: Path) -> float | None:
    """Return the quota in a file, in periods; None where there is none, as in "max 100000"."""
    try:
        words = file.read_text(encoding="utf-8").split()
    except (OSError, UnicodeDecodeError):
        return None
    numbers = [int(word) for word in words if word.isdecimal()]
    # The kernel takes a 0 for neither.
    return numbers[0] / numbers[1] if len(numbers) == len(words) == 2 and all(numbers) else None


@cache
def environment(device: str = "cpu") -> Environment:
    """Return the fingerprint of this machine and installation, for measurements on `device`."""
    flags = set(_cpuinfo("flags").split())
    return Environment(
        cpu=_cpuinfo("model name") or platform.processor() or platform.machine(),
        cpu_flags=tuple(flag for flag in CPU_FLAGS if flag in flags),
        num_threads=available_threads(),
        # In whole GiB: another kernel on the same machine keeps some pages more or fewer for itself.
        memory_bytes=math.ceil(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30) * 2**30,
        system=f"{platform.system()} {platform.machine()}",
        device=device,
        python=platform.python_version(),
        libraries={name: metadata.version(name) for name in LIBRARIES} | _timm(),
        runtimes=_installed(RUNTIME_LIBRARIES),
        code_version=code_version(),
        gpu=None if device == "cpu" else find_gpu(),
    )


def _installed(names: Sequence[str]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions


def _timm() -> dict[str, str]:
    """Return the versions of what timm's models are made of; none without timm, where torchvision, if it is there, has a part in nothing."""
    versions = _installed(TIMM_PACKAGES)
    return versions if "timm" in versions else {}


def peak_memory_bytes(pid: int | None = None) -> int:
    """Return the most memory that a process has had resident, by default this one.

    Raises:
        JobError: this system doesn't tell what another process held.
    """
    status = Path(f"/proc/{pid or 'self'}/status")
    if status.exists():
        # Linux hands a parent's ru_maxrss on to the child it starts; VmHWM begins anew with the program.
        line = next(line for line in status.read_text(encoding="utf-8").splitlines() if line.startswith("VmHWM:"))
        return int(line.split()[1]) * 1024
    if pid is not None:
        raise JobError("what another process held at most is told by Linux alone (/proc): measure memory there")
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


def own_memory_bytes(pid: int) -> int:
    """Return what a process holds resident that no other process shares.

    Raises:
        JobError: it is gone.
    """
    try:
        return psutil.Process(pid).memory_full_info().uss
    except psutil.Error as error:
        raise JobError(f"what process {pid} held can't be told: it is gone") from error


# What OpenMP's threads, which are torch's, do at the end of a piece of work; ONNX Runtime is told by us where this is set.
WAIT_POLICY, PASSIVE = "OMP_WAIT_POLICY", "PASSIVE"
# So many looks at what runs, and the time between them: a process that wakes up now and then isn't seen in all of them.
NUM_LOOKS, PAUSE_S = 3, 0.01


def is_busy() -> bool:
    """Say whether more others run, whenever one looks, than there is room for beside us; for whoever has no process of its own at work.

    False where the system doesn't tell, as of others in a container that take of our quota.
    """
    allowed = len(os.sched_getaffinity(0))
    room = num_spare(os.cpu_count() or allowed, allowed, available_cores(), available_threads())
    for look in range(NUM_LOOKS):
        if look:
            time.sleep(PAUSE_S)
        if _num_running() - 1 <= room:
            return False
    return True


def num_spare(num_all: int, num_allowed: int, num_cores: int, num_threads: int) -> int:
    """Return how many threads of others have room beside `num_threads` of ours, each on one of the `num_cores` that we may use.

    Which is on all processors but those of our threads' cores, and on half of these cores' second threads. Where a quota keeps us to fewer threads than there are
    cores, what runs is still counted on the whole machine: other tenants have the cores that the quota leaves idle.
    """
    num_ours = num_allowed * num_threads // num_cores
    return num_all - num_ours + (num_ours - num_threads) // 2


def _num_running() -> int:
    """Return how many threads of the whole machine run or want to; this one is one of them."""
    try:
        running, _, _ = Path("/proc/loadavg").read_text(encoding="utf-8").split()[3].partition("/")
        return int(running)
    except (OSError, IndexError, ValueError):
        return 1


def waits_passively() -> bool:
    """Say whether this process was started to sleep while it waits."""
    return os.environ.get(WAIT_POLICY, "").upper() == PASSIVE


# Intel's hybrid processors, from the 12th generation on, have that of AVX2 alone. ONNX Runtime (MLAS) and OpenVINO (oneDNN) have kernels for it;
# torch (FBGEMM) asks for that of AVX-512 (docs/facts.md says where that was read).
INSTRUCTIONS: Mapping[RuntimeName, tuple[str, ...]] = {
    "eager": ("avx512_vnni",),
    "inductor": ("avx512_vnni",),
    "onnxruntime": ("avx512_vnni", "avx_vnni"),
    "openvino": ("avx512_vnni", "avx_vnni"),
}
# torch's layers of which no sum saturates on any CPU: dynamic ones take 7 bits where one would, and static ones compute in float32 unless inductor
# makes int8 products of them.
SAFE: Mapping[RuntimeName, tuple[str, ...]] = {
    "eager": ("dynamic", "static", "rowwise"),
    "inductor": ("dynamic", "rowwise"),
}


def has_vnni(runtime: RuntimeName, cpu_flags: Collection[str]) -> bool:
    """Return whether the int8 kernels of a runtime add products in 32 bits on a CPU of these flags, as Linux names them."""
    return not set(INSTRUCTIONS.get(runtime, ())).isdisjoint(cpu_flags)


def saturates(runtime: RuntimeName) -> bool:
    """Return whether 8 bits on both sides of a product are too many for a runtime's kernels on this CPU."""
    return not has_vnni(runtime, environment().cpu_flags)


def needed_instructions(runtime: RuntimeName, layers: Iterable[Any]) -> tuple[str, ...]:
    """Return the CPU flags of which one has to be there so that int8 sums of a recipe's layers don't saturate; none where they can't."""
    full = any(
        layer.dtype == "qint8" and not layer.reduce_range and layer.kind not in SAFE.get(runtime, ())
        for layer in layers
    )
    return INSTRUCTIONS.get(runtime, ()) if full else ()
