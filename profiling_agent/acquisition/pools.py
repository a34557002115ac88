"""Pools: the labelled images of one split that can be drawn from, all of a local one, an excerpt of a stream."""

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from profiling_agent.acquisition.columns import Columns, is_label
from profiling_agent.acquisition.data import OpenedData, reading
from profiling_agent.acquisition.sampling import ClassQuotas
from profiling_agent.errors import AcquisitionError
from profiling_agent.progress import Progress

UNMAPPED = -1
PROGRESS_EVERY = 50


class Pool(Protocol):
    """Rows that can be drawn, by number."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Return the model's class of each row, or UNMAPPED."""
        ...

    def fetch(self, rows: Sequence[int], progress: Progress) -> list[bytes | None]:
        """Return the encoded images of `rows`, in their order; None where there are no bytes."""
        ...

    def digests(self, rows: Sequence[int], progress: Progress) -> list[bytes | None]:
        """Return the SHA-256 of the encoded image of each of `rows`, in their order; None where there are no bytes."""
        ...


@dataclass(frozen=True, slots=True)
class LocalPool:
    """Every row of a split on this machine: labels are read first, images only when drawn."""

    labels: NDArray[np.int64]
    data: OpenedData
    split: str
    image_column: str

    def fetch(self, rows: Sequence[int], progress: Progress) -> list[bytes | None]:
        """Read the split's image column once, up to the last row that is wanted."""
        images = dict(self._read(rows, progress))
        return [images.get(row) for row in rows]

    def digests(self, rows: Sequence[int], progress: Progress) -> list[bytes | None]:
        """Read it once, a table at a time, and keep no image."""
        found = {row: _digest(image) for row, image in self._read(rows, progress)}
        return [found.get(row) for row in rows]

    def _read(self, rows: Sequence[int], progress: Progress) -> Iterator[tuple[int, bytes | None]]:
        wanted = np.unique(np.asarray(rows, dtype=np.int64))
        start, done = 0, 0
        for table in self.data.tables(self.split, [self.image_column]):
            hits = wanted[(wanted >= start) & (wanted < start + len(table))]
            picked = table[self.image_column].take(hits - start).to_pylist()
            with reading(self.data.query.dataset):
                images = self.data.images.encoded(picked)
            yield from zip(hits.tolist(), images, strict=True)
            start, done = start + len(table), done + len(hits)
            progress(f"reading images of {self.split}", done, len(wanted))
            if done == len(wanted):
                break


@dataclass(frozen=True, slots=True)
class StreamedPool:
    """What was kept of a shuffled stream; row numbers count the images in the order they were kept."""

    labels: NDArray[np.int64]
    images: list[bytes | None]

    def fetch(self, rows: Sequence[int], progress: Progress) -> list[bytes | None]:  # noqa: ARG002  all is here
        """Return what is already in memory."""
        return [self.images[row] for row in rows]

    def digests(self, rows: Sequence[int], progress: Progress) -> list[bytes | None]:  # noqa: ARG002  all is here
        """Compute them of what is already in memory."""
        return [_digest(self.images[row]) for row in rows]


def _digest(image: bytes | None) -> bytes | None:
    return hashlib.sha256(image).digest() if image else None


def _stream_pool(data: OpenedData, split: str, columns: Columns, target: int, progress: Progress) -> StreamedPool:
    quotas = ClassQuotas(target, len(set(columns.class_of.values())))
    num_names = columns.num_names(data.features(split))
    kept: dict[int, tuple[Any, int]] = {}
    for key, (cell, raw) in enumerate(data.stream(split, columns.image, columns.label, data.query.seed)):
        if (label := _class_of(raw, columns, num_names)) == UNMAPPED:
            continue
        kept[key] = (cell, label)
        for dropped in quotas.offer(key, label):
            del kept[dropped]
        if key % PROGRESS_EVERY == 0:
            progress(f"streaming images of {split}", min(len(kept), target), target)
        if quotas.is_full:
            break
    drawn = [kept[key] for key in quotas.drawn()]
    with reading(data.query.dataset):
        images = data.images.encoded(cell for cell, _ in drawn)
    return StreamedPool(labels=np.asarray([label for _, label in drawn], dtype=np.int64), images=images)


def open_pool(data: OpenedData, split: str, columns: Columns, *, target: int, progress: Progress) -> Pool:
    """Return what can be drawn from a split: all of a local one, about `target` images of one on the Hub."""
    if not data.is_local:
        return _stream_pool(data, split, columns, target, progress)
    progress(f"reading labels of {split}", 0, 0)
    num_names = columns.num_names(data.features(split))
    labels = [_class_of(raw, columns, num_names) for raw in data.labels(split, columns.label)]
    return LocalPool(np.asarray(labels, dtype=np.int64), data, split, columns.image)


def _class_of(raw: Any, columns: Columns, num_names: int | None) -> int:
    """Return the model's class of a raw label, or UNMAPPED; AcquisitionError where the data set itself has no name for it."""
    if num_names is not None and is_label(raw) and not 0 <= raw < num_names:
        raise AcquisitionError(
            f"label column {columns.label!r} holds {raw}, but the data set names {num_names} classes, 0 to {num_names - 1}: "
            "correct its labels or its names, or name another with label_column"
        )
    return columns.class_of.get(raw, UNMAPPED)
