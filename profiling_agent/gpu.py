"""NVIDIA GPU: which one this process computes on, and the driver's library (NVML) that describes it."""

import contextlib
import json
import os
import runpy
import subprocess
import sys
from functools import cache
from importlib import import_module, metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from profiling_agent.records import Gpu

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
