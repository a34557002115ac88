"""Width samples: what one shape took at some widths, repeat by repeat, when, and on how busy a machine; kept in a file.

They are kept raw, so that what is drawn from them later, medians or differences within a repeat, isn't decided when they
are taken.
"""

import math
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import numpy as np
from filelock import FileLock
from pydantic import Field, ValidationError, model_validator

from profiling_agent.documents import DocumentError, read_record
from profiling_agent.files import sweep, write_text
from profiling_agent.records import Record

VERSION = 2
# With one call of each width to warm up, nine calls a width where nothing disturbs.
NUM_REPEATS, MAX_REPEATS = 8, 24
# Calls beside which a core was free spread by 0.005 to 0.05 and waited for nothing; beside two spinning processes they spread by
# 0.04 to 0.4, or waited for 30 to 70% of the time (docs/facts.md, "A latency table on a busy machine").
MAX_SPREAD, MAX_WAITED = 0.05, 0.1
# Processor and libraries are in the file's name; drivers, cooling and neighbours change within weeks.
MAX_AGE_S = 30 * 24 * 3600.0
# Of normal samples the median's standard error is 1.253 / sqrt(n) standard deviations, and the quartiles are 1.349 apart.
ERROR_BY_QUARTILES = 0.93
# The clock counts nanoseconds, and no layer takes a week.
MIN_MS, MAX_MS = 1e-6, 1e9

Number = Annotated[float, Field(strict=True)]
Share = Annotated[float, Field(strict=True, ge=0, le=1)]
Sample = Annotated[float, Field(strict=True, ge=MIN_MS, le=MAX_MS)]


class WidthSamples(Record):
    """Milliseconds of one shape by width, a sample for each repeat: the widths of one repeat were timed right after another."""

    taken: Number = Field(description="seconds since 1970, by the machine's clock")
    waited: Share = Field(
        description="share of a call in which its thread had no core or waited for one that had none; median"
    )
    ms: dict[int, tuple[Sample, ...]]

    @model_validator(mode="after")
    def _check_repeats(self) -> Self:
        counts = {len(samples) for samples in self.ms.values()}
        if len(counts) != 1 or not NUM_REPEATS <= min(counts) <= MAX_REPEATS:
            raise ValueError(f"ms: every width needs as many samples, {NUM_REPEATS} to {MAX_REPEATS} (got {counts})")
        return self

    @classmethod
    def taken_now(cls, ms: Mapping[int, Sequence[float]], *, waited: float) -> Self:
        """Return samples as taken just now, on the machine as it is now."""
        bounded = {width: tuple(min(max(one, MIN_MS), MAX_MS) for one in samples) for width, samples in ms.items()}
        return cls(taken=time.time(), waited=waited, ms=bounded)

    @property
    def is_fresh(self) -> bool:
        """Return whether they are of the last thirty days: a time to come was told by a clock that was wrong."""
        return 0 <= time.time() - self.taken <= MAX_AGE_S

    @property
    def spread(self) -> float:
        """Return the standard error of a width's median by its quartiles, relative to it; the median of all widths."""
        low, middle, high = np.quantile(list(self.ms.values()), (0.25, 0.5, 0.75), axis=1)
        count = len(next(iter(self.ms.values())))
        return float(np.median(ERROR_BY_QUARTILES * (high - low) / (math.sqrt(count) * middle)))

    @property
    def is_disturbed(self) -> bool:
        """Return whether most calls waited for a core: times then tell more of the scheduler than of the widths."""
        return self.waited > MAX_WAITED

    @property
    def is_steady(self) -> bool:
        """Return whether there is no need to time it again: neither disturbed nor of a wide spread."""
        return not self.is_disturbed and self.spread <= MAX_SPREAD


class _File(Record):
    version: Literal[2]
    shapes: dict[str, Any]


def read_samples(path: Path) -> dict[str, WidthSamples]:
    """Return the fresh samples of a file, by shape; a file that is damaged, or of another version, knows nothing."""
    try:
        found = read_record(_File, path).shapes
    except (OSError, DocumentError):
        return {}
    known: dict[str, WidthSamples] = {}
    for shape, value in found.items():
        try:
            samples = WidthSamples.model_validate(value)
        except ValidationError:
            continue
        if samples.is_fresh:
            known[shape] = samples
    return known


def add_samples(path: Path, shape: str, samples: WidthSamples) -> None:
    """Add the samples of a shape to the file; where it can't be written, they are taken again next time."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(path.with_suffix(".lock")):
            sweep(path.parent, path.name)
            known = _File(version=VERSION, shapes=read_samples(path) | {shape: samples})
            write_text(path, known.model_dump_json())
    except OSError:
        return
