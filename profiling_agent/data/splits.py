"""Splits of a data set: disjoint sets of images, drawn with the run's seed and stratified by class.

Only an image's content decides its use: half of all images are for the search and half are held out, whatever the seed, the
requested number and the data set's order. So no run searches on images that another run held out.
"""

import hashlib
import tempfile
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from profiling_agent.data.dataset import Columns, DataQuery, OpenedData, choose_columns, open_data, train_columns
from profiling_agent.data.images import FORMATS, decode_rgb, write_rows
from profiling_agent.data.labels import UNMAPPED, Matching, format_names, order_match_note
from profiling_agent.errors import AcquisitionError, CorruptImageError
from profiling_agent.lib.logs import Progress, quiet, silent

TRAIN = ("train", "training")
MAX_SEARCH = 2000
HELDOUT_RATIO = 4
NUM_CALIBRATION = 256
MAX_CORRUPT = 0.01
# Few, as a table of photographs has hundreds of megabytes in as many rows as are read of labels.
BATCH_IMAGES = 64
PROGRESS_EVERY = 50


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


def draw_splits(
    query: DataQuery, *, id2label: Mapping[int, str], folder: Path, progress: Progress = silent
) -> DrawnSplits:
    """Write calibration.arrow, search.arrow and heldout.arrow into `folder`, and recovery.arrow if requested.

    Columns are `image` (encoded bytes) and `label` (the model's class id); every prefix of a set is stratified by class.

    Raises:
        AcquisitionError: the data set can't be read, has no usable split, column or label, or too few or bad images.
    """
    with quiet(), tempfile.TemporaryDirectory(dir=folder) as cache, tempfile.TemporaryFile(dir=folder) as spool:
        data = open_data(query, cache=Path(cache), progress=progress)
        columns = choose_columns(data, id2label)
        evaluation, notes = columns.split, list(columns.notes)
        others = [split for split in TRAIN if split in data.splits and split != evaluation]
        train = next((split for split in others if columns.image in data.features(split)), None)
        if query.num_recovery and train is None:
            raise AcquisitionError(f"there is no train split besides {evaluation!r}: set recover_epochs to 0")
        num_wanted = MAX_SEARCH if query.num_samples is None else query.num_samples
        # About half of the images are held out: six standard deviations more are enough for all sets.
        num_rows = 2 * max(HELDOUT_RATIO * num_wanted, num_wanted + (0 if train else NUM_CALIBRATION))
        pool = Pool.read(data, columns, num_rows + 6 * int(num_rows**0.5), spool, progress)
        images = pool.distinct_images()
        if num_copies := len(pool.images) - len(images):
            notes.append(f"{num_copies} images of split {evaluation!r} are copies of others, and were counted once")
        search, heldout = (
            stratified([image for image in images if image.digest[-1] % 2 == bit], query.seed) for bit in (0, 1)
        )
        calibration = search[: 0 if train else min(NUM_CALIBRATION, len(search) // 2)]
        search = search[len(calibration) :]
        num_search, num_heldout = evaluation_sizes(len(search), len(heldout), query.num_samples, evaluation)
        parts = {"search": content_order(search[:num_search]), "heldout": content_order(heldout[:num_heldout])}
        drawn = pool.write(parts if train else {"calibration": calibration, **parts}, folder, progress)
        if train is None:
            notes.append(f"calibration images come from split {evaluation!r} too, disjoint from the others")
        else:
            drawn |= _draw_train_splits(pool, train_columns(data, train, columns, id2label), folder, notes, progress)
        notes += _notes(columns, pool, drawn)
        return DrawnSplits(**drawn, matchings=columns.matchings, notes=tuple(notes))


def _draw_train_splits(
    measured: "Pool", columns: Columns, folder: Path, notes: list[str], progress: Progress
) -> dict[str, DrawnSplit]:
    """Write images of the train split for calibration and, if requested, for recovery, without those that are `measured` on."""
    train, num_recovery = columns.split, measured.data.query.num_recovery
    num_wanted = NUM_CALIBRATION + num_recovery
    num_rows = num_wanted + num_wanted // 100 + 1
    pool = Pool.read(measured.data, columns, num_rows, measured.spool, progress)
    if not pool.images:
        columns = replace(columns, class_of={})
        pool = Pool.read(measured.data, columns, num_rows, measured.spool, progress)
    if not columns.class_of and len(columns.matchings) > 1:
        ways = " or ".join(matching.by for matching in columns.matchings)
        problem = f"labels fit in several ways, and split {train!r} has none to choose by"
        raise AcquisitionError(f"{problem}: set label_match to {ways}")
    if not columns.class_of:
        notes.append(f"split {train!r} has no labels that the model knows, and calibrates without")
    images, measured_digests = pool.distinct_images(), {image.digest for image in measured.images}
    usable = [image for image in images if image.digest not in measured_digests]
    if num_shared := len(images) - len(usable):
        notes.append(f"{num_shared} images of split {train!r} are in split {measured.split!r} too, and were left out")
    usable = usable[:num_wanted]
    parts = {"calibration": usable[:NUM_CALIBRATION]}
    if num_recovery:
        parts["recovery"] = usable[NUM_CALIBRATION:]
        if not parts["recovery"]:
            problem = f"split {train!r} has {len(images)} usable images, none is left to recover with"
            raise AcquisitionError(f"{problem}: set recover_epochs to 0 or choose a larger data set")
    return pool.write(parts, folder, progress)


def _notes(columns: Columns, pool: "Pool", drawn: Mapping[str, DrawnSplit]) -> Iterator[str]:
    matches, evaluation = columns.matchings[0].matches, columns.split
    # If there are several matchings, the model's predictions choose one later.
    if len(columns.matchings) == 1 and (guessed := order_match_note(matches)) is not None:
        yield guessed
    if evaluation in TRAIN:
        yield f"accuracies on split {evaluation!r} are optimistic, as the model was trained on it"
    if (num_calibration := drawn["calibration"].num_images) < NUM_CALIBRATION:
        yield f"only {num_calibration} images are there to calibrate with, not {NUM_CALIBRATION}"
    if pool.num_unmapped:
        yield f"{pool.num_unmapped} images of split {evaluation!r} have no label that the model knows"
    if unmapped := [match.dataset_label for match in matches if match.model_id is None]:
        yield f"images of labels that match no class of the model or several were left out: {format_names(unmapped)}"
    if pool.data.folder is None:
        yield "images were streamed and drawn in equal numbers per class"


class StoredImage(NamedTuple):
    """An encoded image in the spool: its class, offset, size and SHA-256, and its row and file in the data set."""

    label: int
    offset: int
    size: int
    digest: bytes
    location: str


@dataclass(slots=True)
class Pool:
    """Images of one split, encoded in the file `spool`, in an order that follows from the seed, every prefix stratified."""

    data: OpenedData
    split: str
    spool: IO[bytes]
    images: list[StoredImage] = field(default_factory=list[StoredImage])
    num_unmapped: int = 0

    @classmethod
    def read(cls, data: OpenedData, columns: Columns, num_rows: int, spool: IO[bytes], progress: Progress) -> "Pool":
        """Read `num_rows` images, or all there are: stratified of a local split, the same number per class of a stream.

        Without classes, images are of class UNMAPPED and drawn as of a stream.
        """
        pool, split = cls(data, columns.split, spool), columns.split
        if data.folder is None or not columns.class_of:
            pool.images = stratified(pool._draw_from_stream(columns, num_rows, progress), data.query.seed)
            return pool
        progress(f"reading labels of {split}", 0, 0)
        labels = np.array([columns.class_id(raw) for raw in data.labels(split, columns.label)], np.int64)
        known = np.flatnonzero(labels != UNMAPPED)
        pool.num_unmapped = len(labels) - len(known)
        rows = known[stratified_order(labels[known], data.query.seed)][:num_rows].tolist()
        stored: dict[int, StoredImage] = {}
        wanted = set(rows)
        for row, cell in enumerate(data.cells(split, columns.image, BATCH_IMAGES)):
            if len(stored) == len(wanted):
                break
            if row in wanted:
                stored[row] = pool._store(row, cell.as_py(), int(labels[row]))
                if len(stored) % PROGRESS_EVERY == 0:
                    progress(f"reading images of {split}", len(stored), len(wanted))
        pool.images = [stored[row] for row in rows]
        return pool

    def _draw_from_stream(self, columns: Columns, target: int, progress: Progress) -> list[StoredImage]:
        """Store equal shares per class, `target` images; spare images fill the shares that stay incomplete."""
        # A split may lack classes of others. Every whole number has a class, whether it occurs or not.
        classes = {match.model_id for match in columns.matchings[0].matches} & set(columns.class_of.values())
        quota, counts = -(-target // max(len(classes), 1)), Counter[int]()
        taken, spare = list[StoredImage](), list[StoredImage]()
        read = self.data.stream(self.split, columns.image, columns.label if columns.class_of else None)
        for row, (cell, raw) in enumerate(read):
            label = columns.class_id(raw)
            is_due = counts[label] < quota
            if (label != UNMAPPED or not columns.class_of) and (is_due or len(taken) + len(spare) < target):
                counts[label] += 1
                (taken if is_due else spare).append(self._store(row, cell, label))
                del spare[target - len(taken) :]
            if len(taken) == target:
                break
            if row % PROGRESS_EVERY == 0:
                progress(f"streaming images of {self.split}", len(taken) + len(spare), target)
        return [*taken, *spare]

    def _store(self, row: int, cell: Any, label: int) -> StoredImage:
        """Append the image of a cell to the spool."""
        image = self.data.image(cell)
        offset = self.spool.seek(0, 2)
        self.spool.write(image)
        # Raises on a full disk here, and not while a data set is read.
        self.spool.flush()
        path = cell.get("path") if isinstance(cell, dict) else None
        location = f"row {row} ({path.replace(self.data.root, '')!r})" if path else f"row {row}"
        # A cell without an image is no copy of another.
        return StoredImage(
            label, offset, len(image), hashlib.sha256(image or f"{self.split} {row}".encode()).digest(), location
        )

    def distinct_images(self) -> list[StoredImage]:
        """Return the images without copies of earlier ones."""
        originals: dict[bytes, StoredImage] = {}
        for image in self.images:
            originals.setdefault(image.digest, image)
        return list(originals.values())

    def write(
        self, parts: Mapping[str, Sequence[StoredImage]], folder: Path, progress: Progress
    ) -> dict[str, DrawnSplit]:
        """Write the decodable images of each part; AcquisitionError if more than one in a hundred can't be decoded."""
        damaged: list[str] = []

        def decodable(name: str, images: Sequence[StoredImage]) -> Iterator[tuple[bytes, int]]:
            for done, image in enumerate(images):
                if done % PROGRESS_EVERY == 0:
                    progress(f"checking images of {name}", done, len(images))
                self.spool.seek(image.offset)
                encoded = self.spool.read(image.size)
                try:
                    decode_rgb(encoded)
                except CorruptImageError as error:
                    damaged.append(f"{image.location}: {error}")
                else:
                    yield encoded, image.label

        drawn: dict[str, DrawnSplit] = {}
        for name, images in parts.items():
            path = folder / f"{name}.arrow"
            count = write_rows(path, decodable(name, images))
            drawn[name] = DrawnSplit(
                path=path, source_split=self.split, num_images=count, num_skipped=len(images) - count
            )
        num_images = sum(map(len, parts.values()))
        if len(damaged) > MAX_CORRUPT * num_images:
            problem = f"{len(damaged)} of {num_images} images of split {self.split!r} can't be decoded"
            advice = f"repair or remove them, or save them as {' or '.join(FORMATS)} (up to 1% are skipped)"
            raise AcquisitionError(f"{problem}, such as {damaged[0]}: {advice}")
        return drawn


def stratified(images: Sequence[StoredImage], seed: int) -> list[StoredImage]:
    """Return images in an order that follows from the seed, every prefix stratified."""
    labels = np.array([image.label for image in images], np.int64)
    return [images[index] for index in stratified_order(labels, seed)]


def stratified_order(labels: NDArray[np.int64], seed: int) -> NDArray[np.int64]:
    """Return all indices in an order whose every prefix holds each class in proportion, within one image."""
    positions = np.empty(len(labels))
    for label in np.unique(labels):
        rng, members = np.random.default_rng([seed, int(label) % 2**32]), np.flatnonzero(labels == label)
        offset = rng.random()
        positions[rng.permutation(members)] = (np.arange(len(members)) + offset) / len(members)
    return np.argsort(positions, kind="stable")


def content_order(images: Sequence[StoredImage]) -> list[StoredImage]:
    """Return images in an order that follows from their content only, every prefix stratified as above."""
    labels = np.array([image.label for image in images], np.int64)
    fractions = np.array([int.from_bytes(image.digest[:8], "big") / 2**64 for image in images])
    positions = np.empty(len(images))
    for label in np.unique(labels):
        members = np.flatnonzero(labels == label)
        members = members[np.argsort(fractions[members], kind="stable")]
        positions[members] = (np.arange(len(members)) + fractions[members]) / len(members)
    return [images[index] for index in np.argsort(positions, kind="stable")]


def evaluation_sizes(num_search: int, num_heldout: int, num_samples: int | None, split: str) -> tuple[int, int]:
    """Return the numbers of images to search on and to hold out; AcquisitionError if there are too few for both.

    The halves by content are random in size: slightly fewer than `num_samples` may be left.
    """
    num_usable, smaller_half = num_search + num_heldout, min(num_search, num_heldout)
    if smaller_half < 1 or (num_samples is not None and num_usable < 2 * num_samples):
        problem = f"split {split!r} has {num_usable} usable images, too few to search on {num_samples or 1} and hold out as many"
        advice = f"set num_samples to at most {num_usable // 2}" if num_samples else "name a larger split or data set"
        raise AcquisitionError(f"{problem}: {advice}")
    num_wanted = min(MAX_SEARCH if num_samples is None else num_samples, smaller_half)
    return num_wanted, min(HELDOUT_RATIO * num_wanted, num_heldout)
