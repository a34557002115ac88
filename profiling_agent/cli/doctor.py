"""Checks of `doctor`: versions, CPU, memory, disk, noise, runtimes, device and the LLM's server."""

import os
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from profiling_agent.errors import ProfilingAgentError, RequestError
from profiling_agent.jobs.check import DOCTOR_S, check_device, probe_runtime
from profiling_agent.jobs.runner import Jobs, scratch_jobs
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.machine import available_bytes, available_cores, cpu_quota, environment, find_gpu, total_bytes
from profiling_agent.reporting.units import percent, size
from profiling_agent.request import Request
from profiling_agent.runtimes import registry
from profiling_agent.schemas import RUNTIMES, Environment, Record, RuntimeName

# Bytes: what a small model's run needs, what default runs of the paper's models stay below (ResNet-101 5.7 GB, Swin-B 9.1), and free disk.
FREE_MEMORY, AMPLE_MEMORY, FREE_DISK = 4e9, 10e9, 5e9
# Relative spread of equal repeats above which a race needs several sessions.
NOISY, NUM_REPEATS = 0.10, 40


class Finding(Record):
    """Result of one check; `advice` is what to do about a note or a problem."""

    name: str
    state: Literal["ok", "note", "problem"]
    seen: str
    advice: str = ""


def _finding(name: str, seen: str, advice: str = "", *, is_problem: bool = False) -> Finding:
    return Finding(name=name, state="problem" if is_problem else "note" if advice else "ok", seen=seen, advice=advice)


def examine(request: Request, progress: Progress = silent) -> Iterator[Finding]:
    """Yield the result of each check as soon as it ends; nothing is raised."""
    with scratch_jobs(progress) as jobs:
        jobs.patience_s, jobs.max_limit_s = 0, DOCTOR_S
        # The last ones take seconds each.
        checks: list[Callable[[], Finding]] = [
            lambda: _finding("software", _software(environment())),
            lambda: check_cpu(environment(), cpu_quota()),
            lambda: check_memory(available_bytes(), total_bytes()),
            lambda: _check_disk(request.output_dir.absolute()),
            _measure_noise,
            lambda: _check_language_model(request),
            *(partial(_check_runtime, jobs, name) for name in RUNTIMES if registry.runtime(name).schemes("cpu")),
            lambda: _check_device(jobs, request.device),
        ]
        for number, check in enumerate(checks):
            progress("looking", number, len(checks))
            yield check()


def _software(host: Environment) -> str:
    versions = ", ".join(f"{name} {host.libraries[name]}" for name in ("torch", "transformers", "langgraph"))
    return f"Python {host.python}, {versions}, code {host.code_version}"


def check_cpu(host: Environment, quota: float | None = None) -> Finding:
    """Return which int8 instructions the CPU has, and a container's quota in CPUs if there is one."""
    limit = "" if quota is None else f" (a quota of {quota:g} CPUs)"
    flags = ", ".join(host.cpu_flags) or "no vector flags that matter"
    with_int8: list[RuntimeName] = [name for name in RUNTIMES if registry.runtime(name).int8_instructions]
    runtimes, advice = [name for name in with_int8 if registry.runtime(name).has_vnni(host.cpu_flags)], ""
    if not runtimes:
        advice = "no int8 instructions (VNNI): int8 saves bytes here and less time; it is measured either way"
    elif len(runtimes) < len(with_int8):
        advice = f"int8 instructions of AVX2 alone (VNNI): {' and '.join(runtimes)} use them, torch's int8 doesn't"
    return _finding("CPU", f"{host.cpu}, {host.num_threads} threads{limit}, {flags}", advice)


def check_memory(free: float, total: float) -> Finding:
    """Return what so many free bytes are enough for."""
    seen = f"{size(free)} free of {size(total)}"
    if free < FREE_MEMORY:
        return _finding("memory", seen, "end other programs, or lower --batch-size", is_problem=True)
    advice = "enough for small models; of ViT-B/16, Swin-B and ResNet-101 at 224 px runs held 5 to 9 GB: --time-budget asks for less"
    return _finding("memory", seen, advice if free < AMPLE_MEMORY else "")


def _check_disk(folder: Path) -> Finding:
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        # Permissions don't suffice: the file system may be read-only, and the folder may be a file.
        tempfile.TemporaryFile(dir=folder).close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        seen = f"{folder} can't be written ({error.strerror})"
        return _finding("disk", seen, "choose another --output", is_problem=True)
    is_short = free < FREE_DISK
    advice = "make room, or choose another --output" if is_short else ""
    return _finding("disk", f"{size(free)} free under {folder}", advice, is_problem=is_short)


def _measure_noise() -> Finding:
    """Time equal matrix products; the noise is the distance of the quartiles relative to the median."""
    matrix = np.random.default_rng(0).standard_normal((384, 384), dtype=np.float32)
    product, repeats = np.empty_like(matrix), list[float]()
    for _ in range(NUM_REPEATS):
        started = time.perf_counter()
        for _ in range(8):
            np.matmul(matrix, matrix, out=product)
        repeats.append(time.perf_counter() - started)
    low, median, high = statistics.quantiles(repeats[NUM_REPEATS // 4 :], n=4)
    spread, load = (high - low) / median, os.getloadavg()[0]
    # The load is the whole machine's, even in a container with a quota.
    is_noisy = spread > NOISY or load > available_cores()
    seen = f"equal work differs by {percent(spread)} between quartiles; load {load:.1f}"
    return _finding("noise", seen, "races take longer and tell less: end other programs" if is_noisy else "")


def _check_language_model(request: Request) -> Finding:
    from profiling_agent.graph.context import choose_advisor
    from profiling_agent.graph.state import trusted_addresses

    try:
        note = choose_advisor(request, None, trusted_addresses(os.environ, request.base_url))["advisor_note"]
    except RequestError as error:
        return _finding("language model", str(error), "or use --llm none", is_problem=True)
    return _finding("language model", note)


def _check_runtime(jobs: Jobs, name: RuntimeName) -> Finding:
    if reason := registry.missing(name):
        return _finding(name, "not installed", reason)
    try:
        latency_ms = probe_runtime(jobs, name)
    except ProfilingAgentError as error:
        return _finding(name, str(error), "install it again, or leave it out with --runtimes", is_problem=True)
    return _finding(name, f"runs a tiny model in {latency_ms:.2f} ms")


def _check_device(jobs: Jobs, name: str) -> Finding:
    """Test a device with a small model; a CUDA device that wasn't requested keeps no run from working: `auto` is the CPU."""
    is_auto, device = name == "auto", "cuda" if name == "auto" else name
    if is_auto and find_gpu() is None:
        return _finding("device", "the CPU: there is no CUDA device")
    seen, failure = check_device(jobs, device)
    if failure:
        text = "; ".join([device, *seen, failure])
        return _finding("device", text, "use --device cpu", is_problem=not is_auto)
    advice = "runs use the CPU unless --device cuda asks for it" if is_auto else ""
    return _finding("device", "; ".join([device, *seen]), advice)
