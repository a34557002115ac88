"""Fingerprint of code, libraries and machine: what a number depends on besides its inputs."""

import contextlib
import hashlib
import os
import platform
from collections.abc import Sequence
from functools import cache
from importlib import metadata
from pathlib import Path

from profiling_agent.files import read_bytes
from profiling_agent.records import Environment

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
CPU_FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "avx_vnni", "amx_int8", "amx_bf16")


def _cpuinfo(field: str) -> str:
    """Return the first value of `field` in /proc/cpuinfo, or nothing where there is no such file."""
    path = Path("/proc/cpuinfo")
    lines = read_bytes(path).decode(errors="replace").splitlines() if path.exists() else []
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
        digest.update(read_bytes(path))
    return digest.hexdigest()[:16]


def available_threads() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0))


@cache
def environment(device: str = "cpu") -> Environment:
    """Return the fingerprint of this machine and installation, for measurements on `device`."""
    flags = set(_cpuinfo("flags").split())
    return Environment(
        cpu=_cpuinfo("model name") or platform.processor() or platform.machine(),
        cpu_flags=tuple(flag for flag in CPU_FLAGS if flag in flags),
        num_threads=available_threads(),
        memory_bytes=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        system=f"{platform.system()} {platform.machine()}",
        device=device,
        python=platform.python_version(),
        libraries={name: metadata.version(name) for name in LIBRARIES},
        runtimes=_installed(RUNTIME_LIBRARIES),
        code_version=code_version(),
    )


def _installed(names: Sequence[str]) -> dict[str, str]:
    versions: dict[str, str] = {}
    for name in names:
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[name] = metadata.version(name)
    return versions
