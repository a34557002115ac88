"""Splits of a data set: disjoint sets of images, drawn with the run's seed and stratified by class.

Only an image's content decides its use: half of all images are for the search and half are held out, whatever the seed, the
requested number and the data set's order. So no run searches on images that another run held out.
"""

import hashlib
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import IO, Any

import datasets
import numpy as np
from numpy.typing import NDArray

from profiling_agent.data.columns import (
    MAX_STREAMED_LABELS,
    Columns,
    choose_columns,
    is_label,
    label_candidates,
    match_column,
)
from profiling_agent.data.dataset import BATCH_IMAGES, DataQuery, OpenedData, open_data
from profiling_agent.data.hub import MAX_TEXT, did_you_mean
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
        if query.num_recovery and train == evaluation:
            misnamed = data.misnamed_splits()
            raise AcquisitionError(
                f"dataset {query.dataset!r} has no train split besides {evaluation!r}, and to recover would be to train on the "
                "images that accuracy is measured on: set recover_epochs to 0, or choose a data set that has one"
                f"{misnamed and '; '}{misnamed}"
            )
        num_rows = num_images_to_read(query.num_samples, NUM_CALIBRATION if train == evaluation else 0)
        pool = open_pool(data, evaluation, columns, target=num_rows, spool=spool, progress=progress)
        partition = _read_and_partition(pool, columns.image, pool.usable(query.seed)[:num_rows].tolist(), progress)
        search = pool.stratified(partition.search, query.seed)
        calibration = search[: min(NUM_CALIBRATION, len(search) // 2)] if train == evaluation else search[:0]
        search = search[len(calibration) :]
        num_search, num_heldout = evaluation_sizes(len(search), len(partition.heldout), query.num_samples, evaluation)
        heldout = pool.stratified(partition.heldout, query.seed)
        parts = {"search": pool.by_content(search[:num_search]), "heldout": pool.by_content(heldout[:num_heldout])}
        if train == evaluation:
            parts = {"calibration": calibration, **parts}
        drawn, num_in_both = _write_splits(pool, parts, folder, progress), 0
        if train != evaluation:
            train_columns, train_type = columns, data.features(train).get(columns.label)
            has_other_type = train_type is not None and train_type != data.features(evaluation)[columns.label]
            # If there are several matchings, the model's predictions choose one for all splits.
            if has_other_type and len(columns.matchings) == 1:
                # Splits that were made separately may number their classes differently.
                train_columns = match_column(data, train, columns.image, columns.label, id2label)
            train_splits, num_in_both = _write_train_splits(data, train, train_columns, pool, folder, progress)
            drawn |= train_splits
        notes = _notes(data, evaluation, train, columns, pool, drawn)
        if partition.repeated:
            notes.append(
                f"{len(partition.repeated)} images of split {evaluation!r} are copies of others, and were counted once"
            )
        if num_in_both:
            notes.append(f"{num_in_both} images of split {train!r} are in split {evaluation!r} too, and were left out")
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
    name, available, misnamed = data.query.dataset, ", ".join(data.splits), data.misnamed_splits()
    if (requested := data.query.split) is not None:
        if requested not in data.splits:
            advice = f"; {misnamed}" if misnamed else did_you_mean(requested, list(data.splits))
            raise AcquisitionError(f"dataset {name!r} has no split {requested!r}: use one of {available}{advice}")
        if not _is_labelled(data, requested):
            raise AcquisitionError(
                f"split {requested!r} of {name!r} has no labels (missing or -1): use another of {available}"
            )
        return requested
    refusal: AcquisitionError | None = None
    for split in (split for split in EVALUATION if split in data.splits):
        try:
            if _is_labelled(data, split):
                return split
        except AcquisitionError as error:
            # A test split may come without the label column that the others have.
            refusal = refusal or error
    if refusal is not None:
        raise refusal
    advice = misnamed or "name one with split; accuracies on images that the model was trained on are optimistic"
    raise AcquisitionError(f"dataset {name!r} has no labelled test or validation split (it has {available}): {advice}")


def _is_labelled(data: OpenedData, split: str) -> bool:
    columns = [column for tier in label_candidates(data, split) for column in tier]
    return any(is_label(cell) for column in columns for cell in islice(data.labels(split, column), NUM_LABELS_CHECKED))


@dataclass(slots=True)
class Pool:
    """Labelled rows of one split, and the images of the rows that were read.

    `labels` are the model's class of each row, or UNMAPPED. The file `spool` holds images, except those in local files.
    """

    data: OpenedData
    split: str
    labels: Rows
    spool: IO[bytes]
    digests: dict[int, bytes | None] = field(default_factory=dict[int, bytes | None])
    _cells: dict[int, Any] = field(default_factory=dict[int, Any])
    _places: dict[int, tuple[int, int]] = field(default_factory=dict[int, tuple[int, int]])

    def add(self, row: int, cell: Any) -> None:
        """Read the image of a row, and store its SHA-256."""
        image = self.data.image(cell)
        self.digests[row] = hashlib.sha256(image).digest() if image else None
        is_in_cell = not isinstance(cell, dict) or cell.get("bytes") is not None
        self._cells[row] = {"path": cell.get("path")} if isinstance(cell, dict) else None
        if image and (is_in_cell or not self.data.is_local):
            self._places[row] = append_image(self.spool, image)

    def read(self, rows: Sequence[int], image_column: str, progress: Progress) -> None:
        """Read the images of `rows` of a local data set, in its order, up to the last of them."""
        unread = np.unique(np.asarray([row for row in rows if row not in self.digests], dtype=np.int64))
        start = done = 0
        for table in self.data.tables(self.split, [image_column], BATCH_IMAGES) if len(unread) else ():
            for row in unread[(unread >= start) & (unread < start + len(table))].tolist():
                self.add(row, table[image_column][row - start].as_py())
                done += 1
                if done % PROGRESS_EVERY == 0 or done == len(unread):
                    progress(f"reading images of {self.split}", done, len(unread))
            start += len(table)
            if done == len(unread):
                break

    def image(self, row: int) -> bytes:
        """Return the encoded image of a row that was read; empty if it has none."""
        if (place := self._places.get(row)) is not None:
            return read_image(self.spool, place)
        return self.data.image(self._cells.get(row)) or b""

    def where(self, row: int) -> str:
        """Return the location of an image that was read: its file, or its row number."""
        name = self.data.file_name(self._cells.get(row))
        if name is None:
            return f"row {row}"
        return f"{name} in row {row}" if row in self._places and self.data.is_local else name

    def usable(self, seed: int) -> Rows:
        """Return all rows with a class of the model, stratified."""
        return self.stratified(np.flatnonzero(self.labels != UNMAPPED).tolist(), seed)

    def stratified(self, rows: Sequence[int], seed: int) -> Rows:
        """Return `rows` in an order that follows from the seed, every prefix stratified."""
        indices = np.asarray(rows, dtype=np.int64)
        return indices[stratified_order(self.labels[indices], seed)]

    def by_content(self, rows: Rows) -> Rows:
        """Return `rows` in an order that follows from their images, every prefix stratified."""
        return rows[content_order(self.labels[rows], [self.digests[row] or b"" for row in rows.tolist()])]


def append_image(spool: IO[bytes], image: bytes) -> tuple[int, int]:
    """Append an image to a file; return its offset and size."""
    offset = spool.seek(0, 2)
    spool.write(image)
    # Raises on a full disk here, and not while a data set is read.
    spool.flush()
    return offset, len(image)


def read_image(spool: IO[bytes], place: tuple[int, int]) -> bytes:
    """Return the image at an offset and size that `append_image` returned."""
    spool.seek(place[0])
    return spool.read(place[1])


def open_pool(
    data: OpenedData, split: str, columns: Columns, *, target: int, spool: IO[bytes], progress: Progress
) -> Pool:
    """Return a split's rows: all of a local one, images unread; of a stream about `target`, the same number per class."""
    label_type = data.features(split).get(columns.label)
    num_names = len(label_type.names) if isinstance(label_type, datasets.ClassLabel) else None
    if data.is_local:
        progress(f"reading labels of {split}", 0, 0)
        labels = [_model_class(raw, columns, num_names) for raw in data.labels(split, columns.label)]
        return Pool(data, split, np.asarray(labels, dtype=np.int64), spool)
    quotas = ClassQuotas(target, columns.num_classes)
    samples: dict[int, tuple[Any, tuple[int, int] | None, int]] = {}
    for key, (cell, raw) in enumerate(data.stream(split, columns.image, columns.label, data.query.seed)):
        if (label := _model_class(raw, columns, num_names)) == UNMAPPED:
            continue
        dropped = quotas.offer(key, label)
        if key not in dropped:
            image = cell.get("bytes") if isinstance(cell, dict) else cell
            path = cell.get("path") if isinstance(cell, dict) else None
            samples[key] = {"path": path}, append_image(spool, image) if isinstance(image, bytes) else None, label
        for dropped_key in dropped:
            samples.pop(dropped_key, None)
        if key % PROGRESS_EVERY == 0:
            progress(f"streaming images of {split}", min(len(samples), target), target)
        if quotas.is_full:
            break
    drawn = [samples[key] for key in quotas.drawn()]
    pool = Pool(data, split, np.asarray([label for _, _, label in drawn], dtype=np.int64), spool)
    for row, (cell, place, _) in enumerate(drawn):
        pool.add(row, cell if place is None else cell | {"bytes": read_image(spool, place)})
    return pool


def _model_class(raw: Any, columns: Columns, num_names: int | None) -> int:
    """Return the model's class of a raw label, or UNMAPPED; AcquisitionError if the label isn't allowed."""
    if num_names is not None and is_label(raw) and not 0 <= raw < num_names:
        raise AcquisitionError(
            f"label column {columns.label!r} holds {raw}, but the data set names {num_names} classes, 0 to {num_names - 1}: "
            "correct its labels or its names, or name another with label_column"
        )
    if columns.known is not None and is_label(raw) and raw not in columns.known:
        start = f"label column {columns.label!r} holds {str(raw)[:MAX_TEXT]!r}"
        if isinstance(raw, int):
            raise AcquisitionError(
                f"{start}, which is no class of the model: correct its labels, or name another with label_column"
            )
        raise AcquisitionError(
            f"{start}, which none of the first {MAX_STREAMED_LABELS} rows to evaluate on has, and of such a stream no others "
            "are read to find its classes: download the data set (hf download) and give its folder, or shuffle its rows"
        )
    return columns.class_of.get(raw, UNMAPPED)


def _read_and_partition(pool: Pool, image_column: str, rows: list[int], progress: Progress) -> "Partition":
    """Read and partition the images of `rows`; AcquisitionError if more than one in a hundred is a copy of another."""
    pool.read(rows, image_column, progress)
    partition = partition_by_content(rows, [pool.digests.get(row) for row in rows])
    if len(partition.repeated) > MAX_REPEATED * len(rows):
        copy = min(partition.repeated)
        original = next(row for row in rows if pool.digests[row] == pool.digests[copy])
        raise AcquisitionError(
            f"{len(partition.repeated)} of {len(rows)} images of split {pool.split!r} that were looked at are there more than once, "
            f"the first copy is {pool.where(copy)}, of {pool.where(original)}: remove the copies (up to 1% are "
            "counted once)"
        )
    return partition


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
        more = f", others are {', '.join(map(pool.where, others))}" if others else ""
        raise AcquisitionError(
            f"{len(damaged)} of {num_rows} images drawn from split {pool.split!r} can't be decoded, the first is "
            f"{pool.where(first)} ({damaged[first]}){more}: repair or remove them, or save them as one of "
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
    target = num_wanted + int(MAX_REPEATED * num_wanted) + 1
    pool = open_pool(data, train, columns, target=target, spool=evaluation_pool.spool, progress=progress)
    usable = pool.usable(data.query.seed)
    rows = usable[:target].tolist()
    repeated = set(_read_and_partition(pool, columns.image, rows, progress).repeated)
    rows = [row for row in rows if row not in repeated]
    evaluation_digests = set(evaluation_pool.digests.values()) - {None}
    unshared = [row for row in rows if pool.digests[row] not in evaluation_digests]
    num_in_both = len(rows) - len(unshared)
    if num_in_both > MAX_REPEATED * len(rows):
        first = next(row for row in rows if pool.digests[row] in evaluation_digests)
        original = next(row for row, digest in evaluation_pool.digests.items() if digest == pool.digests[first])
        raise AcquisitionError(
            f"{num_in_both} of {len(rows)} images drawn from split {train!r} are in split {evaluation_pool.split!r} too, the first "
            f"is {pool.where(first)}, there {evaluation_pool.where(original)}: accuracies would be measured on what models "
            "are made with, so remove them from one (up to 1% are left out)"
        )
    order = np.asarray(unshared[:num_wanted], dtype=np.int64)
    parts = {"calibration": order[:NUM_CALIBRATION]}
    if num_recovery:
        parts["recovery"] = order[NUM_CALIBRATION:]
        if not len(parts["recovery"]):
            raise AcquisitionError(
                f"split {train!r} has {len(usable)} usable images, and the first {NUM_CALIBRATION} are to calibrate with: "
                "none is left to recover with, so set recover_epochs to 0 or choose a larger data set"
            )
    return _write_splits(pool, parts, folder, progress), num_in_both


def _notes(
    data: OpenedData, evaluation: str, train: str, columns: Columns, pool: Pool, drawn: Mapping[str, DrawnSplit]
) -> list[str]:
    calibration, search, recovery = drawn["calibration"], drawn["search"], drawn.get("recovery")
    matches, notes = columns.matchings[0].matches, [*data.notes, *columns.notes]
    # If there are several matchings, the model's predictions choose one later.
    if len(columns.matchings) == 1 and (guessed := order_match_note(matches)) is not None:
        notes.append(guessed)
    if evaluation in TRAIN:
        notes.append(
            f"accuracies are measured on split {evaluation!r}, as requested: on images that the model was trained on "
            "they are optimistic"
        )
    if train == evaluation:
        notes.append(
            f"calibration images come from split {evaluation!r} too, disjoint from those that accuracy is measured on"
        )
    if calibration.num_images + calibration.num_skipped < NUM_CALIBRATION:
        notes.append(f"only {calibration.num_images} images are there to calibrate with, not {NUM_CALIBRATION}")
    if recovery is not None:
        number = recovery.num_images
        notes.append(f"pruned models are trained on {number} images of split {train!r}, which are in no other set")
    if num_unmapped := int((pool.labels == UNMAPPED).sum()):
        notes.append(f"{num_unmapped} images of split {evaluation!r} have no label that the model knows")
    if unmapped := [match.dataset_label for match in matches if match.model_id is None]:
        notes.append(
            f"{len(unmapped)} of the data set's {len(matches)} labels match no class of the model or several, and their "
            f"images were left out: {format_names(unmapped)}"
        )
    if search.num_images + search.num_skipped < (requested := data.query.num_samples or 0):
        notes.append(
            f"{search.num_images} images are searched on, not {requested}: by their content, the others are to be held out"
        )
    if search.num_images < columns.num_classes:
        notes.append(
            f"{search.num_images} images to search on are fewer than the data set's {columns.num_classes} classes"
        )
    if not data.is_local:
        notes.append("images were streamed and drawn in equal numbers per class")
    return notes


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


@dataclass(frozen=True, slots=True)
class Partition:
    """Rows of a pool by their use, in the given order; `repeated` are copies of earlier images."""

    search: list[int] = field(default_factory=list[int])
    heldout: list[int] = field(default_factory=list[int])
    repeated: list[int] = field(default_factory=list[int])


def partition_by_content(rows: Sequence[int], digests: Sequence[bytes | None]) -> Partition:
    """Assign rows to search or held out by the last bit of the image's SHA-256; without an image, of the row number."""
    partition, seen = Partition(), set[bytes]()
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
