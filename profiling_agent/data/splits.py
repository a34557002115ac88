"""Splits of a data set: disjoint sets of images, drawn with the run's seed and stratified by class.

Only an image's content decides its use: half of all images are for the search and half are held out, whatever the seed, the
requested number and the data set's order. So no run searches on images that another run held out.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from profiling_agent.data.dataset import (
    Columns,
    DataQuery,
    OpenedData,
    choose_columns,
    is_label,
    label_candidates,
    match_column,
    open_data,
)
from profiling_agent.data.hub import did_you_mean
from profiling_agent.data.images import FORMATS, decode_rgb, write_rows
from profiling_agent.data.labels import Matching, format_names, order_match_note
from profiling_agent.errors import AcquisitionError, CorruptImageError
from profiling_agent.lib.logs import Progress, quiet, silent
from profiling_agent.schemas import LabelMatch

TRAIN = ("train", "training")
EVALUATION = ("test", "validation", "valid", "val", "dev")
MAX_SEARCH = 2000
HELDOUT_RATIO = 4
NUM_CALIBRATION = 256
# Enough rows to skip stray unlabelled images; a test split of a competition has no label at all.
NUM_LABELS_CHECKED = 100
MAX_CORRUPT = MAX_REPEATED = 0.01
NUM_DAMAGED_SHOWN = 5
UNMAPPED = -1
# Few, as a table of photographs has hundreds of megabytes in as many rows as are read of labels.
BATCH_IMAGES = 64
PROGRESS_EVERY = 50
Rows = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSplit:
    """One set of images on disk; `num_skipped` more were drawn but could not be decoded."""

    path: Path
    source_split: str
    num_images: int
    num_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSplits:
    """Disjoint sets, labelled by the first of the matchings, and notes for readers of the results."""

    calibration: DrawnSplit
    search: DrawnSplit
    heldout: DrawnSplit
    matchings: tuple[Matching, ...]
    notes: tuple[str, ...]
    recovery: DrawnSplit | None = None

    @property
    def labels(self) -> tuple[LabelMatch, ...]:
        """Return the match of each label by the first matching."""
        return self.matchings[0].matches


def draw_splits(
    query: DataQuery, *, id2label: Mapping[int, str], folder: Path, progress: Progress = silent
) -> DrawnSplits:
    """Write calibration.parquet, search.parquet and heldout.parquet into `folder`, and recovery.parquet if requested.

    Columns are `image` (encoded bytes) and `label` (the model's class id); every prefix of a set is stratified by class.

    Raises:
        AcquisitionError: the data set can't be read, has no usable split, column or label, or too few or bad images.
    """
    with quiet(), tempfile.TemporaryDirectory(dir=folder) as cache, tempfile.TemporaryFile(dir=folder) as spool:
        data = open_data(query, cache=Path(cache), progress=progress)
        evaluation = choose_evaluation_split(data)
        columns = choose_columns(data, evaluation, id2label)
        train = next((split for split in TRAIN if split in data.splits and split != evaluation), evaluation)
        has_train = train != evaluation
        if query.num_recovery and not has_train:
            raise AcquisitionError(
                f"dataset {query.dataset!r} has no train split besides {evaluation!r}, and to recover would be to train on the "
                "images that accuracy is measured on: set recover_epochs to 0, or choose a data set that has one"
            )
        num_rows = num_images_to_read(query.num_samples, 0 if has_train else NUM_CALIBRATION)
        pool = read_pool(data, evaluation, columns, num_rows=num_rows, spool=spool, progress=progress)
        partition = pool.partition()
        search = pool.stratified(partition.search)
        calibration = search[: 0 if has_train else min(NUM_CALIBRATION, len(search) // 2)]
        search = search[len(calibration) :]
        num_search, num_heldout = evaluation_sizes(len(search), len(partition.heldout), query.num_samples, evaluation)
        heldout = pool.stratified(partition.heldout)
        parts = {"search": pool.by_content(search[:num_search]), "heldout": pool.by_content(heldout[:num_heldout])}
        if not has_train:
            parts = {"calibration": calibration, **parts}
        drawn, notes = _write_splits(pool, parts, folder, progress), [*data.notes, *columns.notes]
        if has_train:
            train_columns, train_type = columns, data.features(train).get(columns.label)
            # If there are several matchings, the model's predictions choose one for all splits.
            if train_type not in (None, data.features(evaluation)[columns.label]) and len(columns.matchings) == 1:
                # Splits that were made separately may number their classes differently.
                train_columns = match_column(data, train, columns.image, columns.label, id2label)
            train_splits, num_in_both = _write_train_splits(data, train, train_columns, pool, folder, progress)
            drawn |= train_splits
            if num_in_both:
                notes.append(
                    f"{num_in_both} images of split {train!r} are in split {evaluation!r} too, and were left out"
                )
        else:
            notes.append(
                f"calibration images come from split {train!r} too, disjoint from those that accuracy is measured on"
            )
        if partition.repeated:
            notes.append(
                f"{len(partition.repeated)} images of split {evaluation!r} are copies of others, and were counted once"
            )
        notes += _notes(query, evaluation, columns, pool, drawn)
        return DrawnSplits(**drawn, matchings=columns.matchings, notes=tuple(notes))


def look_up_labels(
    query: DataQuery, *, id2label: Mapping[int, str], progress: Progress = silent
) -> tuple[str, tuple[LabelMatch, ...]]:
    """Return the split to evaluate on, and the matches of its labels; AcquisitionError as in `draw_splits`."""
    with quiet(), tempfile.TemporaryDirectory() as cache:
        data = open_data(query, cache=Path(cache), progress=progress)
        evaluation = choose_evaluation_split(data)
        return evaluation, choose_columns(data, evaluation, id2label).matchings[0].matches


def choose_evaluation_split(data: OpenedData) -> str:
    """Return the labelled split to evaluate on: the requested one, or the first usual one; AcquisitionError if there is none."""
    name, requested, available = data.query.dataset, data.query.split, ", ".join(data.splits)
    if requested is not None and requested not in data.splits:
        raise AcquisitionError(
            f"dataset {name!r} has no split {requested!r}: use one of {available}{did_you_mean(requested, list(data.splits))}"
        )
    refusals: list[AcquisitionError] = []
    for split in EVALUATION if requested is None else [requested]:
        try:
            if split in data.splits and _is_labelled(data, split):
                return split
        except AcquisitionError as error:
            # A test split may come without the label column that the others have.
            refusals.append(error)
    if refusals:
        raise refusals[0]
    if requested is not None:
        raise AcquisitionError(
            f"split {requested!r} of {name!r} has no labels (missing or -1): use another of {available}"
        )
    raise AcquisitionError(
        f"dataset {name!r} has no labelled test or validation split (it has {available}): call a folder or table of the data "
        "set test, in lower case, or name one with split; accuracies on images that the model was trained on are optimistic"
    )


def _is_labelled(data: OpenedData, split: str) -> bool:
    columns = [column for tier in label_candidates(data, split) for column in tier]
    return any(is_label(cell) for column in columns for cell in data.labels(split, column, NUM_LABELS_CHECKED))


class StoredImage(NamedTuple):
    """An encoded image in the spool: its offset, its size, and its SHA-256; the digest is None for a cell without one."""

    offset: int
    size: int
    digest: bytes | None
    path: str | None


@dataclass(slots=True)
class Pool:
    """Labelled rows of one split, and the images of those that were read, in the file `spool`.

    `labels` are the model's class of each row, or UNMAPPED; `rows` were read, in this order.
    """

    data: OpenedData
    split: str
    spool: IO[bytes]
    labels: Rows = field(default_factory=lambda: np.empty(0, np.int64))
    rows: list[int] = field(default_factory=list[int])
    images: dict[int, StoredImage] = field(default_factory=dict[int, StoredImage])

    def store(self, cell: Any) -> StoredImage:
        """Append the image of a cell to the spool."""
        image = self.data.image(cell) or b""
        offset = self.spool.seek(0, 2)
        self.spool.write(image)
        # Raises on a full disk here, and not while a data set is read.
        self.spool.flush()
        path = cell.get("path") if isinstance(cell, dict) else None
        return StoredImage(offset, len(image), hashlib.sha256(image).digest() if image else None, path)

    def image(self, row: int) -> bytes:
        """Return the encoded image of a row that was read; empty if it has none."""
        self.spool.seek(self.images[row].offset)
        return self.spool.read(self.images[row].size)

    def location(self, row: int) -> str:
        """Return the location of an image that was read: its row number, and its file if it has one."""
        path = self.images[row].path
        return f"row {row} ({path.replace(self.data.root, '')!r})" if path else f"row {row}"

    def stratified(self, rows: Sequence[int]) -> Rows:
        """Return `rows` in an order that follows from the seed, every prefix stratified."""
        indices = np.asarray(rows, dtype=np.int64)
        return indices[stratified_order(self.labels[indices], self.data.query.seed)]

    def by_content(self, rows: Rows) -> Rows:
        """Return `rows` in an order that follows from their images, every prefix stratified."""
        return rows[content_order(self.labels[rows], [self.images[row].digest or b"" for row in rows.tolist()])]

    def partition(self) -> "Partition":
        """Partition the rows that were read; AcquisitionError if more than one in a hundred is a copy of another."""
        partition = partition_by_content(self.rows, [self.images[row].digest for row in self.rows])
        if len(partition.repeated) > MAX_REPEATED * len(self.rows):
            copy = min(partition.repeated)
            original = next(row for row in self.rows if self.images[row].digest == self.images[copy].digest)
            raise AcquisitionError(
                f"{len(partition.repeated)} of {len(self.rows)} images of split {self.split!r} that were looked at are there more than "
                f"once, the first copy is {self.location(copy)}, of {self.location(original)}: remove the copies (up to 1% are "
                "counted once)"
            )
        return partition


def read_pool(
    data: OpenedData, split: str, columns: Columns, *, num_rows: int, spool: IO[bytes], progress: Progress
) -> Pool:
    """Read `num_rows` images, or all there are: stratified of a local split, the same number per class of a stream."""
    pool = Pool(data, split, spool)
    if data.folder is None:
        drawn = _draw_from_stream(pool, columns, num_rows, progress)
        pool.labels = np.asarray([label for _, label in drawn], dtype=np.int64)
        stored = (image if isinstance(image, StoredImage) else pool.store(image) for image, _ in drawn)
        pool.images = dict(enumerate(stored))
    else:
        progress(f"reading labels of {split}", 0, 0)
        labels = [columns.class_of.get(raw, UNMAPPED) for raw in data.labels(split, columns.label)]
        pool.labels = np.asarray(labels, dtype=np.int64)
    pool.rows = pool.stratified(np.flatnonzero(pool.labels != UNMAPPED).tolist())[:num_rows].tolist()
    missing = {*pool.rows} - pool.images.keys()
    cells = (cell for table in data.tables(split, [columns.image], BATCH_IMAGES) for cell in table[columns.image])
    for row, cell in enumerate(cells if missing else ()):
        if row in missing:
            pool.images[row] = pool.store(cell.as_py())
            done = len(pool.images)
            if done % PROGRESS_EVERY == 0 or done == len(missing):
                progress(f"reading images of {split}", done, len(missing))
            if done == len(missing):
                break
    return pool


def _draw_from_stream(pool: Pool, columns: Columns, target: int, progress: Progress) -> list[tuple[Any, int]]:
    """Return stored images, or cells that name images which are downloaded once they are drawn, with their classes."""
    quotas = ClassQuotas(target, columns.num_classes)
    samples: dict[int, tuple[Any, int]] = {}
    for key, (cell, raw) in enumerate(pool.data.stream(pool.split, columns)):
        if (label := columns.class_of.get(raw, UNMAPPED)) == UNMAPPED:
            continue
        dropped = quotas.offer(key, label)
        if key not in dropped:
            is_named = isinstance(cell, dict) and cell.get("bytes") is None
            samples[key] = cell if is_named else pool.store(cell), label
        for dropped_key in dropped:
            samples.pop(dropped_key, None)
        if key % PROGRESS_EVERY == 0:
            progress(f"streaming images of {pool.split}", min(len(samples), target), target)
        if quotas.is_full:
            break
    return [samples[key] for key in quotas.drawn()]


def _write_splits(pool: Pool, parts: Mapping[str, Rows], folder: Path, progress: Progress) -> dict[str, DrawnSplit]:
    """Write the decodable images of each part; AcquisitionError if more than one in a hundred can't be decoded."""
    drawn: dict[str, DrawnSplit] = {}
    damaged: dict[int, str] = {}

    def decodable_rows(name: str, rows: list[int]) -> Iterator[tuple[bytes, int]]:
        for done, row in enumerate(rows):
            if done % 100 == 0:
                progress(f"checking images of {name}", done, len(rows))
            image = pool.image(row)
            try:
                decode_rgb(image)
            except CorruptImageError as error:
                damaged[row] = str(error)
            else:
                yield image, int(pool.labels[row])

    for name, rows in parts.items():
        path = folder / f"{name}.parquet"
        num_images = write_rows(path, decodable_rows(name, rows.tolist()))
        drawn[name] = DrawnSplit(
            path=path, source_split=pool.split, num_images=num_images, num_skipped=len(rows) - num_images
        )
    num_rows = sum(len(rows) for rows in parts.values())
    if len(damaged) > MAX_CORRUPT * num_rows:
        first, *others = sorted(damaged)[:NUM_DAMAGED_SHOWN]
        more = f", others are {', '.join(map(pool.location, others))}" if others else ""
        raise AcquisitionError(
            f"{len(damaged)} of {num_rows} images drawn from split {pool.split!r} can't be decoded, the first is "
            f"{pool.location(first)}: {damaged[first]}{more}: repair or remove them, or save them as one of "
            f"{', '.join(FORMATS)} (up to 1% are skipped)"
        )
    return drawn


def _write_train_splits(
    data: OpenedData, train: str, columns: Columns, evaluation_pool: Pool, folder: Path, progress: Progress
) -> tuple[dict[str, DrawnSplit], int]:
    """Write images of the train split for calibration and, if requested, for recovery.

    Images that accuracy is measured on are left out; the second result is their number.
    """
    num_recovery = data.query.num_recovery
    num_wanted = NUM_CALIBRATION + num_recovery
    num_rows = num_wanted + int(MAX_REPEATED * num_wanted) + 1
    pool = read_pool(data, train, columns, num_rows=num_rows, spool=evaluation_pool.spool, progress=progress)
    repeated = set(pool.partition().repeated)
    rows = [row for row in pool.rows if row not in repeated]
    evaluation_rows = {image.digest: row for row, image in evaluation_pool.images.items() if image.digest}
    in_both = [row for row in rows if pool.images[row].digest in evaluation_rows]
    if len(in_both) > MAX_REPEATED * len(rows):
        original = evaluation_rows[pool.images[in_both[0]].digest or b""]
        raise AcquisitionError(
            f"{len(in_both)} of {len(rows)} images drawn from split {train!r} are in split {evaluation_pool.split!r} too, the first "
            f"is {pool.location(in_both[0])}, there {evaluation_pool.location(original)}: accuracies would be measured on what "
            "models are made with, so remove them from one (up to 1% are left out)"
        )
    unshared = [row for row in rows if pool.images[row].digest not in evaluation_rows]
    order = np.asarray(unshared[:num_wanted], dtype=np.int64)
    parts = {"calibration": order[:NUM_CALIBRATION]}
    if num_recovery:
        parts["recovery"] = order[NUM_CALIBRATION:]
        if not len(parts["recovery"]):
            raise AcquisitionError(
                f"split {train!r} has {len(rows)} usable images, and the first {NUM_CALIBRATION} are to calibrate with: "
                "none is left to recover with, so set recover_epochs to 0 or choose a larger data set"
            )
    return _write_splits(pool, parts, folder, progress), len(in_both)


def _notes(
    query: DataQuery, evaluation: str, columns: Columns, pool: Pool, drawn: Mapping[str, DrawnSplit]
) -> Iterator[str]:
    num_calibration, num_search = (
        drawn[name].num_images + drawn[name].num_skipped for name in ("calibration", "search")
    )
    matches = columns.matchings[0].matches
    # If there are several matchings, the model's predictions choose one later.
    if len(columns.matchings) == 1 and (guessed := order_match_note(matches)) is not None:
        yield guessed
    if evaluation in TRAIN:
        yield (
            f"accuracies are measured on split {evaluation!r}, as requested: on images that the model was trained on "
            "they are optimistic"
        )
    if num_calibration < NUM_CALIBRATION:
        yield f"only {num_calibration} images are there to calibrate with, not {NUM_CALIBRATION}"
    if num_unmapped := int((pool.labels == UNMAPPED).sum()):
        yield f"{num_unmapped} images of split {evaluation!r} have no label that the model knows"
    if unmapped := [match.dataset_label for match in matches if match.model_id is None]:
        yield (
            f"{len(unmapped)} of the data set's {len(matches)} labels match no class of the model or several, and their "
            f"images were left out: {format_names(unmapped)}"
        )
    if num_search < (query.num_samples or 0):
        yield (
            f"{num_search} images are searched on, not {query.num_samples}: by their content, the others are to be held out"
        )
    if num_search < columns.num_classes:
        yield f"{num_search} images to search on are fewer than the data set's {columns.num_classes} classes"
    if pool.data.folder is None:
        yield "images were streamed and drawn in equal numbers per class"


def stratified_order(labels: Rows, seed: int) -> Rows:
    """Return all indices in an order whose every prefix holds each class in proportion, within one image."""
    positions = np.empty(len(labels))
    for label in np.unique(labels):
        rng, members = np.random.default_rng([seed, int(label)]), np.flatnonzero(labels == label)
        offset = rng.random()
        positions[rng.permutation(members)] = (np.arange(len(members)) + offset) / len(members)
    return np.argsort(positions, kind="stable")


def content_order(labels: Rows, digests: Sequence[bytes]) -> Rows:
    """Return all indices in an order that follows from the images' content only, every prefix stratified as above."""
    fractions = np.array([int.from_bytes(digest[:8], "big") / 2**64 for digest in digests])
    positions = np.empty(len(labels))
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(fractions[members], kind="stable")]
        positions[members] = (np.arange(len(members)) + fractions[members]) / len(members)
    return np.argsort(positions, kind="stable")


class Partition(NamedTuple):
    """Rows of a pool by their use, in the given order; `repeated` are copies of earlier images."""

    search: list[int]
    heldout: list[int]
    repeated: list[int]


def partition_by_content(rows: Sequence[int], digests: Sequence[bytes | None]) -> Partition:
    """Assign rows to search or held out by the last bit of the image's SHA-256; without an image, of the row number."""
    partition, seen = Partition([], [], []), set[bytes]()
    for row, digest in zip(rows, digests, strict=True):
        if digest is not None and digest in seen:
            partition.repeated.append(row)
            continue
        if digest is not None:
            seen.add(digest)
        is_heldout = (row if digest is None else digest[-1]) & 1
        (partition.heldout if is_heldout else partition.search).append(row)
    return partition


def evaluation_sizes(num_search: int, num_heldout: int, num_samples: int | None, split: str) -> tuple[int, int]:
    """Return the numbers of images to search on and to hold out; AcquisitionError if there are too few for both.

    The halves by content are random in size: slightly fewer than `num_samples` may be left.
    """
    num_usable, smaller_half = num_search + num_heldout, min(num_search, num_heldout)
    if smaller_half < 1 or (num_samples is not None and num_usable < 2 * num_samples):
        raise AcquisitionError(
            f"split {split!r} has {num_usable} usable images, too few to search on {num_samples or 1} and hold out "
            f"as many: set num_samples to at most {num_usable // 2}, or choose a larger split"
        )
    num_wanted = min(MAX_SEARCH if num_samples is None else num_samples, smaller_half)
    return num_wanted, min(HELDOUT_RATIO * num_wanted, num_heldout)


def num_images_to_read(num_samples: int | None, num_calibration: int = 0) -> int:
    """Return how many images of a large split are enough for all sets; about half of them are held out."""
    num_wanted = MAX_SEARCH if num_samples is None else num_samples
    half = max(HELDOUT_RATIO * num_wanted, num_wanted + num_calibration)
    return 2 * half + 6 * int((2 * half) ** 0.5)


class ClassQuotas:
    """Equal shares per class from a stream, at most `target` images; spare images fill the shares that stay incomplete."""

    def __init__(self, target: int, num_classes: int) -> None:
        self._target = target
        self._quota = -(-target // num_classes)
        self._counts: dict[int, int] = {}
        self._taken: list[int] = []
        self._spare: list[int] = []

    @property
    def is_full(self) -> bool:
        """Return whether the target is reached without spare images."""
        return len(self._taken) >= self._target

    def offer(self, key: int, label: int) -> list[int]:
        """Add the image `key`; return the keys that are no longer needed."""
        count = self._counts.get(label, 0)
        if count < self._quota and not self.is_full:
            self._counts[label] = count + 1
            self._taken.append(key)
        else:
            self._spare.append(key)
        num_spare = max(self._target - len(self._taken), 0)
        dropped, self._spare = self._spare[num_spare:], self._spare[:num_spare]
        return dropped

    def drawn(self) -> list[int]:
        """Return the drawn keys, with spares for incomplete shares."""
        return [*self._taken, *self._spare][: self._target]
