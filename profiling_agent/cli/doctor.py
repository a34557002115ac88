"""Checks of `doctor`: versions, CPU, memory, disk, noise, runtimes, device and the LLM's server."""

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
from profiling_agent.lib.machine import available_bytes, available_cores, cpu_quota, environment, total_bytes
from profiling_agent.processes.child import child_command, child_environment, ending
from profiling_agent.reporting.units import percent, size
from profiling_agent.request import Request
from profiling_agent.runtimes import registry
from profiling_agent.schemas import RUNTIMES, Environment, Record, RuntimeName

# Bytes: what a small model's run needs, what default runs of the paper's models stay below (ResNet-101 5.7 GB, Swin-B 9.1), and free disk.
FREE_MEMORY, AMPLE_MEMORY, FREE_DISK = 4e9, 10e9, 5e9
# A probe imports torch and at worst compiles, a device's self-test loads CUDA's libraries as well; a slower one is broken.
TIMEOUT_S = {"runtime": 180.0, "device": 600.0}
# Relative spread of equal repeats above which a race needs several sessions.
NOISY = 0.10
NUM_REPEATS = 40

State = Literal["ok", "note", "problem"]


class Finding(Record):
    """Result of one check; `advice` is what to do about a note or a problem."""

    name: str
    state: State
    seen: str
    advice: str = ""


def _finding(name: str, seen: str, advice: str = "", state: State | None = None) -> Finding:
    """Return a finding, by default a note if there is advice."""
    return Finding(name=name, state=state or ("note" if advice else "ok"), seen=seen, advice=advice)


def examine(request: Request, progress: Progress = silent) -> Iterator[Finding]:
    """Yield the result of each check as soon as it ends; nothing is raised."""
    checks: list[Callable[[], Finding]] = [
        _check_software,
        lambda: check_cpu(environment(), cpu_quota()),
        lambda: check_memory(available_bytes(), total_bytes()),
        partial(_check_disk, request.output_dir),
        _measure_noise,
        partial(_check_language_model, request),
        _check_hub,
        # Last: each takes seconds.
        *(partial(_check_runtime, name) for name in RUNTIMES if registry.runtime(name).schemes("cpu")),
        lambda: read_self_test(request.device, *_self_test("device", request.device)),
    ]
    for number, check in enumerate(checks):
        progress("looking", number, len(checks))
        yield check()


def _check_software() -> Finding:
    host = environment()
    versions = ", ".join(f"{name} {host.libraries[name]}" for name in ("torch", "transformers", "langgraph"))
    return _finding("software", f"Python {host.python}, {versions}, code {host.code_version}")


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
        return _finding("memory", seen, "end other programs, or lower --batch-size", "problem")
    advice = "enough for small models; of ViT-B/16, Swin-B and ResNet-101 at 224 px runs held 5 to 9 GB: --time-budget asks for less"
    return _finding("memory", seen, advice if free < AMPLE_MEMORY else "")


def _check_disk(output: Path) -> Finding:
    folder = output.absolute()
    while not os.path.lexists(folder):
        folder = folder.parent
    try:
        # Permissions don't suffice: the file system may be read-only, and the folder may be a file.
        tempfile.TemporaryFile(dir=folder).close()
        free = shutil.disk_usage(folder).free
    except OSError as error:
        return _finding("disk", f"{folder} can't be written ({error.strerror})", "choose another --output", "problem")
    seen = f"{size(free)} free under {folder}"
    try:
        seen = f"{seen}; cache in {cache_folder()}"
    except OSError as error:
        return _finding("disk", f"{seen}; the cache folder isn't known", error.strerror or "")
    if free < FREE_DISK:
        return _finding("disk", seen, "make room, or choose another --output", "problem")
    return _finding("disk", seen)


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
    from profiling_agent.graph.nodes import choose_advisor
    from profiling_agent.graph.state import trusted_addresses

    try:
        note = choose_advisor(request, None, trusted_addresses(os.environ, request.base_url))["advisor_note"]
    except RequestError as error:
        return _finding("language model", str(error), "or use --llm none", "problem")
    return _finding("language model", note)


def _check_hub() -> Finding:
    is_offline = os.environ.get("HF_HUB_OFFLINE", "").upper() in ("1", "ON", "YES", "TRUE")
    note = "; HF_HUB_OFFLINE is set: only what lies there, and local folders" if is_offline else ""
    return _finding("Hugging Face", f"cache in {os.environ.get('HF_HOME', '~/.cache/huggingface')}{note}")


def _check_runtime(name: RuntimeName) -> Finding:
    if reason := registry.missing(name):
        return _finding(name, "not installed", reason)
    exit_code, stdout, stderr = _self_test("runtime", name)
    if exit_code:
        seen = f"{ending(exit_code)}: {(stderr.strip().splitlines() or [''])[-1][:200]}"
        return _finding(name, seen, "install it again, or leave it out with --runtimes", "problem")
    latency_ms = parse_json(stdout.strip().splitlines()[-1])["latency_ms"]
    return _finding(name, f"runs a tiny model in {latency_ms:.2f} ms")


def _self_test(kind: str, name: str) -> tuple[int, str, str]:
    """Return the exit code and the output of a self-test in a process of its own."""
    command, timeout_s = child_command("profiling_agent.jobs.self_test", kind, name), TIMEOUT_S[kind]
    try:
        ended = subprocess.run(
            command, capture_output=True, text=True, check=False, timeout=timeout_s, env=child_environment()
        )
    except subprocess.TimeoutExpired:
        return 1, "", f"it hangs for {timeout_s:.0f} s"
    return ended.returncode, ended.stdout, ended.stderr


def read_self_test(name: str, exit_code: int, stdout: str, stderr: str) -> Finding:
    """Return the finding of a self-test on the device `name`, from its exit code and its output, a JSON line per step.

    A CUDA device that wasn't requested keeps no run from working: `auto` is the CPU.
    """
    rows = [parse_json(line) for line in stdout.splitlines() if line.startswith("{")]
    device = next((row["device"] for row in rows if "device" in row), name)
    if device is None:
        return _finding("device", "the CPU: there is no CUDA device")
    steps, seen = [row["begun"] for row in rows if "begun" in row], [row["seen"] for row in rows if "seen" in row]
    notes = [device, *(f"{step}: {text}" for step, text in zip(steps, seen, strict=False))]
    if exit_code:
        last_line = (stderr.strip().splitlines() or [ending(exit_code)])[-1][:300]
        notes.append(f"{steps[-1] if steps else 'start'} failed: {last_line}")
        return _finding("device", "; ".join(notes), "use --device cpu", "note" if name == "auto" else "problem")
    return _finding(
        "device", "; ".join(notes), "runs use the CPU unless --device cuda asks for it" if name == "auto" else ""
    )
