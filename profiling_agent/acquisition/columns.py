"""Columns of a data set: the one of images, the one of labels, and what its labels mean to the model."""

import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, cast

import datasets

from profiling_agent.acquisition.data import BATCH_ROWS, BY_TABLE, OpenedData
from profiling_agent.acquisition.labels import called_by_number, match_labels, match_numbers
from profiling_agent.documents import clean
from profiling_agent.errors import AcquisitionError
from profiling_agent.records import LabelMatch

IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "png")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "class_label", "target", "category", "cls", "y")
TEXT = ("string", "large_string", "string_view")
BYTES = ("binary", "large_binary", "binary_view")
# How tables call a column of paths, beside the names of columns of images.
PATH_NAMES = ("file_name", "filename", "file", "path", "filepath", "file_path", "image_path", "img_path")
# ImageNet-21k has 21,841; a column of more is one of captions, names or dates.
MAX_LABELS = 25_000
MAX_LABEL_CHARACTERS = 1000
# Of a stream whose labels aren't read without its images, all else would be downloaded: these rows must show every name.
MAX_STREAMED_LABELS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where images and labels are; `class_of` maps a raw label to the model's class, `matches` says why.

    `num_classes` of the model's classes are there, or may be, where not all labels were read. `known` are the raw labels that
    there may be at all; None where one that `class_of` lacks is no class of the model.
    """

    image: str
    label: str
    matches: tuple[LabelMatch, ...]
    class_of: Mapping[Any, int]
    num_classes: int
    known: Collection[Any] | None = None
    notes: tuple[str, ...] = ()

    def num_names(self, features: Mapping[str, Any]) -> int | None:
        """Return how many numbers a split's labels may be, None where they are other than numbers with names."""
        kind = features.get(self.label)
        return len(kind.names) if isinstance(kind, datasets.ClassLabel) else None


def _listed(features: Mapping[str, Any]) -> str:
    described = (
        f"{clean(name)} ({getattr(kind, 'dtype', None) or type(kind).__name__})" for name, kind in features.items()
    )
    return ", ".join(described) or "none"


def _is_image(kind: Any) -> bool:
    return isinstance(kind, datasets.Image) or (isinstance(kind, dict) and "bytes" in kind) or _dtype(kind) in BYTES


def _dtype(kind: Any) -> str:
    return str(kind.dtype) if isinstance(kind, datasets.Value) else ""


def _is_label_kind(kind: Any) -> bool:
    return isinstance(kind, datasets.ClassLabel) or _is_whole(kind) or _dtype(kind) in TEXT


def _is_whole(kind: Any) -> bool:
    return _dtype(kind).startswith(("int", "uint", "bool"))


def _require(column: str, features: Mapping[str, Any], option: str) -> str:
    if column not in features:
        raise AcquisitionError(f"{option} is {column!r}, but the data set's columns are {_listed(features)}")
    return column


def find_image_column(features: Mapping[str, Any], named: str | None) -> str:
    """Return the column of images: the named one, else the only one of an image type, else one with a usual name.

    Raises:
        AcquisitionError: there is none, or the named one holds no images.
    """
    if named is not None:
        if not _is_image(features[_require(named, features, "image_column")]):
            advice = f"; {BY_TABLE}" if _dtype(features[named]) in TEXT else ""
            raise AcquisitionError(
                f"image_column {named!r} holds no images: the columns are {_listed(features)}{advice}"
            )
        return named
    typed = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    found = typed or [name for name, kind in features.items() if _is_image(kind) and name in IMAGE_NAMES]
    usual = [name for name in IMAGE_NAMES if name in found]
    if not found or (len(found) > 1 and not usual):
        several = "several image columns" if found else "no image column"
        names_images = not found and any(_dtype(features.get(name)) in TEXT for name in (*IMAGE_NAMES, *PATH_NAMES))
        advice = BY_TABLE if names_images else "name image_column"
        raise AcquisitionError(f"the data set has {several}: its columns are {_listed(features)}; {advice}")
    return usual[0] if usual else found[0]


def label_candidates(data: OpenedData, split: str) -> list[list[str]]:
    """Return the columns of a split that may hold labels, in tiers: class labels, then strings, then integers of a usual name.

    Raises:
        AcquisitionError: there are none.
    """
    features = data.features(split)
    if not features:
        raise AcquisitionError(
            f"split {split!r} of {data.query.dataset!r} holds no images, as no CSV or JSON does: {BY_TABLE}"
        )
    if (named := data.query.label_column) is not None:
        if not _is_label_kind(features[_require(named, features, "label_column")]):
            raise AcquisitionError(
                f"label_column {named!r} holds neither class labels nor names nor whole numbers: the columns are "
                f"{_listed(features)}"
            )
        return [[named]]
    usual = [name for name in LABEL_NAMES if name in features]
    tiers = [
        [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)],
        [name for name in usual if _dtype(features[name]) in TEXT],
        [name for name in usual if _dtype(features[name]).startswith(("int", "uint"))],
    ]
    if not any(tiers):
        advice = f", or label images by a table: {BY_TABLE}" if data.is_image_folder else ""
        why = data.stray_image(split) or f"its columns are {_listed(features)}; name label_column{advice}"
        raise AcquisitionError(f"the data set has no label column: {why}")
    return [tier for tier in tiers if tier]


def is_label(cell: Any) -> bool:
    """Say whether a cell holds a label; -1 is how unlabelled test images are marked."""
    return cell not in (None, -1, "")


def _are_all_read(data: OpenedData) -> bool:
    """Say whether all labels of a split are read: where that downloads no images."""
    return data.is_local or data.is_parquet or data.is_image_folder


def _batches(data: OpenedData, split: str, column: str) -> Iterator[set[Any]]:
    """Yield the different labels of each few rows, of a stream that holds images beside them only of the first."""
    cells = data.labels(split, column, None if _are_all_read(data) else MAX_STREAMED_LABELS)
    while batch := set(itertools.islice(cells, BATCH_ROWS)):
        yield {cell for cell in batch if is_label(cell)}


def _whole_labels(data: OpenedData, split: str, column: str, id2label: Mapping[int, str]) -> set[int]:
    """Return the numbers that a column of whole numbers holds.

    Raises:
        AcquisitionError: it holds others than the model's classes, or those called so, as one of dates or of row numbers does, or none.
    """
    found, called = set[int](), called_by_number(id2label)
    for batch in _batches(data, split, column):
        found |= {int(cell) for cell in batch}
        if not (found <= id2label.keys() or found <= called.keys()):
            raise AcquisitionError(
                f"label column {column!r} holds whole numbers as large as {max(batch)} and as small as "
                f"{min(batch)}, but the model has {len(id2label)} classes, 0 to {len(id2label) - 1}: name another with "
                "label_column, or choose a model that was trained on these classes"
            )
    if not found:
        raise AcquisitionError(
            f"label column {column!r} of split {split!r} holds no label: name another with label_column"
        )
    return found


def _names(data: OpenedData, split: str, column: str) -> list[str]:
    """Return the different names that a column of text holds; AcquisitionError where they can't be those of classes."""
    names: set[str] = set()
    for batch in _batches(data, split, column):
        names |= batch
        if len(names) > MAX_LABELS or any(len(name) > MAX_LABEL_CHARACTERS for name in batch):
            raise AcquisitionError(
                f"label column {column!r} holds more than {MAX_LABELS} different texts, or one of more than "
                f"{MAX_LABEL_CHARACTERS} characters, which are no names of classes: name another with label_column"
            )
    return sorted(names)


def _match_column(data: OpenedData, split: str, image: str, column: str, id2label: Mapping[int, str]) -> Columns:
    """Return how a column's labels match, and the class of each raw label that did."""
    kind = data.features(split)[column]
    if _is_whole(kind):
        return _match_whole(data, split, image, column, id2label)
    known: Collection[Any] | None = None
    notes: tuple[str, ...] = ()
    if isinstance(kind, datasets.ClassLabel):
        # A file says itself what they are.
        names = cast("Sequence[Any]", kind.names)
        if not all(isinstance(name, str) and len(name) <= MAX_LABEL_CHARACTERS for name in names):
            raise AcquisitionError(
                f"label column {column!r} has names of classes that are no texts of up to {MAX_LABEL_CHARACTERS} "
                "characters: correct them in the data set, or name another with label_column"
            )
        raw: Sequence[Any] = range(len(names))
        matches = match_labels(names, id2label)
    else:
        raw = _names(data, split, column)
        matches = match_labels(raw, id2label, ordered=False)
        if not _are_all_read(data):
            known, notes = frozenset(raw), (_of_first_rows(split, len(raw)),)
    pairs = zip(raw, matches, strict=True)
    class_of = {cell: match.model_id for cell, match in pairs if match.model_id is not None}
    return Columns(
        image=image,
        label=column,
        matches=matches,
        class_of=class_of,
        num_classes=len(set(class_of.values())),
        known=known,
        notes=notes,
    )


def _of_first_rows(split: str, num_labels: int) -> str:
    return (
        f"labels are names in a stream, of which the first {MAX_STREAMED_LABELS} rows of split {split!r} have {num_labels}: the verdict is about "
        "no others that come later, so where rows are sorted by class, download the data set (hf download) and give its folder"
    )


def _match_whole(data: OpenedData, split: str, image: str, column: str, id2label: Mapping[int, str]) -> Columns:
    """Return what the numbers of a column are to the model; the train split may hold those that this one lacks."""
    found = _whole_labels(data, split, column, id2label)
    matches, class_of = match_numbers(found, id2label)
    note = (
        f"no label of split {split!r} was seen to be 0, and all are taken as they stand, 0 for the first of the model's classes: if the "
        "data set counts from 1, take 1 from each"
    )
    notes = (note,) if 0 not in found and matches[0].rule == "id" else ()
    return Columns(
        image=image,
        label=column,
        matches=matches,
        class_of=class_of,
        num_classes=len(found) if _are_all_read(data) else len(class_of),
        known=class_of.keys(),
        notes=notes,
    )


def _score(matches: Iterable[LabelMatch], num_classes: int) -> tuple[float, float]:
    """Return the share of the labels that map, and of the classes that are reached."""
    ids = [match.model_id for match in matches]
    mapped = [index for index in ids if index is not None]
    return len(mapped) / len(ids), len(set(mapped)) / num_classes


def choose_columns(data: OpenedData, split: str, id2label: Mapping[int, str]) -> Columns:
    """Return the image column, and the label column whose labels map best to the model's classes.

    Raises:
        AcquisitionError: a column is missing, or no label maps.
    """
    features = data.features(split)
    image = find_image_column(features, data.query.image_column)
    refusal: AcquisitionError | None = None
    for tier in label_candidates(data, split):
        found: dict[str, Columns] = {}
        for column in tier:
            try:
                found[column] = _match_column(data, split, image, column, id2label)
            except AcquisitionError as error:
                refusal = refusal or error
        if found:
            best = max(found.values(), key=lambda columns: _score(columns.matches, len(id2label)))
            others = [repr(column) for column in tier if column != best.label]
            if not others:
                return best
            note = f"labels are read from column {best.label!r}, which maps best to the model's classes; not used: {', '.join(others)}"
            return replace(best, notes=(note, *best.notes))
    raise refusal or AcquisitionError(
        f"split {split!r} of {data.query.dataset!r} has no labels: name another with split"
    )
