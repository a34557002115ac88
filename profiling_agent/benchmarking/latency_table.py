"""Latency table: what each unit takes at each width on this machine; every distinct shape is timed once and remembered."""

import hashlib
import json
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from filelock import FileLock
from scipy.optimize import isotonic_regression
from torch import Tensor, nn
from torch.nn import functional as F

from profiling_agent.cache import cache_folder
from profiling_agent.documents import read_json
from profiling_agent.files import write_text
from profiling_agent.modules.hooks import watching
from profiling_agent.modules.inference import left_as_found
from profiling_agent.progress import Progress, silent
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.records import Unit, UnitKind
from profiling_agent.reproducibility import environment

# Widths of one shape that are timed, the full one among them; those between are interpolated.
NUM_TIMED, NUM_REPEATS, WARM_UP = 9, 7, 2
# A width is an option only if it brings at least this share of what time proportional to the width would: on a
# staircase (oneDNN blocks 16 channels) the widths inside a step bring nothing (docs/facts.md, "Widths that bring time").
MIN_GAIN = 0.25

Times = Mapping[int, float]
Shape = tuple[int, int, int, int]


@dataclass(frozen=True)
class LatencyTable:
    """Milliseconds of one batch by unit and width, falling with the width."""

    times: Mapping[str, Times]

    def of(self, unit: Unit) -> float | None:
        """Return what `unit` takes unpruned; None if untimed."""
        times = self.times.get(unit.name)
        return times[unit.width] if times else None

    def saved(self, unit: Unit, keep: int) -> float | None:
        """Return what cutting `unit` to `keep` saves, 0 where that is too little to pay; None if untimed."""
        times = self.times.get(unit.name)
        if times is None:
            return None
        full, gone = times[unit.width], 1 - keep / unit.width
        saved = full - times[keep]
        return saved if saved >= MIN_GAIN * gone * full else 0.0


def time_units(
    model: nn.Module, units: Sequence[Unit], batch: Tensor, *, file: Path | None = None, progress: Progress = silent
) -> LatencyTable:
    """Return the times of `units` at their aligned widths, for a batch of the size of `batch` (b, c, h, w).

    Layers of the same shapes are built anew and timed alone, without the rest of the model. What has been timed before
    on this machine is read from `file`, by default in the cache folder, and trusted only as far as it is a time.
    `model` is left as it was found.
    """
    path = file or cache_folder() / "latency" / f"{_fingerprint(batch.device)}.json"
    known, shapes = _read(path), _shapes(model, units, batch)
    times: dict[str, Times] = {}
    for number, unit in enumerate(units):
        parts = _parts(model, unit, shapes)
        key = json.dumps([unit.width, unit.step, *(part.key for part in parts)])
        if known.get(key, {}).keys() != set(_chosen(unit)):
            known[key] = _timed(unit, parts, batch)
            _write(path, {key: known[key]})
        times[unit.name] = _filled(unit, known[key])
        progress("timing widths", number + 1, len(units))
    return LatencyTable(times)


@dataclass(frozen=True, slots=True)
class _Part:
    """A layer of a unit: the shape that it reads, and which of its sides shrinks with the unit."""

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
        has_bias = dict(layer.named_parameters()).get("bias") is not None
        made: Any
        if isinstance(layer, nn.Linear):
            made = nn.Linear(shape[axis], rows, bias=has_bias)
        else:
            groups = round(layer.groups * share) if layer.groups > 1 and self.columns else layer.groups
            like: dict[str, Any] = {name: getattr(layer, name) for name in ("stride", "padding", "dilation")}
            kernel: Any = layer.kernel_size
            made = nn.Conv2d(shape[axis], rows, kernel, groups=groups, bias=has_bias, **like)
        return made.to(device), torch.randn(shape, device=device)


def _shapes(model: nn.Module, units: Sequence[Unit], batch: Tensor) -> dict[str, tuple[int, ...]]:
    names = {name for unit in units for name in unit.members}
    shapes: dict[str, tuple[int, ...]] = {}

    def note(name: str, given: Tensor) -> None:
        shapes.setdefault(name, tuple(given.shape))

    with left_as_found(model), torch.inference_mode(), watching(model, names, before=note):
        model.eval()
        model(pixel_values=batch)
    return shapes


def _parts(model: nn.Module, unit: Unit, shapes: Mapping[str, tuple[int, ...]]) -> list[_Part]:
    readers = (unit.consumer, *unit.side_readers)
    parts: list[_Part] = []
    for name in (*unit.producers, *unit.inner, *readers):
        layer, shape = model.get_submodule(name), shapes.get(name)
        if isinstance(layer, (nn.Linear, nn.Conv2d)) and shape is not None:
            # On the way to the consumer, only a layer in groups reads the unit's channels; others make weights for them.
            grouped = name in unit.inner and isinstance(layer, nn.Conv2d) and layer.groups > 1
            parts.append(_Part(layer, shape, rows=name not in readers, columns=name in readers or grouped))
    return parts


def _chosen(unit: Unit) -> list[int]:
    """Return the widths of a unit that are timed."""
    widths = aligned_widths(unit.width, unit.step)[::-1]
    count = min(NUM_TIMED - 1, len(widths))
    return [unit.width, *(widths[(index + 1) * len(widths) // count - 1] for index in range(count))]


def _timed(unit: Unit, parts: Sequence[_Part], batch: Tensor) -> dict[int, float]:
    """Time some widths of one unit, one after another in each repeat; return the median of each."""
    runs = {width: list(_runs(unit, parts, width, batch.device)) for width in _chosen(unit)}
    samples: dict[int, list[float]] = {width: [] for width in runs}
    with torch.inference_mode():
        for number in range(WARM_UP + NUM_REPEATS):
            for width, calls in runs.items():
                started = time.perf_counter()
                for call in calls:
                    call()
                if batch.is_cuda:
                    torch.cuda.synchronize(batch.device)
                if number >= WARM_UP:
                    samples[width].append((time.perf_counter() - started) * 1e3)
    return {width: median(times) for width, times in samples.items()}


def _runs(unit: Unit, parts: Sequence[_Part], width: int, device: torch.device) -> Iterator[Any]:
    for part in parts:
        layer, inputs = part.at(width / unit.width, device)
        yield partial(layer, inputs)
    if unit.kind is UnitKind.HEADS:
        queries, keys = _attended(unit, parts, width)
        heads = torch.randn(queries, device=device), torch.randn(keys, device=device)
        yield partial(F.scaled_dot_product_attention, heads[0], heads[1], heads[1])


def _attended(unit: Unit, parts: Sequence[_Part], width: int) -> tuple[Shape, Shape]:
    """Return the shapes of queries and of keys, (images or windows, heads, tokens, channels), at a number of heads.

    The last producer makes the values: where attention reduces their tokens, as PVT's, the consumer reads more of them.
    """
    *outer, tokens, channels = parts[-1].shape
    rows, size = math.prod(outer), max(channels // unit.width, 1)
    attended = max(math.prod(parts[len(unit.producers) - 1].shape[:-1]) // rows, 1)
    return (rows, width, tokens, size), (rows, width, attended, size)


def _filled(unit: Unit, measured: Times) -> dict[int, float]:
    """Return a time for every aligned width, made to rise with the width: what falls is noise."""
    widths = sorted(measured)
    rising = isotonic_regression([measured[width] for width in widths]).x
    wanted = [*aligned_widths(unit.width, unit.step), unit.width]
    return dict(zip(wanted, map(float, np.interp(wanted, widths, rising)), strict=True))


def _fingerprint(device: torch.device) -> str:
    here = environment()
    named = torch.cuda.get_device_name(device) if device.type == "cuda" else here.cpu
    said = [named, here.cpu_flags, torch.get_num_threads(), here.libraries["torch"]]
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _read(path: Path) -> dict[str, dict[int, float]]:
    """Return what is known; a file that is damaged is a file that knows nothing."""
    try:
        found = read_json(path)
        return {
            str(key): {int(width): float(ms) for width, ms in times.items()}
            for key, times in found.items()
            if times and all(math.isfinite(ms) and ms > 0 for ms in times.values())
        }
    except (OSError, ValueError, TypeError, AttributeError, OverflowError):
        return {}


def _write(path: Path, new: Mapping[str, Times]) -> None:
    """Add `new` to the file; where it can't be written, it is timed again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            write_text(path, json.dumps(_read(path) | dict(new)))
    except OSError:
        return
