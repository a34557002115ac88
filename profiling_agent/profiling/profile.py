"""Profile of a model: parameters and multiply-accumulates counted; each layer, operator, and unit at each width timed."""

import copy
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy import stats
from scipy.optimize import isotonic_regression
from torch import Tensor, nn
from torch.nn import functional as F
from torch.profiler import ProfilerActivity, profile

from profiling_agent import schemas
from profiling_agent.lib.costs import Complexity, activation_bytes, count_complexity, layer_latency
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.modules import floating_dtype, has_bias, preserving_state, random_batch, watching
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.quantization.layers import parameter_bytes
from profiling_agent.schemas import OperatorProfile, Unit


def profile_operators(
    model: nn.Module, batch: Tensor, *, passes: int, trace_path: Path | None = None
) -> tuple[tuple[OperatorProfile, ...], float | None]:
    """Return the operators of a pass by input shape, most own time first, and the pass's kernel time on CUDA in ms.

    Numbers are means over `passes`, whose chrome trace goes to `trace_path`, gzipped if it ends in .gz. Memory is what an
    operator allocates minus what it frees. A CUDA batch adds CUDA times.
    """
    # Otherwise the profiler's tracer prints two lines a session to the user's terminal.
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if batch.is_cuda else [])]
    with torch.inference_mode(), profile(activities=activities, record_shapes=True, profile_memory=True) as timed:
        for _ in range(passes):
            model(pixel_values=batch)
        if batch.is_cuda:
            torch.cuda.synchronize(batch.device)
    if trace_path is not None:
        timed.export_chrome_trace(str(trace_path))
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


# Time limits in ms for the passes with layer hooks and for those under the profiler, and the most passes that improve them.
LAYERS_MS, OPERATORS_MS = 8_000, 5_000
MAX_LAYER_PASSES, MAX_OPERATOR_PASSES = 10, 3


def profile_model(  # noqa: PLR0913 (each is a separate input of the profile)
    model: nn.Module,
    spec: schemas.InputSpec,
    *,
    batch_size: int,
    device: str = "cpu",
    headline: schemas.Headline,
    size_bytes: int,
    architecture: str,
    skeleton: nn.Module | None = None,
    trace_path: Path | None = None,
    progress: Progress = silent,
) -> schemas.ModelProfile:
    """Return the profile of `model`, which lies on `device`; the model is unchanged.

    `skeleton` is an fp32 model of the same architecture and widths, needed if `model` is quantized: parameters, MACs and units
    are counted on it. There is a row for every module that owns parameters, multiplies, or runs. The chrome trace is written to
    `trace_path`; the profile's own `trace` stays None.

    Raises:
        RequestError: the model doesn't run on `spec`.
    """
    counted_model, num_steps = skeleton if skeleton is not None else model, 4
    pass_ms = headline.latency.median_ms
    with preserving_state(model), preserving_state(counted_model):
        progress("counting parameters, multiply-accumulates and units", 0, num_steps)
        complexity = count_complexity(counted_model, spec)
        found_units = find_units(counted_model.eval(), spec, {name: row.macs for name, row in complexity.items()})
        batch = random_batch(spec, batch_size).to(torch.device(device), floating_dtype(model))
        # The pass for activations comes first and warms up the others.
        progress("measuring activations", 1, num_steps)
        activations = activation_bytes(model.eval(), batch)
        progress("timing layers", 2, num_steps)
        latencies_ms = layer_latency(model, batch, passes=max(1, min(MAX_LAYER_PASSES, int(LAYERS_MS / pass_ms))))
        progress("profiling operators", 3, num_steps)
        num_passes = max(1, min(MAX_OPERATOR_PASSES, int(OPERATORS_MS / pass_ms)))
        operators, kernel_ms = profile_operators(model, batch, passes=num_passes, trace_path=trace_path)
        progress("profiled", num_steps, num_steps)
    uncounted = Complexity(kind="", params=0, macs=0)
    layers = tuple(
        schemas.LayerProfile(
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
    return schemas.ModelProfile(
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
        # Kernels of several streams overlap.
        launch_bound_share=None if kernel_ms is None else max(0.0, 1 - kernel_ms / pass_ms),
    )


# With one warm-up call, nine calls a width if nothing disturbs them. A second call still takes a fifth longer than later ones,
# which doesn't affect the median of eight.
WARM_UP, NUM_REPEATS, MAX_REPEATS = 1, 8, 24
# On a GPU: repeats of each call in a graph, and rounds through the widths before they are timed.
GRAPH_REPEATS, GPU_WARM_UP = 20, 5
# Calls with a free core spread by 0.005 to 0.05 and waited for nothing; next to two spinning processes they spread by 0.04
# to 0.4, or waited for 30 to 70% of the time (docs/facts.md, "A latency table on a busy machine").
MAX_SPREAD, MAX_WAITED = 0.05, 0.1
# Timed widths of one shape, the full one among them; those between are interpolated.
NUM_TIMED = 9
# A width is an option only if it brings at least this share of what time proportional to the width would: on a
# staircase (oneDNN blocks 16 channels) the widths within a step bring nothing (docs/facts.md, "Widths that bring time").
MIN_GAIN = 0.25
# Probability of ruling out by chance a width that brings just that: 1 of 8 repeats may support it, 4 of 16, 7 of 24.
MAX_ERROR = 0.05


@dataclass(frozen=True, slots=True)
class WidthSamples:
    """Milliseconds of one shape by width, a sample per repeat; each repeat times all widths one after another.

    `waited` is the median share of a call in which its thread had no core or waited for one that had none.
    """

    ms: Mapping[int, Sequence[float]]
    waited: float = 0.0

    @property
    def spread(self) -> float:
        """Return the relative standard error of a width's median by its quartiles; the median over widths.

        Of normal samples the median's standard error is 1.253 / sqrt(n) standard deviations, and the quartiles are 1.349 apart.
        """
        low, middle, high = np.quantile(list(self.ms.values()), (0.25, 0.5, 0.75), axis=1)
        count = len(next(iter(self.ms.values())))
        return float(np.median(0.93 * (high - low) / (math.sqrt(count) * middle)))

    @property
    def is_steady(self) -> bool:
        """Return whether they needn't be timed again: most calls didn't wait for a core, and their spread is small."""
        return self.waited <= MAX_WAITED and self.spread <= MAX_SPREAD


class LatencyTable(schemas.Record):
    """Milliseconds of one batch by unit and width, falling with the width.

    `ruled_out` has the widths shown to save less than MIN_GAIN of the proportional time, `unsteady` the units timed while the
    machine was too busy.
    """

    times: Mapping[str, Mapping[int, float]]
    ruled_out: Mapping[str, frozenset[int]] = {}
    unsteady: frozenset[str] = frozenset()

    def full_latency_ms(self, unit: Unit) -> float | None:
        """Return the milliseconds of `unit` unpruned; None if untimed."""
        times = self.times.get(unit.name)
        return times[unit.width] if times else None

    def latency_saved_ms(self, unit: Unit, keep: int) -> float | None:
        """Return the milliseconds saved by cutting `unit` to `keep`, 0 if shown to be too few; None if untimed.

        Otherwise it is at least the smallest saving that pays: noise that hides a saving must not forbid it.
        """
        full = self.full_latency_ms(unit)
        if full is None:
            return None
        if keep in self.ruled_out.get(unit.name, ()):
            return 0.0
        return max(full - self.times[unit.name][keep], MIN_GAIN * (1 - keep / unit.width) * full)


def fit_latency_table(units: Sequence[Unit], samples: Mapping[str, WidthSamples]) -> LatencyTable:
    """Fit the table to the samples of `units` by name: medians that rise with the width, and widths that save too little.

    Times rise with the width: any fall is noise. Widths that save too little are ruled out by a sign test within each repeat,
    in which a slow repeat cancels out and an interrupted call counts once, however long it took. If most calls were
    interrupted, nothing is shown.
    """
    times, ruled_out = dict[str, dict[int, float]](), dict[str, frozenset[int]]()
    for unit in units:
        timed = samples[unit.name]
        widths, options = sorted(timed.ms), aligned_widths(unit.width, unit.step)
        rising = isotonic_regression([np.median(timed.ms[width]) for width in widths]).x
        keeps = [*options, unit.width]
        times[unit.name] = dict(zip(keeps, map(float, np.interp(keeps, widths, rising)), strict=True))
        repeats = np.array([timed.ms[width] for width in widths]).T
        wasted: set[int] = set()
        for keep in options if timed.waited <= MAX_WAITED else ():
            narrow = np.array([np.interp(keep, widths, repeat) for repeat in repeats])
            enough = repeats[:, -1] * (1 - MIN_GAIN * (1 - keep / unit.width))
            if stats.binom.cdf(np.count_nonzero(narrow <= enough), len(repeats), 0.5) <= MAX_ERROR:
                wasted.add(keep)
        ruled_out[unit.name] = frozenset(wasted)
    unsteady = frozenset(unit.name for unit in units if not samples[unit.name].is_steady)
    return LatencyTable(times=times, ruled_out=ruled_out, unsteady=unsteady)


def spread_evenly(widths: Sequence[int], max_count: int) -> list[int]:
    """Return up to `max_count` of `widths`, evenly spread and including the last one."""
    count = min(max_count, len(widths))
    return [widths[(index + 1) * len(widths) // count - 1] for index in range(count)]


# A layer of a unit, the shape of its input, and whether its rows and its columns shrink with the unit.
_Part = tuple[nn.Linear | nn.Conv2d, tuple[int, ...], bool, bool]


def time_units(model: nn.Module, units: Sequence[Unit], batch: Tensor, *, progress: Progress = silent) -> LatencyTable:
    """Return the times of `units` at their aligned widths, for batches of the shape of `batch` (b, c, h, w).

    Layers of the same shapes are copied and timed once, without the rest of the model. `model` isn't changed.
    """
    names = {name for unit in units for name in unit.members}
    shapes: dict[str, tuple[int, ...]] = {}
    watched = watching(model, names, before=lambda name, inputs: shapes.setdefault(name, tuple(inputs.shape)))
    with preserving_state(model), torch.inference_mode(), watched:
        model.eval()
        model(pixel_values=batch)
    timed: dict[tuple[object, ...], WidthSamples] = {}
    samples: dict[str, WidthSamples] = {}
    for number, unit in enumerate(units):
        readers = (unit.consumer, *unit.side_readers)
        parts: list[_Part] = []
        for name in (*unit.producers, *unit.inner, *readers):
            layer, shape = model.get_submodule(name), shapes.get(name)
            if isinstance(layer, (nn.Linear, nn.Conv2d)) and shape is not None:
                # On the way to the consumer only a grouped layer reads the unit's channels; others compute weights for them.
                grouped = name in unit.inner and isinstance(layer, nn.Conv2d) and layer.groups > 1
                parts.append((layer, shape, name not in readers, name in readers or grouped))
        key = (unit.width, unit.step, *((layer.extra_repr(), *others) for layer, *others in parts))
        if key not in timed:
            timed[key] = _time_widths(unit, parts, batch.device)
        samples[unit.name] = timed[key]
        progress("timing widths", number + 1, len(units))
    return fit_latency_table(units, samples)


def _time_widths(unit: Unit, parts: Sequence[_Part], device: torch.device) -> WidthSamples:
    """Time some widths of one unit, one after another in each repeat, until they are steady or after MAX_REPEATS."""
    on_gpu = device.type == "cuda"
    widths = [unit.width, *spread_evenly(aligned_widths(unit.width, unit.step)[::-1], NUM_TIMED - 1)]
    with torch.inference_mode():
        calls = {width: list(_calls(unit, parts, width, device)) for width in widths}
        clocks = {width: _gpu_clock(each) if on_gpu else partial(_time_calls, each) for width, each in calls.items()}
        ms: dict[int, list[float]] = {width: [] for width in widths}
        waited: list[float] = []
        for clock in [*clocks.values()] * (GPU_WARM_UP if on_gpu else WARM_UP):
            clock()
        while True:
            for width, clock in [*clocks.items()] * NUM_REPEATS:
                elapsed_ms, share = clock()
                ms[width].append(elapsed_ms)
                waited.append(share)
            samples = WidthSamples(ms, waited=float(np.median(waited)))
            if samples.is_steady or len(ms[unit.width]) == MAX_REPEATS:
                return samples


def _calls(unit: Unit, parts: Sequence[_Part], width: int, device: torch.device) -> Iterator[Callable[[], Any]]:
    """Yield calls of layers of a unit's shapes at one width, and of its attention if it has heads."""
    share, on_gpu = width / unit.width, device.type == "cuda"
    # On a GPU the deployed precision, whose times float32's don't predict.
    kind: Any = {"device": device, "dtype": torch.bfloat16 if on_gpu else torch.float32}
    for layer, full_shape, has_rows, has_columns in parts:
        axis, shape = 1 if isinstance(layer, nn.Conv2d) else -1, list(full_shape)
        shape[axis] = round(shape[axis] * share) if has_columns else shape[axis]
        weight, resized = layer.weight.detach(), copy.deepcopy(layer)
        weight = weight[: round(len(weight) * share)] if has_rows else weight
        if isinstance(resized, nn.Conv2d) and resized.groups > 1:
            resized.groups = round(resized.groups * share) if has_columns else resized.groups
        elif has_columns:
            weight = weight[:, : shape[axis]]
        resized.weight = nn.Parameter(weight.contiguous())
        if has_bias(layer):
            resized.bias = nn.Parameter(torch.zeros(len(weight)))
        resized, inputs = resized.to(**kind), torch.randn(shape, **kind)
        if on_gpu and len(shape) == 4:
            # The layout of deployed convolutions on CUDA.
            channels_last: Any = {"memory_format": torch.channels_last}
            resized, inputs = resized.to(**channels_last), inputs.contiguous(**channels_last)
        yield partial(resized, inputs)
    if unit.kind is schemas.UnitKind.HEADS:
        # The last producer makes the values: if attention reduces their tokens, as PVT's, the consumer reads more of them.
        *outer, num_queries, channels = parts[-1][1]
        rows, size = math.prod(outer), max(channels // unit.width, 1)
        num_keys = max(math.prod(parts[len(unit.producers) - 1][1][:-1]) // rows, 1)
        queries, keys = (torch.randn((rows, width, tokens, size), **kind) for tokens in (num_queries, num_keys))
        yield partial(F.scaled_dot_product_attention, queries, keys, keys)


def _time_calls(calls: Sequence[Callable[[], Any]]) -> tuple[float, float]:
    """Return the calls' milliseconds, and the share in which this thread had no core or waited.

    Torch's threads wait for one another by spinning, which uses a core, unless one of them isn't scheduled for long.
    """
    used, started = time.thread_time(), time.perf_counter()
    for call in calls:
        call()
    elapsed = max(time.perf_counter() - started, 1e-9)
    used = time.thread_time() - used
    return elapsed * 1e3, max(1 - used / elapsed, 0.0)


def _gpu_clock(calls: Sequence[Callable[[], Any]]) -> Callable[[], tuple[float, float]]:
    """Return a function that returns the calls' milliseconds by events, from a CUDA graph that repeats them 20 times.

    Launched one by one, small layers take as long at every width; deployed graphs have no such overhead either.
    """
    current, side, graph = torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.CUDAGraph()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    # A graph holds only the addresses of weights and inputs: `calls`, and so the clock, must keep them alive.
    def enqueue() -> None:
        for call in [*calls] * GRAPH_REPEATS:
            call()

    side.wait_stream(current)
    with torch.cuda.stream(side):
        # In their first calls libraries choose kernels and allocate workspaces, which no capture allows.
        for call in [*calls] * 3:
            call()
    current.wait_stream(side)
    with torch.cuda.graph(graph):
        enqueue()

    def clock(_keep_alive: Callable[[], None] = enqueue) -> tuple[float, float]:
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        # The GPU's work needs no core of this machine; events may be too coarse for it.
        return max(begin.elapsed_time(end) / GRAPH_REPEATS, 1e-6), 0.0

    return clock
