"""Splits: which ones of a data set to use, and disjoint sets of their images, drawn once with the run's seed."""

import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from profiling_agent.acquisition.batches import FORMATS, decode_rgb, write_split
from profiling_agent.acquisition.columns import Columns, choose_columns, is_label, label_candidates
from profiling_agent.acquisition.data import DataQuery, OpenedData, open_data
from profiling_agent.acquisition.pools import UNMAPPED, Pool, open_pool
from profiling_agent.acquisition.sampling import NUM_CALIBRATION, evaluation_sizes, stratified_order, stream_target
from profiling_agent.documents import clean
from profiling_agent.errors import AcquisitionError, CorruptImageError
from profiling_agent.progress import Progress, silent
from profiling_agent.quiet import quiet
from profiling_agent.records import LabelMatch

TRAIN = ("train", "training")
EVALUATION = ("test", "validation", "valid", "val", "dev")
# Enough rows to see past a stray unlabelled image; a split of a competition has no label at all.
NUM_LABELS_SEEN = 100


def _is_labelled(data: OpenedData, split: str) -> bool:
    """Say whether any of a split's first rows has a label; columns are checked on the way."""
    tiers = label_candidates(data.features(split), data.query.label_column)
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
            raise AcquisitionError(f"dataset {name!r} has no split {named!r}: use one of {there}")
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
    raise refusal or AcquisitionError(
        f"dataset {name!r} has no labelled test or validation split (it has {there}): name one with split; "
        "accuracies on images that the model was trained on are optimistic"
    )


def choose_calibration_split(data: OpenedData, evaluation: str) -> str:
    """Return the train split, or the evaluation split where there is no other."""
    return next((split for split in TRAIN if split in data.splits and split != evaluation), evaluation)


MAX_CORRUPT = 0.01
# A train split's share of the evaluation images, where calibration has to come from among them.
CALIBRATION_SHARE = 4


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
) -> tuple[DrawnSplit, list[int]]:
    """Write the images of `rows` that can be decoded; return the rows that can't as well."""
    images: list[bytes] = []
    labels: list[int] = []
    corrupt: list[int] = []
    for done, (row, data) in enumerate(zip(rows.tolist(), pool.fetch(rows.tolist(), progress), strict=True)):
        try:
            decode_rgb(data or b"")
        except CorruptImageError:
            corrupt.append(row)
            continue
        images.append(data or b"")
        labels.append(int(pool.labels[row]))
        if done % 100 == 0:
            progress(f"checking images of {path.stem}", done, len(rows))
    write_split(path, images, labels)
    return DrawnSplit(path=path, source_split=split, num_images=len(images), num_skipped=len(corrupt)), corrupt


def _draw(
    pool: Pool, split: str, parts: Mapping[str, NDArray[np.int64]], folder: Path, progress: Progress
) -> dict[str, DrawnSplit]:
    """Write each part; AcquisitionError where more than one image in a hundred is damaged."""
    drawn: dict[str, DrawnSplit] = {}
    corrupt: list[int] = []
    for name, rows in parts.items():
        drawn[name], damaged = _store(pool, rows, folder / f"{name}.parquet", split, progress)
        corrupt += damaged
    num_rows = sum(len(rows) for rows in parts.values())
    if len(corrupt) > MAX_CORRUPT * num_rows:
        raise AcquisitionError(
            f"{len(corrupt)} of {num_rows} images drawn from split {split!r} can't be decoded, the first is row "
            f"{min(corrupt)}: repair or remove them, or save them as one of {', '.join(FORMATS)} (up to 1% are skipped)"
        )
    return drawn


def draw_splits(
    query: DataQuery, *, id2label: Mapping[int, str], folder: Path, progress: Progress = silent
) -> DrawnSplits:
    """Write calibration.parquet, search.parquet and heldout.parquet into `folder`, recovery.parquet if it is asked for.

    Each holds the columns `image` (encoded bytes) and `label` (the model's class id). The sets are disjoint,
    stratified by class, the same for the same seed, and ordered so that every prefix is stratified too.

    Raises:
        AcquisitionError: the data set can't be had, has no image or label column, no label that the model knows, no
            labelled split to evaluate on, no train split to recover with where that is asked for, too few images, or
            too many damaged ones.
    """
    with quiet(), tempfile.TemporaryDirectory() as cache:
        data = open_data(query, cache=Path(cache), progress=progress)
        evaluation = choose_evaluation_split(data)
        columns = choose_columns(data, evaluation, id2label)
        return _draw_from(data, evaluation, columns, folder, progress)


def _draw_from(data: OpenedData, evaluation: str, columns: Columns, folder: Path, progress: Progress) -> DrawnSplits:
    query = data.query
    train = choose_calibration_split(data, evaluation)
    if query.num_recovery and train == evaluation:
        raise AcquisitionError(
            f"dataset {query.dataset!r} has no train split beside {evaluation!r}, and to recover would be to train on the "
            "images that accuracy is measured on: set recover_epochs to 0, or choose a data set that has one"
        )
    target = stream_target(query.num_samples) + (NUM_CALIBRATION if train == evaluation else 0)
    pool = open_pool(data, evaluation, columns, target=target, progress=progress)
    order = _order(pool, query.seed)
    reserved = order[:0]
    if train == evaluation:
        reserved = order[: min(NUM_CALIBRATION, len(order) // CALIBRATION_SHARE)]
        order = order[len(reserved) :]
    num_search, num_heldout = evaluation_sizes(len(order), query.num_samples, evaluation)
    parts = {"search": order[:num_search], "heldout": order[num_search : num_search + num_heldout]}
    if train == evaluation:
        drawn = _draw(pool, evaluation, {"calibration": reserved, **parts}, folder, progress)
    else:
        drawn = _draw(pool, evaluation, parts, folder, progress)
        drawn |= _draw_train(data, train, columns, folder, progress)
    notes = _notes(data, evaluation, train, columns, pool, drawn)
    return DrawnSplits(**drawn, labels=columns.matches, notes=notes)


def _draw_train(
    data: OpenedData, train: str, columns: Columns, folder: Path, progress: Progress
) -> dict[str, DrawnSplit]:
    """Write what is drawn of the train split: calibration images and, where asked for, others to recover with."""
    num_recovery, seed = data.query.num_recovery, data.query.seed
    pool = open_pool(data, train, columns, target=NUM_CALIBRATION + num_recovery, progress=progress)
    order = _order(pool, seed)
    parts = {"calibration": order[:NUM_CALIBRATION]}
    if num_recovery:
        parts["recovery"] = order[NUM_CALIBRATION : NUM_CALIBRATION + num_recovery]
        if not len(parts["recovery"]):
            raise AcquisitionError(
                f"split {train!r} has {len(order)} usable images, and the first {NUM_CALIBRATION} are to calibrate with: "
                "none is left to recover with, so set recover_epochs to 0 or choose a larger data set"
            )
    return _draw(pool, train, parts, folder, progress)


def _notes(
    data: OpenedData, evaluation: str, train: str, columns: Columns, pool: Pool, drawn: Mapping[str, DrawnSplit]
) -> tuple[str, ...]:
    """Return what a reader of the results should know about the images."""
    calibration, recovery = drawn["calibration"], drawn.get("recovery")
    num_unmapped = int((pool.labels == UNMAPPED).sum())
    said = (
        (columns.note is not None, columns.note or ""),
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
        (not data.is_local, "images were streamed and drawn in equal numbers per class"),
    )
    return tuple(text for holds, text in said if holds)
