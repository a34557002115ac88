"""Columns of a data set: the one of images, the one of labels, and what its labels mean to the model."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import datasets

from profiling_agent.data.dataset import OpenedData
from profiling_agent.data.hub import did_you_mean
from profiling_agent.data.labels import Matching, called_by_number, match_labels, match_numbers
from profiling_agent.errors import AcquisitionError

IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "png")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "class_label", "target", "category", "cls", "y")
TEXT = ("string", "large_string", "string_view")
BYTES = ("binary", "large_binary", "binary_view")
BY_TABLE = "a table that names images is read if it is called metadata.csv, its column of paths file_name, and it lies next to the images"
# How tables call a column of paths, besides the names of columns of images.
PATH_NAMES = ("file_name", "filename", "file", "path", "filepath", "file_path", "image_path", "img_path")
# ImageNet-21k has 21,841; a column of more is one of captions, names or dates.
MAX_LABELS = 25_000
# Of a stream whose labels aren't read without its images: these rows must have every name.
MAX_STREAMED_LABELS = 2000


@dataclass(frozen=True, slots=True)
class Columns:
    """Where images and labels are; `class_of` maps a raw label to the model's class, by the first of `matchings`.

    `num_classes` of the model's classes may occur. `known` are the raw labels that are allowed, None if all are.
    """

    image: str
    label: str
    matchings: tuple[Matching, ...]
    class_of: Mapping[Any, int]
    num_classes: int
    known: Collection[Any] | None = None
    notes: tuple[str, ...] = ()


def _listed(features: Mapping[str, Any]) -> str:
    described = (f"{name} ({getattr(kind, 'dtype', None) or type(kind).__name__})" for name, kind in features.items())
    return ", ".join(described) or "none"


def _dtype(kind: Any) -> str:
    return str(kind.dtype) if isinstance(kind, datasets.Value) else ""


def _is_image(kind: Any) -> bool:
    return isinstance(kind, datasets.Image) or (isinstance(kind, dict) and "bytes" in kind) or _dtype(kind) in BYTES


def _is_whole(kind: Any) -> bool:
    return _dtype(kind).startswith(("int", "uint", "bool"))


def _require(column: str, features: Mapping[str, Any], option: str) -> str:
    if column not in features:
        raise AcquisitionError(
            f"{option} is {column!r}, but the data set's columns are {_listed(features)}{did_you_mean(column, list(features))}"
        )
    return column


def find_image_column(features: Mapping[str, Any], named: str | None) -> str:
    """Return the column of images: named, of an image type, or with a usual name; AcquisitionError if there is none."""
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
    """Return columns that may hold labels: class labels, then usual names of strings, then of integers.

    Raises:
        AcquisitionError: there are none, or the named one is missing or of another kind.
    """
    features = data.features(split)
    if not features:
        raise AcquisitionError(
            f"split {split!r} of {data.query.dataset!r} holds no images, as no CSV or JSON does: {BY_TABLE}"
        )
    if (named := data.query.label_column) is not None:
        kind = features[_require(named, features, "label_column")]
        if not (isinstance(kind, datasets.ClassLabel) or _is_whole(kind) or _dtype(kind) in TEXT):
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
    """Return whether a cell holds a label; -1 marks unlabelled test images."""
    return cell not in (None, -1, "")


def _distinct_labels(data: OpenedData, split: str, column: str) -> set[Any]:
    """Return the different labels of a split, of its first rows only if more would download images."""
    found = set[Any]()
    for cell in data.labels(split, column, None if data.has_cheap_labels else MAX_STREAMED_LABELS):
        if is_label(cell):
            found.add(cell)
        if len(found) > MAX_LABELS:
            raise AcquisitionError(
                f"label column {column!r} holds more than {MAX_LABELS} different values, which are no classes: "
                "name another with label_column"
            )
    return found


def match_column(data: OpenedData, split: str, image: str, column: str, id2label: Mapping[int, str]) -> Columns:
    """Return how a column's labels match the model's classes; AcquisitionError if none does."""
    kind = data.features(split)[column]
    known: Collection[Any] | None = None
    notes: tuple[str, ...] = ()
    by = data.query.label_match
    if isinstance(kind, datasets.ClassLabel):
        matchings = match_labels(list[str](kind.names), id2label, by=by)
        class_of: Mapping[Any, int] = matchings[0].class_of
    elif _is_whole(kind):
        numbers = _distinct_labels(data, split, column)
        if not numbers:
            raise AcquisitionError(
                f"label column {column!r} of split {split!r} holds no label: name another with label_column"
            )
        if not (numbers <= id2label.keys() or numbers <= called_by_number(id2label).keys()):
            raise AcquisitionError(
                f"label column {column!r} holds whole numbers as large as {max(numbers)} and as small as {min(numbers)}, but the "
                f"model has {len(id2label)} classes, 0 to {len(id2label) - 1}: name another with label_column, or choose a model "
                "that was trained on these classes"
            )
        matchings = match_numbers(numbers, id2label, by=by)
        class_of = matchings[0].class_of
        # The train split may hold those that this one lacks.
        known = class_of.keys()
        if data.has_cheap_labels:
            return Columns(image, column, matchings, class_of, len(numbers), known, notes)
    else:
        texts = sorted(_distinct_labels(data, split, column))
        matchings = match_labels(texts, id2label, ordered=False, by=by)
        class_of = {texts[place]: index for place, index in matchings[0].class_of.items()}
        if not data.has_cheap_labels:
            known = frozenset(texts)
            notes = (
                f"labels are names in a stream, of which the first {MAX_STREAMED_LABELS} rows of split {split!r} have {len(texts)}: "
                "the verdict is about no others that come later, so if rows are sorted by class, download the data set (hf "
                "download) and give its folder",
            )
    return Columns(image, column, matchings, class_of, len(set(class_of.values())), known, notes)


def choose_columns(data: OpenedData, split: str, id2label: Mapping[int, str]) -> Columns:
    """Return the image column and the label column that maps best to the model's classes; AcquisitionError if none does."""

    def score(columns: Columns) -> tuple[float, int]:
        """Return the share of the labels that map, and how many classes are reached."""
        ids = [match.model_id for match in columns.matchings[0].matches]
        mapped = [index for index in ids if index is not None]
        return len(mapped) / len(ids), len(set(mapped))

    image = find_image_column(data.features(split), data.query.image_column)
    refusal: AcquisitionError | None = None
    for tier in label_candidates(data, split):
        found: dict[str, Columns] = {}
        for column in tier:
            try:
                found[column] = match_column(data, split, image, column, id2label)
            except AcquisitionError as error:
                refusal = refusal or error
        if found:
            best = max(found.values(), key=score)
            if not (others := [repr(column) for column in tier if column != best.label]):
                return best
            note = f"labels are read from column {best.label!r}, which maps best to the model's classes; not used: {', '.join(others)}"
            return replace(best, notes=(note, *best.notes))
    assert refusal is not None, "there is a tier, and none of its columns matched"
    raise refusal
