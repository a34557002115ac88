"""Fingerprint of code, libraries and machine: what a number depends on besides its inputs."""

import contextlib
import hashlib
import math
import os
import platform
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from profiling_agent.gpu import find_gpu
from profiling_agent.memory import GROUPS, OWN_GROUPS, own_groups
from profiling_agent.records import Environment
from profiling_agent.timm_config import PACKAGES as TIMM_PACKAGES

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
    root = Path(__file__).parent
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
