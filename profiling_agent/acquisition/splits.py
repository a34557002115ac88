"""Splits: which ones of a data set to use, and disjoint sets of their images, drawn once with the run's seed."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from profiling_agent.acquisition.columns import Columns, choose_columns, is_label, label_candidates
from profiling_agent.acquisition.data import DataQuery, OpenedData, open_data
from profiling_agent.acquisition.images import FORMATS, decode_rgb, write_rows
from profiling_agent.acquisition.labels import guesses, shown
from profiling_agent.acquisition.pools import UNMAPPED, Pool, Spool, open_pool
from profiling_agent.acquisition.sampling import (
    NUM_CALIBRATION,
    Sides,
    content_order,
    evaluation_sizes,
    num_looked_at,
    sides,
    stratified_order,
)
from profiling_agent.documents import clean
from profiling_agent.errors import AcquisitionError, CorruptImageError
from profiling_agent.files import scratch_in
from profiling_agent.progress import Progress, silent
from profiling_agent.quiet import quiet
from profiling_agent.records import LabelMatch

TRAIN = ("train", "training")
EVALUATION = ("test", "validation", "valid", "val", "dev")
# Enough rows to see past a stray unlabelled image; a split of a competition has no label at all.
NUM_LABELS_SEEN = 100


def _is_labelled(data: OpenedData, split: str) -> bool:
    """Say whether any of a split's first rows has a label; columns are checked on the way."""
    tiers = label_candidates(data, split)
    return any(
        is_label(cell)
        for tier in tiers
        for column in tier
        for cell in islice(data.labels(split, column), NUM_LABELS_SEEN)
    )


def choose_evaluation_split(data: OpenedData) -> str:
    """Return the labelled split to evaluate on: the named one, else the first usual one but train.

    Raises:
        AcquisitionError: there is none.
    """
    name, there = data.query.dataset, clean(", ".join(data.splits))
    if (named := data.query.split) is not None:
        if named not in data.splits:
            advice = "; ".join([f"use one of {there}", *data.misnamed_splits()])
            raise AcquisitionError(f"dataset {name!r} has no split {named!r}: {advice}")
        if not _is_labelled(data, named):
            raise AcquisitionError(f"split {named!r} of {name!r} has no labels (missing or -1): use another of {there}")
        return named
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
    advice = "; ".join(data.misnamed_splits()) or (
        "name one with split; accuracies on images that the model was trained on are optimistic"
    )
    raise AcquisitionError(f"dataset {name!r} has no labelled test or validation split (it has {there}): {advice}")


def choose_calibration_split(data: OpenedData, evaluation: str) -> str:
    """Return the train split, or the evaluation split where there is no other."""
    return next((split for split in TRAIN if split in data.splits and split != evaluation), evaluation)


MAX_CORRUPT = MAX_REPEATED = 0.01
NUM_NAMED = 5


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSplit:
    """One set of images on disk; `num_skipped` more were drawn and could not be decoded."""

    path: Path
    source_split: str
    num_images: int
    num_skipped: int


@dataclass(frozen=True, slots=True, kw_only=True)
class DrawnSplits:
    """Disjoint sets, how labels became classes, and what a reader of the results should know."""

    calibration: DrawnSplit
    search: DrawnSplit
    heldout: DrawnSplit
    labels: tuple[LabelMatch, ...]
    notes: tuple[str, ...]
    recovery: DrawnSplit | None = None


def _order(pool: Pool, seed: int) -> NDArray[np.int64]:
    usable = np.flatnonzero(pool.labels != UNMAPPED)
    return usable[stratified_order(pool.labels[usable], seed)]


def _store(
    pool: Pool, rows: NDArray[np.int64], path: Path, split: str, progress: Progress
) -> tuple[DrawnSplit, dict[int, str]]:
    """Write the images of `rows` that can be decoded; return as well why the others can't be, by row."""
    damaged: dict[int, str] = {}

    def usable() -> Iterator[tuple[bytes, int]]:
        images = pool.fetch(rows.tolist(), progress)
        for done, (row, data) in enumerate(zip(rows.tolist(), images, strict=True)):
            if done % 100 == 0:
                progress(f"checking images of {path.stem}", done, len(rows))
            try:
                decode_rgb(data or b"")
            except CorruptImageError as error:
                damaged[row] = str(error)
            else:
                yield data or b"", int(pool.labels[row])

    num_images = write_rows(path, usable())
    return DrawnSplit(path=path, source_split=split, num_images=num_images, num_skipped=len(damaged)), damaged


def _draw(
    pool: Pool, split: str, parts: Mapping[str, NDArray[np.int64]], folder: Path, progress: Progress
) -> dict[str, DrawnSplit]:
    """Write each part; AcquisitionError where more than one image in a hundred is damaged."""
    drawn: dict[str, DrawnSplit] = {}
    damaged: dict[int, str] = {}
    for name, rows in parts.items():
        drawn[name], found = _store(pool, rows, folder / f"{name}.parquet", split, progress)
        damaged |= found
    num_rows = sum(len(rows) for rows in parts.values())
    if len(damaged) > MAX_CORRUPT * num_rows:
        first, *others = sorted(damaged)[:NUM_NAMED]
        more = f", others are {', '.join(map(pool.where, others))}" if others else ""
        raise AcquisitionError(
            f"{len(damaged)} of {num_rows} images drawn from split {split!r} can't be decoded, the first is "
            f"{pool.where(first)} ({damaged[first]}){more}: repair or remove them, or save them as one of "
            f"{', '.join(FORMATS)} (up to 1% are skipped)"
        )
    return drawn


def draw_splits(
    query: DataQuery, *, id2label: Mapping[int, str], folder: Path, progress: Progress = silent
) -> DrawnSplits:
    """Write calibration.parquet, search.parquet and heldout.parquet into `folder`, recovery.parquet if it is asked for.

    Each holds the columns `image` (encoded bytes) and `label` (the model's class id). The sets are disjoint,
    stratified by class, the same for the same seed, and ordered so that every prefix is stratified too. No image that one
    call holds out is searched on by another, whatever the seed and the number of images.

    Raises:
        AcquisitionError: the data set can't be had, has no image or label column, no label that the model knows, no
            labelled split to evaluate on, no train split to recover with where that is asked for, too few images, or
            too many that are damaged, or there more than once.
    """
    with quiet(), scratch_in(folder) as cache, Spool(folder) as spool:
        data = open_data(query, cache=cache, progress=progress)
        evaluation = choose_evaluation_split(data)
        columns = choose_columns(data, evaluation, id2label)
        return _draw_from(data, evaluation, columns, spool, progress)


def look_up_labels(
    query: DataQuery, *, id2label: Mapping[int, str], progress: Progress = silent
) -> tuple[str, tuple[LabelMatch, ...]]:
    """Return the split that would be evaluated on, and what its labels are to a model; nothing is drawn.

    Raises:
        AcquisitionError: as `draw_splits`, as far as it can be told without an image.
    """
    with quiet(), tempfile.TemporaryDirectory() as cache:
        data = open_data(query, cache=Path(cache), progress=progress)
        evaluation = choose_evaluation_split(data)
        return evaluation, choose_columns(data, evaluation, id2label).matches


def _draw_from(data: OpenedData, evaluation: str, columns: Columns, spool: Spool, progress: Progress) -> DrawnSplits:
    query, folder = data.query, spool.folder
    train = choose_calibration_split(data, evaluation)
    if query.num_recovery and train == evaluation:
        advice = "; ".join(["set recover_epochs to 0, or choose a data set that has one", *data.misnamed_splits()])
        raise AcquisitionError(
            f"dataset {query.dataset!r} has no train split beside {evaluation!r}, and to recover would be to train on the "
            f"images that accuracy is measured on: {advice}"
        )
    num_rows = num_looked_at(query.num_samples, NUM_CALIBRATION if train == evaluation else 0)
    pool = open_pool(data, evaluation, columns, target=num_rows, spool=spool, progress=progress)
    looked = _look(pool, evaluation, _order(pool, query.seed)[:num_rows].tolist(), progress)
    search = looked.stratified(looked.sides.search, query.seed)
    reserved = search[: min(NUM_CALIBRATION, len(search) // 2)] if train == evaluation else search[:0]
    search = search[len(reserved) :]
    num_search, num_heldout = evaluation_sizes(len(search), len(looked.sides.heldout), query.num_samples, evaluation)
    heldout = looked.stratified(looked.sides.heldout, query.seed)
    parts = {"search": looked.by_content(search[:num_search]), "heldout": looked.by_content(heldout[:num_heldout])}
    num_in_both = 0
    if train == evaluation:
        drawn = _draw(pool, evaluation, {"calibration": reserved, **parts}, folder, progress)
    else:
        drawn = _draw(pool, evaluation, parts, folder, progress)
        drawn_of_train, num_in_both = _draw_train(data, train, columns, looked, spool, progress)
        drawn |= drawn_of_train
    notes = (*_notes(data, evaluation, train, columns, pool, drawn), *_repeats(looked, train, num_in_both))
    return DrawnSplits(**drawn, labels=columns.matches, notes=notes)


@dataclass(frozen=True, slots=True)
class _Looked:
    """The rows of a pool that were looked at: the digest of each one's image, and what it is for."""

    pool: Pool
    split: str
    digests: Mapping[int, bytes | None]
    sides: Sides

    def stratified(self, rows: Sequence[int], seed: int) -> NDArray[np.int64]:
        """Return rows in an order that the seed decides, every prefix stratified."""
        found = np.asarray(rows, dtype=np.int64)
        return found[stratified_order(self.pool.labels[found], seed)]

    def by_content(self, rows: NDArray[np.int64]) -> NDArray[np.int64]:
        """Return rows in the order that their images decide, every prefix stratified."""
        return rows[content_order(self.pool.labels[rows], [self.digests[row] or b"" for row in rows.tolist()])]

    def where(self, digest: bytes | None) -> str:
        """Return how a person finds the first image that was looked at and has this digest."""
        return self.pool.where(next(row for row, own in self.digests.items() if own == digest))


def _look(pool: Pool, split: str, rows: list[int], progress: Progress) -> _Looked:
    """Read the images of `rows`; AcquisitionError where more than one in a hundred is another's again."""
    digests = pool.digests(rows, progress)
    found = sides(rows, digests)
    looked = _Looked(pool, split, dict(zip(rows, digests, strict=True)), found)
    if len(found.repeated) > MAX_REPEATED * len(rows):
        first = min(found.repeated)
        raise AcquisitionError(
            f"{len(found.repeated)} of {len(rows)} images of split {split!r} that were looked at are there more than once, "
            f"the first copy is {pool.where(first)}, of {looked.where(looked.digests[first])}: remove the copies (up to 1% are "
            "counted once)"
        )
    return looked


def _draw_train(
    data: OpenedData, train: str, columns: Columns, measured: _Looked, spool: Spool, progress: Progress
) -> tuple[dict[str, DrawnSplit], int]:
    """Write what is drawn of the train split: calibration images and, where asked for, others to recover with.

    What was looked at to measure on is not drawn; return how many images that were.
    """
    num_recovery, seed = data.query.num_recovery, data.query.seed
    wanted = NUM_CALIBRATION + num_recovery
    spare = int(MAX_REPEATED * wanted) + 1
    pool = open_pool(data, train, columns, target=wanted + spare, spool=spool, progress=progress)
    usable = _order(pool, seed)
    looked = _look(pool, train, usable[: wanted + spare].tolist(), progress)
    elsewhere, repeated = set(measured.digests.values()) - {None}, set(looked.sides.repeated)
    rows = [row for row in looked.digests if row not in repeated]
    own = [row for row in rows if looked.digests[row] not in elsewhere]
    num_in_both = len(rows) - len(own)
    if num_in_both > MAX_REPEATED * len(rows):
        first = next(row for row in rows if looked.digests[row] in elsewhere)
        raise AcquisitionError(
            f"{num_in_both} of {len(rows)} images drawn from split {train!r} are in split {measured.split!r} too, the first "
            f"is {pool.where(first)}, there {measured.where(looked.digests[first])}: accuracies would be measured on what models "
            "are made with, so remove them from one (up to 1% are left out)"
        )
    order = np.asarray(own[:wanted], dtype=np.int64)
    parts = {"calibration": order[:NUM_CALIBRATION]}
    if num_recovery:
        parts["recovery"] = order[NUM_CALIBRATION:]
        if not len(parts["recovery"]):
            raise AcquisitionError(
                f"split {train!r} has {len(usable)} usable images, and the first {NUM_CALIBRATION} are to calibrate with: "
                "none is left to recover with, so set recover_epochs to 0 or choose a larger data set"
            )
    return _draw(pool, train, parts, spool.folder, progress), num_in_both


def _repeats(looked: _Looked, train: str, num_in_both: int) -> tuple[str, ...]:
    """Return what a reader should know about images that are there more than once."""
    num_repeated = len(looked.sides.repeated)
    said = (
        (num_repeated, f"{num_repeated} images of split {looked.split!r} are another's again, and were counted once"),
        (num_in_both, f"{num_in_both} images of split {train!r} are in split {looked.split!r} too, and were left out"),
    )
    return tuple(text for count, text in said if count)


def _notes(
    data: OpenedData, evaluation: str, train: str, columns: Columns, pool: Pool, drawn: Mapping[str, DrawnSplit]
) -> tuple[str, ...]:
    """Return what a reader of the results should know about the images."""
    calibration, recovery = drawn["calibration"], drawn.get("recovery")
    num_unmapped = int((pool.labels == UNMAPPED).sum())
    unknown = [match.dataset_label for match in columns.matches if match.model_id is None]
    num_classes, num_search = columns.num_classes, drawn["search"].num_images
    asked, guessed = data.query.num_samples or 0, guesses(columns.matches)
    said = (
        (guessed is not None, guessed or ""),
        (
            evaluation in TRAIN,
            f"accuracies are measured on split {evaluation!r}, as asked: on images that the model was trained on "
            "they are optimistic",
        ),
        (
            train == evaluation,
            f"calibration images come from split {evaluation!r} too, disjoint from those that accuracy is measured on",
        ),
        (
            calibration.num_images + calibration.num_skipped < NUM_CALIBRATION,
            f"only {calibration.num_images} images are there to calibrate with, not {NUM_CALIBRATION}",
        ),
        (
            recovery is not None,
            f"pruned models are trained on {recovery.num_images if recovery else 0} images of split {train!r}, "
            "which are in no other set",
        ),
        (num_unmapped > 0, f"{num_unmapped} images of split {evaluation!r} have no label that the model knows"),
        (
            bool(unknown),
            f"{len(unknown)} of the data set's {len(columns.matches)} labels match no class of the model or several, and their "
            f"images were left out: {shown(unknown)}",
        ),
        (
            num_search + drawn["search"].num_skipped < asked,
            f"{num_search} images are searched on, not {asked}: by their content, the others are to be held out",
        ),
        (
            num_search < num_classes,
            f"{num_search} images to search on are fewer than the data set's {num_classes} classes",
        ),
        (not data.is_local, "images were streamed and drawn in equal numbers per class"),
    )
    return (*data.notes, *columns.notes, *(text for holds, text in said if holds))
