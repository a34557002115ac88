"""Checks of `doctor`: versions, CPU, memory, disk, noise, runtimes and a device by a tiny model, and the LLM's server.

What a runtime or driver does is a job in a child process, as one that was built for other hardware may crash it.
"""

import os
import shutil
import statistics
import tempfile
import timeit
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

import numpy as np

from profiling_agent.data.images import write_rows
from profiling_agent.errors import ArtifactError, LibraryError, ProfilingAgentError, RequestError
from profiling_agent.jobs.base import JobContext, Task
from profiling_agent.jobs.runner import Jobs, read_profile, scratch_jobs
from profiling_agent.jobs.tasks import DeployTask, EvaluateTask, ExportTask, HeadlineTask, ProfileTask, PruneTask
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.machine import available_bytes, available_cores, cpu_quota, environment, find_gpu, total_bytes
from profiling_agent.pruning.widths import snap
from profiling_agent.reporting.units import percent, size
from profiling_agent.request import Request
from profiling_agent.runtimes import registry
from profiling_agent.schemas import (
    RUNTIMES,
    ArtifactRef,
    Cut,
    Deployment,
    Environment,
    InputSpec,
    Record,
    RuntimeName,
    SplitInfo,
)

# Bytes that a small model's run needs; default runs of the paper's models hold 5 to 9 GB of memory.
FREE_MEMORY, FREE_DISK = 4e9, 5e9
# Relative spread of equal repeats above which a race needs several sessions.
NOISY, NUM_REPEATS = 0.10, 40
# Seconds that a job on the tiny model may take: a hung driver must not hang `doctor`.
DOCTOR_S = 600.0
# Images of noise, of which compensation needs 128 different ones, and their batches.
NUM_IMAGES, BATCH_SIZE = 256, 8


class Finding(Record):
    """Result of one check; `advice` is what to do about a note or a problem."""

    name: str
    state: Literal["ok", "note", "problem"]
    seen: str
    advice: str = ""


def _finding(name: str, seen: str, advice: str = "", *, is_problem: bool = False) -> Finding:
    return Finding(name=name, state="problem" if is_problem else "note" if advice else "ok", seen=seen, advice=advice)


def _failed(name: str, error: ProfilingAgentError, advice: str, *, is_problem: bool = True) -> Finding:
    """Return the finding of an error: its own advice, if a library can't be imported, or else `advice`."""
    problem, separator, command = str(error).partition("; run: ")
    return _finding(name, problem, f"run: {command}" if separator else advice, is_problem=is_problem)


def examine(request: Request, progress: Progress = silent) -> Iterator[Finding]:
    """Yield the result of each check as soon as it ends; nothing is raised."""
    with scratch_jobs(progress) as jobs:
        jobs.max_limit_s = DOCTOR_S
        yield _check_software()
        yield check_cpu(environment(), cpu_quota())
        yield _check_memory()
        yield _check_disk(request.output_dir.absolute())
        yield _measure_noise()
        yield _check_language_model(request)
        try:
            jobs.run(TinyTask())
        except LibraryError as error:
            # Nothing is known of runtimes and devices then.
            yield _failed("libraries", error, "")
            return
        for name in RUNTIMES:
            if registry.runtime(name).schemes("cpu"):
                progress(f"trying {name}", 0, 0)
                yield _check_runtime(jobs, name)
        progress("trying the device", 0, 0)
        yield check_device(jobs, request.device)


def _check_software() -> Finding:
    host = environment()
    versions = ", ".join(f"{name} {host.libraries[name]}" for name in ("torch", "transformers", "langgraph"))
    return _finding("software", f"Python {host.python}, {versions}, code {host.code_version}")


def check_cpu(host: Environment, quota: float | None = None) -> Finding:
    """Return which int8 instructions the CPU has, and a container's quota in CPUs if there is one."""
    limit = "" if quota is None else f" (a quota of {quota:g} CPUs)"
    flags = ", ".join(host.cpu_flags) or "no vector flags that matter"
    has_int8 = any(registry.runtime(name).has_vnni(host.cpu_flags) for name in RUNTIMES)
    advice = "" if has_int8 else "no int8 instructions (VNNI): int8 saves bytes here and less time"
    return _finding("CPU", f"{host.cpu}, {host.num_threads} threads{limit}, {flags}", advice)


def _check_memory() -> Finding:
    free, total = available_bytes(), total_bytes()
    advice = "end other programs, or lower --batch-size" if free < FREE_MEMORY else ""
    return _finding("memory", f"{size(free)} free of {size(total)}", advice, is_problem=free < FREE_MEMORY)


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
    repeats = timeit.repeat(lambda: matrix @ matrix, number=8, repeat=NUM_REPEATS)
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


class Tiny(Record):
    """A tiny model, and images of noise."""

    model: ArtifactRef
    images: SplitInfo


class TinyTask(Task[Tiny]):
    """Save a ViT of two layers with random weights, and images of noise, to check a runtime or device with."""

    def run(self, context: JobContext) -> Tiny:
        """Make both."""
        from transformers import ViTConfig, ViTForImageClassification
        from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

        from profiling_agent.runtimes.torch_artifact import save_model

        if find_spec("timm") and find_spec("torchvision"):
            # Only timm's models need them, which are not tried.
            import_module("timm")
        side, folder, noise = 32, context.folder / "model", context.folder / "noise.arrow"
        sizes: dict[str, Any] = {"image_size": side, "patch_size": 8, "hidden_size": 64, "intermediate_size": 256}
        model = ViTForImageClassification(ViTConfig(**sizes, num_hidden_layers=2, num_attention_heads=2)).eval()
        spec = InputSpec(channels=3, height=side, width=side, source="probe")
        processor = ViTImageProcessorPil(size={"height": side, "width": side})
        save_model(model, folder, spec=spec, processor=processor, base_model="probe")
        rng, header = np.random.default_rng(0), f"P6 {side} {side} 255\n".encode()
        write_rows(noise, ((header + rng.bytes(3 * side * side), 0) for _ in range(NUM_IMAGES)))
        file = context.ref(noise)
        split = SplitInfo(name="calibration", source_split="noise", num_images=NUM_IMAGES, file=file)
        return Tiny(model=context.ref(folder), images=split)


def _check_runtime(jobs: Jobs, name: RuntimeName) -> Finding:
    if reason := registry.missing(name):
        return _finding(name, "not installed", reason)
    try:
        tiny, deployment = jobs.run(TinyTask()), Deployment(runtime=name)
        onnx = jobs.run(ExportTask(model=tiny.model)) if registry.reads_onnx(deployment) else None
        inputs: dict[str, Any] = {"model": tiny.model, "calibration": tiny.images, "onnx": onnx}
        model = jobs.run(DeployTask(**inputs, deployment=deployment, batch_size=1, isolated=True)).model
        latency_ms = jobs.run(HeadlineTask(model=model, batch_size=1, device="cpu")).latency.median_ms
    except ProfilingAgentError as error:
        return _failed(name, error, "install it again, or leave it out with --runtimes")
    return _finding(name, f"runs a tiny model in {latency_ms:.2f} ms")


def check_device(jobs: Jobs, name: str) -> Finding:
    """Profile, prune and evaluate a tiny model; a CUDA device that wasn't requested is no problem, as `auto` is the CPU."""
    is_auto, device = name == "auto", "cuda" if name == "auto" else name
    if is_auto and find_gpu() is None:
        return _finding("device", "the CPU: there is no CUDA device")
    try:
        tiny = jobs.run(TinyTask())
        settings: dict[str, Any] = {"model": tiny.model, "batch_size": BATCH_SIZE, "device": device}
        headline = jobs.run(HeadlineTask(**settings))
        task = ProfileTask(**settings, headline=headline, calibration=tiny.images, cache=False)
        profile = read_profile(jobs, jobs.run(task))
        cuts = tuple(Cut(unit=unit, keep=snap(unit, 0.5), requested_ratio=0.5) for unit in profile.units)
        pruned = jobs.run(PruneTask(baseline=tiny.model, cuts=cuts, calibration=tiny.images, device=device))
        if problem := profile.evidence_note or pruned.compensation_note:
            raise ArtifactError(problem)
        for model in (tiny.model, pruned.model):
            # Compares logits with those that the CPU gave when the model was saved.
            jobs.run(EvaluateTask(model=model, split=tiny.images, shard=0, batch_size=BATCH_SIZE, device=device))
    except ProfilingAgentError as error:
        return _failed("device", error, "use --device cpu", is_problem=not is_auto)
    seen = (
        f"{device}: {headline.latency.median_ms:.2f} ms a batch of {BATCH_SIZE}, {size(headline.peak_memory_bytes)} at most; "
        f"{len(cuts)} units pruned, KL {pruned.kl_uncompensated:.2g} nats, {pruned.kl:.2g} after compensation"
    )
    return _finding("device", seen, "runs use the CPU unless --device cuda asks for it" if is_auto else "")
