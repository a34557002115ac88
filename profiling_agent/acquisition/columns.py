"""Columns of a data set: the one of images, the one of labels, and what its labels mean to the model."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import datasets

from profiling_agent.acquisition.data import OpenedData
from profiling_agent.acquisition.labels import match_labels
from profiling_agent.errors import AcquisitionError
from profiling_agent.records import LabelMatch

IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "png")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "class_label", "target", "category", "cls", "y")
# A stream without a label column of its own costs a download to read labels from: these must show every name.
MAX_STREAMED_LABELS = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Where images and labels are; `class_of` maps a raw label to the model's class, `matches` says why."""

    image: str
    label: str
    matches: tuple[LabelMatch, ...]
    class_of: Mapping[Any, int]
    note: str | None


def _listed(features: Mapping[str, Any]) -> str:
    described = (f"{name} ({getattr(kind, 'dtype', None) or type(kind).__name__})" for name, kind in features.items())
    return ", ".join(described) or "none"


def _is_image(kind: Any) -> bool:
    return isinstance(kind, datasets.Image) or (isinstance(kind, dict) and "bytes" in kind) or _dtype(kind) == "binary"


def _dtype(kind: Any) -> str:
    return str(kind.dtype) if isinstance(kind, datasets.Value) else ""


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
            raise AcquisitionError(f"image_column {named!r} holds no images: the columns are {_listed(features)}")
        return named
    typed = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    found = typed or [name for name, kind in features.items() if _is_image(kind) and name in IMAGE_NAMES]
    usual = [name for name in IMAGE_NAMES if name in found]
    if not found or (len(found) > 1 and not usual):
        several = "several image columns" if found else "no image column"
        raise AcquisitionError(f"the data set has {several}: its columns are {_listed(features)}; name image_column")
    return usual[0] if usual else found[0]


def label_candidates(features: Mapping[str, Any], named: str | None) -> list[list[str]]:
    """Return the columns that may hold labels, in tiers: class labels, then strings, then integers of a usual name.

    Raises:
        AcquisitionError: there are none.
    """
    if named is not None:
        return [[_require(named, features, "label_column")]]
    usual = [name for name in LABEL_NAMES if name in features]
    tiers = [
        [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)],
        [name for name in usual if _dtype(features[name]) in ("string", "large_string")],
        [name for name in usual if _dtype(features[name]).startswith(("int", "uint"))],
    ]
    if not any(tiers):
        raise AcquisitionError(
            f"the data set has no label column: its columns are {_listed(features)}; name label_column"
        )
    return [tier for tier in tiers if tier]


def is_label(cell: Any) -> bool:
    """Say whether a cell holds a label; -1 is how unlabelled test images are marked."""
    return cell not in (None, -1, "")


def _distinct(data: OpenedData, split: str, column: str) -> list[Any]:
    limit = None if data.is_local or data.is_parquet else MAX_STREAMED_LABELS
    return sorted(
        {cell for cell in data.labels(split, column, limit) if is_label(cell)}, key=lambda cell: (str(type(cell)), cell)
    )


def _match_column(
    data: OpenedData, split: str, column: str, id2label: Mapping[int, str]
) -> tuple[tuple[LabelMatch, ...], dict[Any, int]]:
    """Return how a column's labels match, and the class of each raw label that did."""
    kind = data.features(split)[column]
    if isinstance(kind, datasets.ClassLabel):
        raw: list[Any] = list(range(len(kind.names)))
        matches = match_labels(kind.names, id2label)
    else:
        raw = _distinct(data, split, column)
        if raw and all(isinstance(cell, int) for cell in raw) and raw[0] >= 0:
            raw = list(range(max(raw) + 1))
        matches = match_labels([str(cell) for cell in raw], id2label, ordered=False)
    pairs = zip(raw, matches, strict=True)
    return matches, {cell: match.model_id for cell, match in pairs if match.model_id is not None}


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
    for tier in label_candidates(features, data.query.label_column):
        found: dict[str, tuple[tuple[LabelMatch, ...], dict[Any, int]]] = {}
        for column in tier:
            try:
                found[column] = _match_column(data, split, column, id2label)
            except AcquisitionError as error:
                refusal = refusal or error
        if found:
            best = max(found, key=lambda column: _score(found[column][0], len(id2label)))
            others = [repr(column) for column in tier if column != best]
            note = None
            if others:
                note = f"labels are read from column {best!r}, which maps best to the model's classes; not used: {', '.join(others)}"
            return Columns(image=image, label=best, matches=found[best][0], class_of=found[best][1], note=note)
    raise refusal or AcquisitionError(
        f"split {split!r} of {data.query.dataset!r} has no labels: name another with split"
    )
