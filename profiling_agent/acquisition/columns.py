"""Columns of a data set: the one of images, the one of labels, and what its labels mean to the model."""

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import datasets

from profiling_agent.acquisition.data import OpenedData
from profiling_agent.acquisition.hub import did_you_mean
from profiling_agent.acquisition.labels import Matching, called_by_number, match_labels, match_numbers
from profiling_agent.errors import AcquisitionError
from profiling_agent.records import LabelMatch

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

    `num_classes` of the model's classes occur, or may occur if not all labels were read. `known` are the raw labels that are
    allowed; None if all are, and those that `class_of` lacks are no class of the model.
    """

    image: str
    label: str
    matchings: tuple[Matching, ...]
    class_of: Mapping[Any, int]
    num_classes: int
    known: Collection[Any] | None = None
    notes: tuple[str, ...] = ()

    def num_names(self, features: Mapping[str, Any]) -> int | None:
        """Return how many named numbers a split's labels may be, None if they aren't numbers with names."""
        kind = features.get(self.label)
        return len(kind.names) if isinstance(kind, datasets.ClassLabel) else None


def _listed(features: Mapping[str, Any]) -> str:
    described = (f"{name} ({getattr(kind, 'dtype', None) or type(kind).__name__})" for name, kind in features.items())
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
        raise AcquisitionError(
            f"{option} is {column!r}, but the data set's columns are {_listed(features)}{did_you_mean(column, list(features))}"
        )
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
    """Return how a column's labels match the model's classes, and the class of each raw label that does.

    Raises:
        AcquisitionError: none matches, or it holds numbers or texts that are no classes.
    """
    kind = data.features(split)[column]
    known: Collection[Any] | None = None
    notes: tuple[str, ...] = ()
    if isinstance(kind, datasets.ClassLabel):
        names: list[str] = kind.names
        matchings = match_labels(names, id2label, by=data.query.label_match)
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
        matchings = match_numbers(numbers, id2label, by=data.query.label_match)
        class_of = matchings[0].class_of
        # The train split may hold those that this one lacks.
        known = class_of.keys()
        if data.has_cheap_labels:
            return Columns(image, column, matchings, class_of, len(numbers), known, notes)
    else:
        texts = sorted(_distinct_labels(data, split, column))
        matchings = match_labels(texts, id2label, ordered=False, by=data.query.label_match)
        class_of = {texts[place]: index for place, index in matchings[0].class_of.items()}
        if not data.has_cheap_labels:
            known = frozenset(texts)
            notes = (
                f"labels are names in a stream, of which the first {MAX_STREAMED_LABELS} rows of split {split!r} have {len(texts)}: "
                "the verdict is about no others that come later, so if rows are sorted by class, download the data set (hf "
                "download) and give its folder",
            )
    return Columns(image, column, matchings, class_of, len(set(class_of.values())), known, notes)


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
                found[column] = match_column(data, split, image, column, id2label)
            except AcquisitionError as error:
                refusal = refusal or error
        if found:
            best = max(found.values(), key=lambda columns: _score(columns.matchings[0].matches, len(id2label)))
            others = [repr(column) for column in tier if column != best.label]
            if not others:
                return best
            note = f"labels are read from column {best.label!r}, which maps best to the model's classes; not used: {', '.join(others)}"
            return replace(best, notes=(note, *best.notes))
    raise refusal or AcquisitionError(
        f"split {split!r} of {data.query.dataset!r} has no labels: name another with split"
    )
