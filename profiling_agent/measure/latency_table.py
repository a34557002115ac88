"""Latency table: milliseconds of each unit at each width on this machine, every distinct shape timed once."""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from scipy import stats
from scipy.optimize import isotonic_regression
from torch import Tensor, nn
from torch.nn import functional as F

from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.modules import has_bias, preserving_state, watching
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.schemas import Record, Unit, UnitKind

# With one warm-up call, nine calls a width if nothing disturbs them.
NUM_REPEATS, MAX_REPEATS = 8, 24
# Calls with a free core spread by 0.005 to 0.05 and waited for nothing; next to two spinning processes they spread by 0.04
# to 0.4, or waited for 30 to 70% of the time (docs/facts.md, "A latency table on a busy machine").
MAX_SPREAD, MAX_WAITED = 0.05, 0.1
# Of normal samples the median's standard error is 1.253 / sqrt(n) standard deviations, and the quartiles are 1.349 apart.
ERROR_BY_QUARTILES = 0.93
# Timed widths of one shape, the full one among them; those between are interpolated. A second call still takes a fifth
# longer than later ones, which doesn't affect the median of eight.
NUM_TIMED, WARM_UP = 9, 1
# On a GPU: repeats of each call in a graph, and rounds through the widths before they are timed.
GRAPH_REPEATS, GPU_WARM_UP = 20, 5
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
        """Return the relative standard error of a width's median by its quartiles; the median over widths."""
        low, middle, high = np.quantile(list(self.ms.values()), (0.25, 0.5, 0.75), axis=1)
        count = len(next(iter(self.ms.values())))
        return float(np.median(ERROR_BY_QUARTILES * (high - low) / (math.sqrt(count) * middle)))

    @property
    def is_disturbed(self) -> bool:
        """Return whether most calls waited for a core: times then depend more on the scheduler than on the widths."""
        return self.waited > MAX_WAITED

    @property
    def is_steady(self) -> bool:
        """Return whether they needn't be timed again: not disturbed, and of a small spread."""
        return not self.is_disturbed and self.spread <= MAX_SPREAD


class LatencyTable(Record):
    """Milliseconds of one batch by unit and width, falling with the width.

    `ruled_out` has the widths shown to save less than MIN_GAIN of the proportional time, `unsteady` the units timed while the machine was too busy.
    """

    times: Mapping[str, Mapping[int, float]]
    ruled_out: Mapping[str, frozenset[int]] = {}
    unsteady: frozenset[str] = frozenset()

    def of(self, unit: Unit) -> float | None:
        """Return the milliseconds of `unit` unpruned; None if untimed."""
        times = self.times.get(unit.name)
        return times[unit.width] if times else None

    def saved(self, unit: Unit, keep: int) -> float | None:
        """Return the milliseconds saved by cutting `unit` to `keep`, 0 if shown to be too few; None if untimed.

        Otherwise it is at least the smallest saving that pays: noise that hides a saving must not forbid it.
        """
        times = self.times.get(unit.name)
        if times is None:
            return None
        if keep in self.ruled_out.get(unit.name, ()):
            return 0.0
        full = times[unit.width]
        return max(full - times[keep], MIN_GAIN * (1 - keep / unit.width) * full)


def draw_table(units: Sequence[Unit], samples: Mapping[str, WidthSamples]) -> LatencyTable:
    """Return the table from the samples of `units` by name: medians, and what differences within a repeat show."""
    return LatencyTable(
        times={unit.name: _interpolate(unit, samples[unit.name]) for unit in units},
        ruled_out={unit.name: _widths_ruled_out(unit, samples[unit.name]) for unit in units},
        unsteady=frozenset(unit.name for unit in units if not samples[unit.name].is_steady),
    )


def _interpolate(unit: Unit, samples: WidthSamples) -> dict[int, float]:
    """Return a time for every aligned width, made to rise with the width: any fall is noise."""
    widths = sorted(samples.ms)
    rising = isotonic_regression([np.median(samples.ms[width]) for width in widths]).x
    all_widths = [*aligned_widths(unit.width, unit.step), unit.width]
    return dict(zip(all_widths, map(float, np.interp(all_widths, widths, rising)), strict=True))


def _widths_ruled_out(unit: Unit, samples: WidthSamples) -> frozenset[int]:
    """Return the widths that save less than MIN_GAIN of the proportional time, by a sign test within each repeat.

    A slow repeat cancels out in them, and an interrupted call counts as one repeat, however long it took. If most calls
    were interrupted, nothing is shown.
    """
    if samples.is_disturbed:
        return frozenset()
    widths = sorted(samples.ms)
    repeats = np.array([samples.ms[width] for width in widths]).T
    ruled_out: set[int] = set()
    for keep in aligned_widths(unit.width, unit.step):
        narrow = np.array([np.interp(keep, widths, repeat) for repeat in repeats])
        enough = repeats[:, -1] * (1 - MIN_GAIN * (1 - keep / unit.width))
        if stats.binom.cdf(np.count_nonzero(narrow <= enough), len(repeats), 0.5) <= MAX_ERROR:
            ruled_out.add(keep)
    return frozenset(ruled_out)


def time_units(model: nn.Module, units: Sequence[Unit], batch: Tensor, *, progress: Progress = silent) -> LatencyTable:
    """Return the times of `units` at their aligned widths, for batches of the shape of `batch` (b, c, h, w).

    Layers of the same shapes are built anew and timed once, without the rest of the model. `model` isn't changed.
    """
    shapes = _input_shapes(model, units, batch)
    timed: dict[tuple[object, ...], WidthSamples] = {}
    samples: dict[str, WidthSamples] = {}
    for number, unit in enumerate(units):
        parts = _parts(model, unit, shapes)
        key = (unit.width, unit.step, *(part.key for part in parts))
        if key not in timed:
            timed[key] = _time_widths(unit, parts, batch)
        samples[unit.name] = timed[key]
        progress("timing widths", number + 1, len(units))
    return draw_table(units, samples)


def spread_evenly(widths: Sequence[int], max_count: int) -> list[int]:
    """Return up to `max_count` of `widths`, evenly spread and including the last one."""
    count = min(max_count, len(widths))
    return [widths[(index + 1) * len(widths) // count - 1] for index in range(count)]


def _input_shapes(model: nn.Module, units: Sequence[Unit], batch: Tensor) -> dict[str, tuple[int, ...]]:
    names = {name for unit in units for name in unit.members}
    shapes: dict[str, tuple[int, ...]] = {}

    def record(name: str, inputs: Tensor) -> None:
        shapes.setdefault(name, tuple(inputs.shape))

    with preserving_state(model), torch.inference_mode(), watching(model, names, before=record):
        model.eval()
        model(pixel_values=batch)
    return shapes


@dataclass(frozen=True, slots=True)
class _Part:
    """A layer of a unit: the shape of its input, and which of its sides shrinks with the unit."""

    layer: nn.Linear | nn.Conv2d
    shape: tuple[int, ...]
    rows: bool
    columns: bool

    @property
    def key(self) -> str:
        return f"{self.layer.extra_repr()} {self.shape} {int(self.rows)}{int(self.columns)}"

    def at(self, share: float, device: torch.device) -> tuple[nn.Module, Tensor]:
        """Return the layer at a share of its width, and an input for it."""
        layer, shape = self.layer, list(self.shape)
        axis = 1 if isinstance(layer, nn.Conv2d) else -1
        shape[axis] = round(shape[axis] * share) if self.columns else shape[axis]
        rows = round(len(layer.weight) * share) if self.rows else len(layer.weight)
        resized: nn.Module
        if isinstance(layer, nn.Linear):
            resized = nn.Linear(shape[axis], rows, bias=has_bias(layer))
        else:
            groups = round(layer.groups * share) if layer.groups > 1 and self.columns else layer.groups
            geometry: dict[str, Any] = {name: getattr(layer, name) for name in ("stride", "padding", "dilation")}
            kernel: Any = layer.kernel_size
            resized = nn.Conv2d(shape[axis], rows, kernel, groups=groups, bias=has_bias(layer), **geometry)
        inputs = torch.randn(shape, device=device, dtype=_dtype(device))
        resized = resized.to(device, _dtype(device))
        if device.type == "cuda" and len(shape) == 4:
            # The layout of deployed convolutions on CUDA.
            channels_last: Any = {"memory_format": torch.channels_last}
            return resized.to(**channels_last), inputs.contiguous(**channels_last)
        return resized, inputs


def _dtype(device: torch.device) -> torch.dtype:
    """Return the timed precision: on a GPU the deployed one, which float32's times don't predict."""
    return torch.bfloat16 if device.type == "cuda" else torch.float32


def _parts(model: nn.Module, unit: Unit, shapes: Mapping[str, tuple[int, ...]]) -> list[_Part]:
    readers = (unit.consumer, *unit.side_readers)
    parts: list[_Part] = []
    for name in (*unit.producers, *unit.inner, *readers):
        layer, shape = model.get_submodule(name), shapes.get(name)
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and shape is not None:
            # On the way to the consumer only a grouped layer reads the unit's channels; others compute weights for them.
            grouped = name in unit.inner and isinstance(layer, nn.Conv2d) and layer.groups > 1
            parts.append(_Part(layer, shape, rows=name not in readers, columns=name in readers or grouped))
    return parts


def _calls(unit: Unit, parts: Sequence[_Part], width: int, device: torch.device) -> Iterator[Callable[[], Any]]:
    for part in parts:
        layer, inputs = part.at(width / unit.width, device)
        yield partial(layer, inputs)
    if unit.kind is UnitKind.HEADS:
        # The last producer makes the values: if attention reduces their tokens, as PVT's, the consumer reads more of them.
        *outer, num_queries, channels = parts[-1].shape
        rows, size = math.prod(outer), max(channels // unit.width, 1)
        num_keys = max(math.prod(parts[len(unit.producers) - 1].shape[:-1]) // rows, 1)
        queries, keys = (
            torch.randn((rows, width, tokens, size), device=device, dtype=_dtype(device))
            for tokens in (num_queries, num_keys)
        )
        yield partial(F.scaled_dot_product_attention, queries, keys, keys)


def _time_widths(unit: Unit, parts: Sequence[_Part], batch: Tensor) -> WidthSamples:
    """Time some widths of one unit, one after another in each repeat, until they are steady or after MAX_REPEATS."""
    prepare = _gpu_clock if batch.is_cuda else _cpu_clock
    widths = [unit.width, *spread_evenly(aligned_widths(unit.width, unit.step)[::-1], NUM_TIMED - 1)]
    with torch.inference_mode():
        clocks = {width: prepare(list(_calls(unit, parts, width, batch.device))) for width in widths}
        ms: dict[int, list[float]] = {width: [] for width in widths}
        waited: list[float] = []
        for clock in [*clocks.values()] * (GPU_WARM_UP if batch.is_cuda else WARM_UP):
            clock()
        while True:
            for width, clock in [*clocks.items()] * NUM_REPEATS:
                elapsed_ms, share = clock()
                ms[width].append(elapsed_ms)
                waited.append(share)
            samples = WidthSamples(ms, waited=float(np.median(waited)))
            if samples.is_steady or len(ms[unit.width]) == MAX_REPEATS:
                return samples


def _cpu_clock(calls: Sequence[Callable[[], Any]]) -> Callable[[], tuple[float, float]]:
    """Return a function that returns the calls' milliseconds, and the share in which this thread had no core or waited.

    Torch's threads wait for one another by spinning, which uses a core, unless one of them isn't scheduled for long.
    """

    def clock() -> tuple[float, float]:
        used, started = time.thread_time(), time.perf_counter()
        for call in calls:
            call()
        elapsed = max(time.perf_counter() - started, 1e-9)
        used = time.thread_time() - used
        return elapsed * 1e3, max(1 - used / elapsed, 0.0)

    return clock


def _gpu_clock(calls: Sequence[Callable[[], Any]]) -> Callable[[], tuple[float, float]]:
    """Return a function that returns the calls' milliseconds by events, from a CUDA graph that repeats them 20 times.

    Launched one by one, small layers take as long at every width; deployed graphs have no such overhead either. Calls that
    can't be captured are enqueued without waiting.
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
    replay = graph.replay
    try:
        with torch.cuda.graph(graph):
            enqueue()
    except RuntimeError as error:
        # A failed capture leaves its stream current.
        torch.cuda.set_stream(current)
        torch.cuda.synchronize()
        warnings.warn(f"layers are timed without a CUDA graph: {error}", RuntimeWarning, stacklevel=2)
        replay = enqueue

    def clock(_keep_alive: Callable[[], None] = enqueue) -> tuple[float, float]:
        begin.record()
        replay()
        end.record()
        end.synchronize()
        # The GPU's work needs no core of this machine; events may be too coarse for it.
        return max(begin.elapsed_time(end) / GRAPH_REPEATS, 1e-6), 0.0

    return clock
