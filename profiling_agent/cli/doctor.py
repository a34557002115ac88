"""Checks of `doctor`: versions, CPU, memory, disk, noise, runtimes, device and the LLM's server."""

import contextlib
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from profiling_agent.errors import RequestError
from profiling_agent.lib.io import cache_folder, parse_json
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.machine import (
    available_bytes,
    available_cores,
    cpu_quota,
    environment,
    total_bytes,
)
from profiling_agent.processes.child import child_command, child_environment, ending
from profiling_agent.reporting.units import percent, size
from profiling_agent.request import Request
from profiling_agent.runtimes import registry
from profiling_agent.schemas import RUNTIMES, Environment, Record, RuntimeName

# Bytes: what a small model's run needs, what default runs of the paper's models stay below (ResNet-101 5.7 GB, Swin-B 9.1), and free disk.
FREE_MEMORY, AMPLE_MEMORY, FREE_DISK = 4e9, 10e9, 5e9
# A probe imports torch and at worst compiles; a slower one is broken.
PROBE_S = 180.0
# A self-test loads CUDA's libraries as well.
SELF_TEST_S = 600.0
# Relative spread of equal repeats above which a race needs several sessions.
NOISY = 0.10
NUM_REPEATS = 40


class Finding(Record):
    """Result of one check; `advice` is what to do about a note or a problem."""

    name: str
    state: Literal["ok", "note", "problem"]
    seen: str
    advice: str = ""


def examine(request: Request, progress: Progress = silent) -> Iterator[Finding]:
    """Yield the result of each check as soon as it ends; nothing is raised."""
    checks: list[Callable[[], Finding]] = [
        _check_software,
        lambda: check_cpu(environment(), cpu_quota()),
        lambda: check_memory(available_bytes(), total_bytes()),
        lambda: _check_disk(request.output_dir),
        _measure_noise,
        lambda: _check_language_model(request),
        _check_hub,
        # Last: each takes seconds.
        *(partial(_check_runtime, name) for name in RUNTIMES if registry.runtime(name).schemes("cpu")),
        partial(_check_device, request.device),
    ]
    for number, check in enumerate(checks):
        progress("looking", number, len(checks))
        yield check()


def _check_software() -> Finding:
    host = environment()
    versions = ", ".join(f"{name} {host.libraries[name]}" for name in ("torch", "transformers", "langgraph"))
    return Finding(name="software", state="ok", seen=f"Python {host.python}, {versions}, code {host.code_version}")


def check_cpu(host: Environment, quota: float | None = None) -> Finding:
    """Return which int8 instructions the CPU has, and a container's quota in CPUs if there is one."""
    limit = "" if quota is None else f" (a quota of {quota:g} CPUs)"
    seen = (
        f"{host.cpu}, {host.num_threads} threads{limit}, {', '.join(host.cpu_flags) or 'no vector flags that matter'}"
    )
    with_int8: list[RuntimeName] = [name for name in RUNTIMES if registry.runtime(name).int8_instructions]
    runtimes, advice = [name for name in with_int8 if registry.runtime(name).has_vnni(host.cpu_flags)], ""
    if not runtimes:
        advice = "no int8 instructions (VNNI): int8 saves bytes here and less time; it is measured either way"
    elif len(runtimes) < len(with_int8):
        advice = f"int8 instructions of AVX2 alone (VNNI): {' and '.join(runtimes)} use them, torch's int8 doesn't"
    return Finding(name="CPU", state="note" if advice else "ok", seen=seen, advice=advice)


def check_memory(free: float, total: float) -> Finding:
    """Return what so many free bytes are enough for."""
    seen = f"{size(free)} free of {size(total)}"
    if free < FREE_MEMORY:
        return Finding(name="memory", state="problem", seen=seen, advice="end other programs, or lower --batch-size")
    if free < AMPLE_MEMORY:
        advice = "enough for small models; of ViT-B/16, Swin-B and ResNet-101 at 224 px runs held 5 to 9 GB: --time-budget asks for less"
        return Finding(name="memory", state="note", seen=seen, advice=advice)
    return Finding(name="memory", state="ok", seen=seen)


def _check_disk(output: Path) -> Finding:
    folder = output.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        # Permissions don't suffice: the file system may be read-only, and the folder may be a file.
        tempfile.TemporaryFile(dir=folder).close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        seen = f"{folder} can't be written ({error.strerror})"
        return Finding(name="disk", state="problem", seen=seen, advice="choose another --output")
    try:
        seen = f"{size(free)} free under {folder}; cache in {cache_folder()}"
    except OSError as error:
        seen = f"{size(free)} free under {folder}; the cache folder isn't known"
        return Finding(name="disk", state="note", seen=seen, advice=f"{error.strerror}")
    if free < FREE_DISK:
        return Finding(name="disk", state="problem", seen=seen, advice="make room, or choose another --output")
    return Finding(name="disk", state="ok", seen=seen)


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
    seen = f"equal work differs by {percent(spread)} between quartiles; load {load:.1f}"
    # The load is the whole machine's, even in a container with a quota.
    is_noisy = spread > NOISY or load > available_cores()
    advice = "races take longer and tell less: end other programs" if is_noisy else ""
    return Finding(name="noise", state="note" if is_noisy else "ok", seen=seen, advice=advice)


def _check_runtime(name: RuntimeName) -> Finding:
    if reason := registry.missing(name):
        return Finding(name=name, state="note", seen="not installed", advice=reason)
    process = _self_test("runtime", name, PROBE_S)
    if process is None:
        seen = f"hangs for {PROBE_S:.0f} s"
        return Finding(name=name, state="problem", seen=seen, advice="leave it out with --runtimes")
    if process.returncode:
        last_line = (process.stderr.strip().splitlines() or [""])[-1][:200]
        advice = "install it again, or leave it out with --runtimes"
        return Finding(name=name, state="problem", seen=f"{ending(process.returncode)}: {last_line}", advice=advice)
    latency_ms = parse_json(process.stdout.strip().splitlines()[-1])["latency_ms"]
    return Finding(name=name, state="ok", seen=f"runs a tiny model in {latency_ms:.2f} ms")


def _check_device(name: str) -> Finding:
    process = _self_test("device", name, SELF_TEST_S)
    if process is None:
        seen = f"{name}: hangs for {SELF_TEST_S:.0f} s"
        return Finding(name="device", state="problem", seen=seen, advice="use --device cpu")
    return read_self_test(name, process.returncode, process.stdout, process.stderr)


def _self_test(kind: str, name: str, timeout_s: float) -> subprocess.CompletedProcess[str] | None:
    command, environment = child_command("profiling_agent.jobs.self_test", kind, name), child_environment()
    with contextlib.suppress(subprocess.TimeoutExpired):
        return subprocess.run(command, capture_output=True, text=True, check=False, timeout=timeout_s, env=environment)
    return None


def read_self_test(name: str, exit_code: int, stdout: str, stderr: str) -> Finding:
    """Return the finding of a self-test on the device `name`, from its exit code and its output, a JSON line per step.

    A CUDA device that wasn't requested keeps no run from working: `auto` is the CPU.
    """
    rows = [parse_json(line) for line in stdout.splitlines() if line.startswith("{")]
    device = next((row["device"] for row in rows if "device" in row), name)
    if device is None:
        return Finding(name="device", state="ok", seen="the CPU: there is no CUDA device")
    steps = [row["begun"] for row in rows if "begun" in row]
    notes = [f"{step}: {row['seen']}" for step, row in zip(steps, (row for row in rows if "seen" in row), strict=False)]
    if exit_code:
        last_line = (stderr.strip().splitlines() or [ending(exit_code)])[-1][:300]
        error = f"{steps[-1] if steps else 'start'} failed: {last_line}"
        state = "note" if name == "auto" else "problem"
        return Finding(name="device", state=state, seen="; ".join([device, *notes, error]), advice="use --device cpu")
    advice = "" if name != "auto" else "runs use the CPU unless --device cuda asks for it"
    return Finding(name="device", state="note" if advice else "ok", seen="; ".join([device, *notes]), advice=advice)


def _check_language_model(request: Request) -> Finding:
    from profiling_agent.graph.nodes import choose_advisor
    from profiling_agent.graph.state import trusted_addresses

    try:
        note = choose_advisor(request, None, trusted_addresses(os.environ, request.base_url))["advisor_note"]
    except RequestError as error:
        return Finding(name="language model", state="problem", seen=str(error), advice="or use --llm none")
    return Finding(name="language model", state="ok", seen=note)


def _check_hub() -> Finding:
    offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    cache = os.environ.get("HF_HOME", "~/.cache/huggingface")
    seen = f"cache in {cache}{'; HF_HUB_OFFLINE is set: only what lies there, and local folders' if offline else ''}"
    return Finding(name="Hugging Face", state="ok", seen=seen)
