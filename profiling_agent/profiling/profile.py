"""Profile of a model: parameters and multiply-accumulates counted, then each layer and operator timed."""

import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from profiling_agent.lib.costs import Complexity, activation_bytes, count_complexity, layer_latency
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.modules import floating_dtype, preserving_state, random_batch, watching
from profiling_agent.pruning.units import find_units
from profiling_agent.quantization.layers import parameter_bytes
from profiling_agent.schemas import Headline, InputSpec, LayerProfile, ModelProfile, OperatorProfile


def profile_operators(
    model: nn.Module, batch: Tensor, *, passes: int, trace_path: Path | None = None
) -> tuple[tuple[OperatorProfile, ...], float | None]:
    """Return the operators of a pass by input shape, most own time first, and the pass's kernel time on CUDA in ms.

    Times come from `passes` passes without stacks, which would slow them; one more pass with stacks gives the chrome trace at `trace_path`, gzipped
    if it ends in .gz. If `passes` is 1, for models so slow that stacks hardly matter, that pass is the only one and gives the times too. Memory is
    what an operator allocates minus what it frees. A CUDA batch adds the CUDA times.
    """
    with_stacks = _run_profiler(model, batch, passes=1, with_stack=True)
    timed = with_stacks if passes == 1 else _run_profiler(model, batch, passes=passes, with_stack=False)
    if trace_path is not None:
        with_stacks.export_chrome_trace(str(trace_path))
    on_cuda, rows = batch.is_cuda, list[OperatorProfile]()
    for event in timed.key_averages(group_by_input_shape=True):
        # Only torch's operators (`aten::linear`), no Python frames, CUDA calls or kernels.
        if "::" in event.key and not event.is_user_annotation and event.device_type.name == "CPU":
            memory: Any = event.self_device_memory_usage if on_cuda else event.self_cpu_memory_usage
            row = OperatorProfile(
                name=event.key,
                calls=event.count // passes,
                cpu_time_ms=event.self_cpu_time_total / passes / 1e3,
                cuda_time_ms=event.self_device_time_total / passes / 1e3 if on_cuda else None,
                memory_bytes=memory // passes,
                input_shapes=str(event.input_shapes),
            )
            rows.append(row)
    rows.sort(key=lambda row: (-row.time_ms, -row.cpu_time_ms))
    # The operators' own times may be larger: torch counts a kernel again with each of the profiler's own overheads.
    kernels = [e for e in timed.events() or () if e.device_type.name != "CPU" and not e.is_user_annotation]
    return tuple(rows), sum(kernel.time_range.elapsed_us() for kernel in kernels) / 1e3 / passes or None


def _run_profiler(model: nn.Module, batch: Tensor, *, passes: int, with_stack: bool) -> profile:
    # Otherwise the profiler's tracer prints two lines a session to the user's terminal.
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


# Time limits in ms for the passes with layer hooks and for those under the profiler, and the number of passes after which more don't improve them.
LAYERS_MS, OPERATORS_MS = 8_000, 5_000
MAX_LAYER_PASSES, MAX_OPERATOR_PASSES = 10, 3
NUM_STEPS = 4


def profile_model(  # noqa: PLR0913 (each is a separate input of the profile)
    model: nn.Module,
    spec: InputSpec,
    *,
    batch_size: int,
    device: str = "cpu",
    headline: Headline,
    size_bytes: int,
    architecture: str,
    skeleton: nn.Module | None = None,
    trace_path: Path | None = None,
    progress: Progress = silent,
) -> ModelProfile:
    """Return the profile of `model`, which lies on `device`; the model is unchanged.

    `skeleton` is an fp32 model of the same architecture and widths, needed if `model` is quantized: parameters, MACs and units are counted on it,
    because quantized operators have no formulas; times and activations are those of `model`. There is a row for every module that owns parameters,
    multiplies, or runs, named as in `model`. The chrome trace is written to `trace_path`; the profile's own `trace` stays None. At most 60 forward
    passes are run, those of `headline` included; fewer if `headline` shows that a pass is slow.

    Raises:
        RequestError: the model doesn't run on `spec`.
    """
    counted_model = skeleton if skeleton is not None else model
    pass_ms = headline.latency.median_ms
    passes: list[str] = []
    with ExitStack() as stack:
        for each in dict.fromkeys((model, counted_model)):
            stack.enter_context(preserving_state(each))
            stack.enter_context(watching(each, [""], after=lambda name, _input, _output: passes.append(name)))
        progress("counting parameters, multiply-accumulates and units", 0, NUM_STEPS)
        complexity = count_complexity(counted_model, spec)
        found_units = find_units(counted_model.eval(), spec, {name: row.macs for name, row in complexity.items()})
        batch = random_batch(spec, batch_size).to(torch.device(device), floating_dtype(model))
        # The pass for activations comes first and warms up the others.
        progress("measuring activations", 1, NUM_STEPS)
        activations = activation_bytes(model.eval(), batch)
        progress("timing layers", 2, NUM_STEPS)
        latencies_ms = layer_latency(model, batch, passes=_num_passes(LAYERS_MS, pass_ms, MAX_LAYER_PASSES))
        progress("profiling operators", 3, NUM_STEPS)
        num_passes = _num_passes(OPERATORS_MS, pass_ms, MAX_OPERATOR_PASSES)
        operators, kernel_ms = profile_operators(model, batch, passes=num_passes, trace_path=trace_path)
        progress("profiled", NUM_STEPS, NUM_STEPS)
    uncounted = Complexity(kind="", params=0, macs=0)
    layers = tuple(
        LayerProfile(
            name=name,
            kind=type(module).__name__,
            params=complexity.get(name, uncounted).params,
            macs=complexity.get(name, uncounted).macs,
            latency_ms=latencies_ms.get(name, 0.0),
            activation_bytes=activations.get(name, 0),
        )
        for name, module in model.named_modules()
        if name in complexity or name in latencies_ms
    )
    return ModelProfile(
        architecture=architecture,
        input=spec,
        batch_size=batch_size,
        device=device,
        params=sum(row.params for row in complexity.values()),
        macs=sum(row.macs for row in complexity.values()),
        parameter_bytes=parameter_bytes(model),
        size_bytes=size_bytes,
        headline=headline,
        layers=layers,
        operators=operators,
        units=found_units.units,
        refusals=found_units.refusals,
        absent=found_units.absent,
        launch_bound_share=launch_bound_share(kernel_ms, pass_ms),
        forward_passes=headline.forward_passes + len(passes),
    )


def launch_bound_share(kernel_ms: float | None, pass_ms: float) -> float | None:
    """Return the share of a pass in which no kernel runs; None without kernel times.

    A large share calls for CUDA graphs or larger batches: pruning only shortens kernels.
    """
    return None if kernel_ms is None else max(0.0, 1 - kernel_ms / pass_ms)


def _num_passes(budget_ms: float, pass_ms: float, max_passes: int) -> int:
    return max(1, min(max_passes, int(budget_ms / pass_ms)))
