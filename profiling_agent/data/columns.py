"""Image and label columns of a data set, and how its labels map to the model's classes."""

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import datasets

from profiling_agent.data.dataset import OpenedData
from profiling_agent.data.hub import did_you_mean
from profiling_agent.data.labels import Matching, classes_named_by_number, match_labels, match_numbers
from profiling_agent.errors import AcquisitionError

IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "png")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "class_label", "target", "category", "cls", "y")
STRINGS = ("string", "large_string", "string_view")
BINARY = ("binary", "large_binary", "binary_view")
TABLE_ADVICE = "a table that names images is read if it is called metadata.csv, its column of paths file_name, and it lies next to the images"
# Usual names of a table's column of paths, in addition to IMAGE_NAMES.
PATH_NAMES = ("file_name", "filename", "file", "path", "filepath", "file_path", "image_path", "img_path")
# ImageNet-21k has 21,841 classes; a column with more values holds captions, names or dates.
MAX_LABELS = 25_000
# Rows to read labels from when reading them downloads the images too; every class must occur in them.
MAX_STREAMED_LABELS = 2000


@dataclass(frozen=True, slots=True)
class Columns:
    """The image column, the label column, and `class_of`: the model's class of each raw label.

    `class_of` follows the first of `matchings`; `num_classes` of the model's classes may occur. `known` holds the allowed
    raw labels, or is None if all are allowed.
    """

    image: str
    label: str
    matchings: tuple[Matching, ...]
    class_of: Mapping[Any, int]
    num_classes: int
    known: Collection[Any] | None = None
    notes: tuple[str, ...] = ()


def _describe(features: Mapping[str, Any]) -> str:
    columns = (f"{name} ({getattr(kind, 'dtype', None) or type(kind).__name__})" for name, kind in features.items())
    return ", ".join(columns) or "none"


def _dtype(kind: Any) -> str:
    return str(kind.dtype) if isinstance(kind, datasets.Value) else ""


def _is_image(kind: Any) -> bool:
    return isinstance(kind, datasets.Image) or (isinstance(kind, dict) and "bytes" in kind) or _dtype(kind) in BINARY


def _is_integer(kind: Any) -> bool:
    return _dtype(kind).startswith(("int", "uint", "bool"))


def _require(column: str, features: Mapping[str, Any], option: str) -> str:
    if column not in features:
        raise AcquisitionError(
            f"{option} is {column!r}, but the data set's columns are {_describe(features)}{did_you_mean(column, list(features))}"
        )
    return column


def find_image_column(features: Mapping[str, Any], named: str | None) -> str:
    """Return the image column: the named one, else by type, else by usual name; AcquisitionError if there is none."""
    if named is not None:
        if not _is_image(features[_require(named, features, "image_column")]):
            advice = f"; {TABLE_ADVICE}" if _dtype(features[named]) in STRINGS else ""
            raise AcquisitionError(
                f"image_column {named!r} holds no images: the columns are {_describe(features)}{advice}"
            )
        return named
    by_type = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    matches = by_type or [name for name, kind in features.items() if _is_image(kind) and name in IMAGE_NAMES]
    by_name = [name for name in IMAGE_NAMES if name in matches]
    if not matches or (len(matches) > 1 and not by_name):
        several = "several image columns" if matches else "no image column"
        has_paths = not matches and any(_dtype(features.get(name)) in STRINGS for name in (*IMAGE_NAMES, *PATH_NAMES))
        advice = TABLE_ADVICE if has_paths else "name image_column"
        raise AcquisitionError(f"the data set has {several}: its columns are {_describe(features)}; {advice}")
    return by_name[0] if by_name else matches[0]


def label_candidates(data: OpenedData, split: str) -> list[list[str]]:
    """Return tiers of columns that may hold labels: class labels, then strings with a usual name, then such integers.

    Raises:
        AcquisitionError: there are none, or the named one is missing or of another kind.
    """
    features = data.features(split)
    if not features:
        raise AcquisitionError(
            f"split {split!r} of {data.query.dataset!r} holds no images, as no CSV or JSON does: {TABLE_ADVICE}"
        )
    if (named := data.query.label_column) is not None:
        kind = features[_require(named, features, "label_column")]
        if not (isinstance(kind, datasets.ClassLabel) or _is_integer(kind) or _dtype(kind) in STRINGS):
            raise AcquisitionError(
                f"label_column {named!r} holds neither class labels nor names nor whole numbers: the columns are "
                f"{_describe(features)}"
            )
        return [[named]]
    by_name = [name for name in LABEL_NAMES if name in features]
    tiers = [
        [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)],
        [name for name in by_name if _dtype(features[name]) in STRINGS],
        [name for name in by_name if _dtype(features[name]).startswith(("int", "uint"))],
    ]
    if not any(tiers):
        advice = f", or label images by a table: {TABLE_ADVICE}" if data.is_image_folder else ""
        reason = data.stray_image(split) or f"its columns are {_describe(features)}; name label_column{advice}"
        raise AcquisitionError(f"the data set has no label column: {reason}")
    return [tier for tier in tiers if tier]


def is_label(cell: Any) -> bool:
    """Return whether a cell holds a label; -1 marks unlabelled test images."""
    return cell not in (None, -1, "")


def _distinct_labels(data: OpenedData, split: str, column: str) -> set[Any]:
    """Return the distinct labels of a split; of its first rows only, if reading more would download images."""
    labels = set[Any]()
    for cell in data.labels(split, column, None if data.has_cheap_labels else MAX_STREAMED_LABELS):
        if is_label(cell):
            labels.add(cell)
        if len(labels) > MAX_LABELS:
            raise AcquisitionError(
                f"label column {column!r} holds more than {MAX_LABELS} different values, which are no classes: "
                "name another with label_column"
            )
    return labels


def match_column(data: OpenedData, split: str, image: str, column: str, id2label: Mapping[int, str]) -> Columns:
    """Match the labels of a column to the model's classes; AcquisitionError if none matches."""
    kind, by = data.features(split)[column], data.query.label_match
    if isinstance(kind, datasets.ClassLabel):
        matchings = match_labels(list[str](kind.names), id2label, by=by)
        class_of: Mapping[Any, int] = matchings[0].class_of
        return Columns(image, column, matchings, class_of, len(set(class_of.values())))
    labels = _distinct_labels(data, split, column)
    if _is_integer(kind):
        if not labels:
            raise AcquisitionError(
                f"label column {column!r} of split {split!r} holds no label: name another with label_column"
            )
        if not (labels <= id2label.keys() or labels <= classes_named_by_number(id2label).keys()):
            raise AcquisitionError(
                f"label column {column!r} holds whole numbers as large as {max(labels)} and as small as {min(labels)}, but the "
                f"model has {len(id2label)} classes, 0 to {len(id2label) - 1}: name another with label_column, or choose a model "
                "that was trained on these classes"
            )
        matchings = match_numbers(labels, id2label, by=by)
        class_of = matchings[0].class_of
        num_classes = len(labels) if data.has_cheap_labels else len(class_of)
        # The train split may hold labels that this split lacks.
        return Columns(image, column, matchings, class_of, num_classes, class_of.keys())
    texts = sorted(labels)
    matchings = match_labels(texts, id2label, ordered=False, by=by)
    class_of = {texts[place]: index for place, index in matchings[0].class_of.items()}
    num_classes = len(set(class_of.values()))
    if data.has_cheap_labels:
        return Columns(image, column, matchings, class_of, num_classes)
    note = (
        f"labels are names in a stream, of which the first {MAX_STREAMED_LABELS} rows of split {split!r} have {len(texts)}: "
        "the verdict is about no others that come later, so if rows are sorted by class, download the data set (hf "
        "download) and give its folder"
    )
    return Columns(image, column, matchings, class_of, num_classes, frozenset(texts), (note,))


def choose_columns(data: OpenedData, split: str, id2label: Mapping[int, str]) -> Columns:
    """Return the image column and the label column that maps best to the model's classes; AcquisitionError if none does."""

    def score(columns: Columns) -> tuple[float, int]:
        ids = [match.model_id for match in columns.matchings[0].matches]
        class_ids = [index for index in ids if index is not None]
        return len(class_ids) / len(ids), len(set(class_ids))

    image = find_image_column(data.features(split), data.query.image_column)
    refusal: AcquisitionError | None = None
    for tier in label_candidates(data, split):
        matched: dict[str, Columns] = {}
        for column in tier:
            try:
                matched[column] = match_column(data, split, image, column, id2label)
            except AcquisitionError as error:
                refusal = refusal or error
        if matched:
            best = max(matched.values(), key=score)
            if not (unused := [repr(column) for column in tier if column != best.label]):
                return best
            note = f"labels are read from column {best.label!r}, which maps best to the model's classes; not used: {', '.join(unused)}"
            return replace(best, notes=(note, *best.notes))
    assert refusal is not None, "there is a tier, and none of its columns matched"
    raise refusal
