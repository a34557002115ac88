"""Operators, as torch.profiler sees them below the modules: shapes, memory and stacks, and a chrome trace."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from profiling_agent.records import OperatorProfile


def profile_operators(
    model: nn.Module, batch: Tensor, *, passes: int, trace_path: Path | None = None
) -> tuple[tuple[OperatorProfile, ...], float | None]:
    """Return the operators of a pass by input shape, most own time first, and the pass's kernel time on CUDA in ms.

    Times come from `passes` passes without stacks, which would slow them; one more pass gives the chrome trace at `trace_path`, with stacks, gzipped
    if it ends in .gz. With `passes` 1, for models so slow that stacks hardly matter, that pass is the only one and gives the times too.
    Memory is what an operator allocates less what it frees. With a CUDA batch the CUDA times are there as well.
    """
    stacked = _profiled(model, batch, passes=1, with_stack=True)
    timed = stacked if passes == 1 else _profiled(model, batch, passes=passes, with_stack=False)
    if trace_path is not None:
        stacked.export_chrome_trace(str(trace_path))
    rows = [
        _row(event, passes, on_cuda=batch.is_cuda)
        for event in timed.key_averages(group_by_input_shape=True)
        # torch's operators (`aten::linear`), and not Python frames, CUDA calls and kernels.
        if "::" in event.key and not event.is_user_annotation and event.device_type.name == "CPU"
    ]
    rows.sort(key=lambda row: (-row.time_ms, -row.cpu_time_ms))
    return tuple(rows), _kernel_ms(timed) / passes or None


def _kernel_ms(session: profile) -> float:
    """Return the time of all kernels and copies on the device, 0 without any.

    The operators' own times may be larger: torch counts a kernel again with each of the profiler's own overheads.
    """
    on_device = [
        event for event in session.events() or () if event.device_type.name != "CPU" and not event.is_user_annotation
    ]
    return sum(event.time_range.elapsed_us() for event in on_device) / 1e3


def _profiled(model: nn.Module, batch: Tensor, *, passes: int, with_stack: bool) -> profile:
    # Otherwise its tracer prints two lines a session to the user's terminal.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if batch.is_cuda else [])]
    with (
        torch.inference_mode(),
        profile(activities=activities, record_shapes=True, profile_memory=True, with_stack=with_stack) as session,
    ):
        for _ in range(passes):
            model(pixel_values=batch)
        if batch.is_cuda:
            torch.cuda.synchronize(batch.device)
    return session


def _row(event: Any, passes: int, *, on_cuda: bool) -> OperatorProfile:
    memory = event.self_device_memory_usage if on_cuda else event.self_cpu_memory_usage
    return OperatorProfile(
        name=event.key,
        calls=event.count // passes,
        cpu_time_ms=event.self_cpu_time_total / passes / 1e3,
        cuda_time_ms=event.self_device_time_total / passes / 1e3 if on_cuda else None,
        memory_bytes=memory // passes,
        input_shapes=str(event.input_shapes),
    )
