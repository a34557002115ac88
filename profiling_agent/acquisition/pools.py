"""Pools: the labelled images of one split that can be drawn from, all of a local one, an excerpt of a stream.

Photographs are megabytes each and a draw has thousands, so that no pool holds more than a few of them in memory, but for what
`datasets` holds of a stream that it shuffles.
"""

import hashlib
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol, Self

import numpy as np
from numpy.typing import NDArray

from profiling_agent.acquisition.columns import MAX_STREAMED_LABELS, Columns, is_label
from profiling_agent.acquisition.data import BATCH_IMAGES, OpenedData, reading
from profiling_agent.acquisition.sampling import ClassQuotas
from profiling_agent.documents import MAX_QUOTED
from profiling_agent.errors import AcquisitionError
from profiling_agent.progress import Progress

UNMAPPED = -1
PROGRESS_EVERY = 50
# No system opens a path of more; a table may say anything.
MAX_LOCATION = 4096


class Pool(Protocol):
    """Rows that can be drawn, by number."""

    @property
    def labels(self) -> NDArray[np.int64]:
        """Return the model's class of each row, or UNMAPPED."""
        ...

    def fetch(self, rows: Sequence[int], progress: Progress) -> Iterator[bytes | None]:
        """Yield the encoded images of `rows`, in their order, a few in memory; None where there are no bytes."""
        ...

    def digests(self, rows: Sequence[int], progress: Progress) -> list[bytes | None]:
        """Return the SHA-256 of the encoded image of each of `rows`, in their order; None where there are no bytes."""
        ...

    def where(self, row: int) -> str:
        """Return how a person finds the image of a row that was read: its file, or its number where it has none."""
        ...


class _Source(NamedTuple):
    """What a cell says of where its image comes from, and whether it is read from there."""

    location: str
    is_read: bool


class _Place(NamedTuple):
    """Where in a spool an image's bytes are."""

    start: int
    size: int


class Spool:
    """Image cells that wait for their turn: bytes in a file without a name, which is gone with the process, the rest as it is.

    The file lies in `folder`, where what is drawn goes: the system's temporary folder may be memory itself.
    """

    def __init__(self, folder: Path) -> None:
        """Make the file; OSError where the folder can't be written to."""
        self.folder = folder
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  closed by __exit__
        self._size = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def put(self, cell: Any) -> Any:
        """Return what `get` makes the cell of again; bytes in it are written, OSError where they can't be."""
        held = cell.get("bytes") if isinstance(cell, dict) else cell
        if not isinstance(held, bytes):
            return cell
        place = _Place(self._size, len(held))
        self._file.seek(place.start)
        self._file.write(held)
        # A full disk is to be noticed here, and not where a data set is read.
        self._file.flush()
        self._size += place.size
        return place

    def get(self, kept: Any) -> Any:
        """Return a cell that was put here, of one with bytes these alone."""
        if not isinstance(kept, _Place):
            return kept
        self._file.seek(kept.start)
        return self._file.read(kept.size)


@dataclass(frozen=True, slots=True)
class LocalPool:
    """Every row of a split on this machine: labels are read first, images only when drawn."""

    labels: NDArray[np.int64]
    data: OpenedData
    split: str
    image_column: str
    folder: Path
    sources: dict[int, _Source] = field(default_factory=dict[int, _Source])

    def fetch(self, rows: Sequence[int], progress: Progress) -> Iterator[bytes | None]:
        """Read the split's image column once, up to the last row that is wanted.

        Images in it wait in `folder` for their turn, those that it names are opened when it comes.
        """
        with Spool(self.folder) as spool:
            kept = {row: spool.put(cell) for row, cell in self._cells(rows, progress)}
            yield from _encoded(self.data, (spool.get(kept.get(row)) for row in rows))

    def digests(self, rows: Sequence[int], progress: Progress) -> list[bytes | None]:
        """Read it once, and keep no image."""
        read: list[int] = []

        def cells() -> Iterator[Any]:
            for row, cell in self._cells(rows, progress):
                read.append(row)
                yield cell

        digests = [_digest(image) for image in _encoded(self.data, cells())]
        found = dict(zip(read, digests, strict=True))
        return [found.get(row) for row in rows]

    def where(self, row: int) -> str:
        """Return its file; of an image in a table its number, and what it is called there."""
        if (source := self.sources.get(row)) is None:
            return f"row {row}"
        name = self.data.file_name(source.location)
        return name if source.is_read else f"{name} in row {row}"

    def _cells(self, rows: Sequence[int], progress: Progress) -> Iterator[tuple[int, Any]]:
        """Yield the rows that are wanted, in the split's order, each with its cell."""
        wanted = np.unique(np.asarray(rows, dtype=np.int64))
        start, done = 0, 0
        for table in self.data.tables(self.split, [self.image_column], BATCH_IMAGES):
            column = table[self.image_column]
            for hit in wanted[(wanted >= start) & (wanted < start + len(table))].tolist():
                cell = column[hit - start].as_py()
                if (source := _source(cell)) is not None:
                    self.sources[hit] = source
                yield hit, cell
                done += 1
                if done % PROGRESS_EVERY == 0 or done == len(wanted):
                    progress(f"reading images of {self.split}", done, len(wanted))
            start += len(table)
            if done == len(wanted):
                break


@dataclass(frozen=True, slots=True)
class StreamedPool:
    """What was kept of a shuffled stream, on disk; row numbers count the images in the order they were kept."""

    labels: NDArray[np.int64]
    images: Sequence[Any]
    spool: Spool
    data: OpenedData
    sources: Sequence[_Source | None]

    def fetch(self, rows: Sequence[int], progress: Progress) -> Iterator[bytes | None]:  # noqa: ARG002  all is here
        """Yield what is already here."""
        return (self.spool.get(self.images[row]) for row in rows)

    def digests(self, rows: Sequence[int], progress: Progress) -> list[bytes | None]:
        """Compute them of what is already here."""
        return [_digest(image) for image in self.fetch(rows, progress)]

    def where(self, row: int) -> str:
        """Return its file, or what it is called in a table: its number there isn't known."""
        source = self.sources[row]
        return f"row {row}" if source is None else self.data.file_name(source.location)


def _source(cell: Any) -> _Source | None:
    location = cell.get("path") if isinstance(cell, dict) else None
    if not isinstance(location, str) or not 0 < len(location) <= MAX_LOCATION:
        return None
    return _Source(location, is_read=cell.get("bytes") is None)


def _digest(image: bytes | None) -> bytes | None:
    return hashlib.sha256(image).digest() if image else None


def _encoded(data: OpenedData, cells: Iterable[Any]) -> Iterator[bytes | None]:
    """Yield the image of each cell, one by one."""
    with reading(data.query.dataset):
        yield from data.images.encoded(cells)


def _stream_pool(
    data: OpenedData, split: str, columns: Columns, target: int, spool: Spool, progress: Progress
) -> StreamedPool:
    quotas = ClassQuotas(target, columns.num_classes)
    num_names = columns.num_names(data.features(split))
    kept: dict[int, tuple[Any, int, _Source | None]] = {}
    for key, (cell, raw) in enumerate(data.stream(split, columns.image, columns.label, data.query.seed)):
        if (label := _class_of(raw, columns, num_names)) == UNMAPPED:
            continue
        dropped = quotas.offer(key, label)
        if key not in dropped:
            kept[key] = (spool.put(cell), label, _source(cell))
        for other in dropped:
            kept.pop(other, None)
        if key % PROGRESS_EVERY == 0:
            progress(f"streaming images of {split}", min(len(kept), target), target)
        if quotas.is_full:
            break
    drawn = [kept[key] for key in quotas.drawn()]
    # What the stream only names costs a download, and is looked at more than once.
    named = (cell for cell, _, _ in drawn if not isinstance(cell, _Place))
    fetched = map(spool.put, _encoded(data, named))
    images = [cell if isinstance(cell, _Place) else next(fetched) for cell, _, _ in drawn]
    labels = np.asarray([label for _, label, _ in drawn], dtype=np.int64)
    return StreamedPool(labels, images, spool, data, [source for _, _, source in drawn])


def open_pool(data: OpenedData, split: str, columns: Columns, *, target: int, spool: Spool, progress: Progress) -> Pool:
    """Return what can be drawn from a split: all of a local one, about `target` images of one on the Hub.

    What is kept of a stream waits in `spool`, which has to stay open as long as the pool is used.
    """
    if not data.is_local:
        return _stream_pool(data, split, columns, target, spool, progress)
    progress(f"reading labels of {split}", 0, 0)
    num_names = columns.num_names(data.features(split))
    labels = [_class_of(raw, columns, num_names) for raw in data.labels(split, columns.label)]
    return LocalPool(np.asarray(labels, dtype=np.int64), data, split, columns.image, spool.folder)


def _class_of(raw: Any, columns: Columns, num_names: int | None) -> int:
    """Return the model's class of a raw label, or UNMAPPED; AcquisitionError where it is none that there may be."""
    if num_names is not None and is_label(raw) and not 0 <= raw < num_names:
        raise AcquisitionError(
            f"label column {columns.label!r} holds {raw}, but the data set names {num_names} classes, 0 to {num_names - 1}: "
            "correct its labels or its names, or name another with label_column"
        )
    if columns.known is not None and is_label(raw) and raw not in columns.known:
        raise AcquisitionError(_why_unknown(raw, columns))
    return columns.class_of.get(raw, UNMAPPED)


def _why_unknown(raw: Any, columns: Columns) -> str:
    held = f"label column {columns.label!r} holds {str(raw)[:MAX_QUOTED]!r}"
    if isinstance(raw, int):
        return f"{held}, which is no class of the model: correct its labels, or name another with label_column"
    return (
        f"{held}, which none of the first {MAX_STREAMED_LABELS} rows to evaluate on has, and of such a stream no others "
        "are read to find its classes: download the data set (hf download) and give its folder, or shuffle its rows"
    )
