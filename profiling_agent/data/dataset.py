"""Labelled image data sets in a local folder or on the Hugging Face Hub: their splits, and their image and label columns."""

import os
import re
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Mapping
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import chain, islice
from pathlib import Path, PurePosixPath
from typing import Any

import datasets
import fsspec
import numpy as np
from datasets.data_files import NON_WORDS_CHARS, SPLIT_KEYWORDS, DataFilesDict, EmptyDatasetError
from datasets.exceptions import DataFilesNotFoundError
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.parquet.parquet import Parquet
from huggingface_hub import HfApi
from pydantic import Field

from profiling_agent.data import is_local
from profiling_agent.data.labels import UNMAPPED, Matching, label_set_id, match_labels, match_numbers
from profiling_agent.data.models import hub_errors, local_folder
from profiling_agent.data.reference import DIGITS, PREFIX, reference_dataset
from profiling_agent.errors import AcquisitionError
from profiling_agent.lib.io import files_root
from profiling_agent.lib.logs import Progress, third_party_errors
from profiling_agent.schemas import MULTI_LABEL, MatchBy, Record

IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "png")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "class_label", "target", "category", "cls", "y")
STRINGS = ("string", "large_string", "string_view")
LISTS = (datasets.List, datasets.LargeList)
FLAGS = ("list of number", "list of float")
BINARY = ("binary", "large_binary", "binary_view")
TABLE_ADVICE = (
    "a table that names images has to be called metadata.csv, its column of paths file_name, and lie next to the images"
)
LAYOUT = (
    "lay images out as SPLIT/CLASS/IMAGE, such as test/cat/1.png, unpacked, in splits called train, validation or test"
)
# The folders that a message on a layout looks into, and those that it names.
MAX_FOLDERS, MAX_NAMED = 1000, 4
# The revision of the Hub's parquet copy of a data set: CONFIG/SPLIT/*.parquet.
PARQUET_COPY = "refs/convert/parquet"
BATCH_ROWS = 2048
SHUFFLE_BUFFER = 1000
EVALUATION = ("test", "validation", "valid", "val", "dev")
# Enough rows to skip stray unlabelled images; a test split of a competition has no label at all.
NUM_LABELS_CHECKED = 100
# Rows to read labels from when reading them downloads the images too; every class must occur in them.
MAX_STREAMED_LABELS = 2000


class DataQuery(Record):
    """A labelled image data set (Hub id, local folder, or reference:digits), the requested split and columns, and sizes.

    `num_samples` images are searched on, by default half of the split and at most 2000; `num_recovery` are the most images of the
    train split to recover with. A `multi_label` model has any number of labels an image.
    """

    dataset: str = Field(min_length=1)
    dataset_config: str | None = None
    dataset_revision: str | None = None
    split: str | None = None
    image_column: str | None = None
    label_column: str | None = None
    label_match: MatchBy = "auto"
    multi_label: bool = False
    num_samples: int | None = Field(default=None, ge=1)
    num_recovery: int = Field(default=0, ge=0)
    seed: int = Field(default=0, ge=0, lt=2**32)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedData:
    """A data set whose splits can be read, each with its own columns; nothing has been copied or downloaded yet.

    `folder` is None for a Hub repository; `root` starts the absolute names of its files. `builder` is None for a data set
    written by `save_to_disk`. `kind` is set if labels can be read without downloading images.
    """

    query: DataQuery
    folder: Path | None
    root: str
    splits: Mapping[str, Any] = field(default_factory=dict[str, Any])
    builder: Any = None
    kind: type | None = None

    def features(self, split: str) -> Mapping[str, Any]:
        """Return the columns of a split and their types."""
        return self.splits[split].features or {}

    def class_names(self, split: str, column: str) -> list[str]:
        """Return the names of a split's classes, in order; of images in folders, those of the folders below the split's."""
        feature = self.features(split)[column]
        names = list[str]((feature.feature if isinstance(feature, LISTS) else feature).names)
        if self.kind is not ImageFolder:
            return names
        files = [PurePosixPath(file.removeprefix(self.root)) for file in self.builder.config.data_files[split]]
        if any(file.name in ImageFolder.METADATA_FILENAMES for file in files):
            return names
        words = "|".join(map(re.escape, chain([split], *SPLIT_KEYWORDS.values())))
        is_split = re.compile(f"(.*[{NON_WORDS_CHARS}])?({words})([{NON_WORDS_CHARS}].*)?").fullmatch
        # `datasets` reads no folders inside of archives.
        folders = {file.parent.parts for file in files if file.suffix.lower() != ".zip"} - {()}
        classes = {parts[-1] for parts in folders if any(map(is_split, parts[:-1])) or not is_split(parts[-1])}
        if not classes:
            problem = f"split {split!r} of {self.query.dataset!r} has no folders of classes"
            raise AcquisitionError(f"{problem}{self.layout()}; {TABLE_ADVICE}")
        return [name for name in names if name in classes]

    def every_class(self, column: str) -> list[str]:
        """Return the names of all splits' classes, in their order; empty if no split has all and they lie in no folders."""
        lists: list[list[str]] = []
        for split in self.splits:
            # A split may lack the column, have other labels in it, or have no classes.
            with suppress(KeyError, AttributeError, AcquisitionError):
                lists.append(self.class_names(split, column))
        names = set[str]().union(*lists)
        sorted_names = sorted(names) if self.kind is ImageFolder else []
        return next((each for each in lists if len(each) == len(names)), sorted_names)

    def layout(self) -> str:
        """Return how images have to be laid out, after the files that a local data set has; empty for a Hub repository."""
        if self.folder is None:
            return ""
        found: list[str] = []
        for parent, folders, files in islice(os.walk(self.folder), MAX_FOLDERS):
            folders[:] = sorted(name for name in folders if not name.startswith((".", "__")))
            kinds = Counter(Path(name).suffix or "other" for name in files if not name.startswith("."))
            place = f"in {Path(parent).relative_to(self.folder)}" if Path(parent) != self.folder else "at the top"
            found += [f"{count} {kind} {place}" for kind, count in kinds.most_common(2)]
        rest = f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else ""
        return f" (found {', '.join(found[:MAX_NAMED]) or 'no files'}{rest}): {LAYOUT}"

    def view(self, split: str, **options: Any) -> Any:
        """Return a stream of a split with its own columns and names of classes: `datasets` reads all splits as the first."""
        builder, files = deepcopy(self.builder), self.builder.config.data_files[split]
        table = next((file for file in files if PurePosixPath(file).name in ImageFolder.METADATA_FILENAMES), files[0])
        problem, place = f"split {split!r} of {self.query.dataset!r} can't be read", table.removeprefix(self.root)
        with third_party_errors(lambda text: AcquisitionError(f"{problem}, {text}: look at {place}")):
            builder.config = replace(builder.config, data_files=DataFilesDict({split: files}), **options)
            return builder.as_streaming_dataset(split)

    def cells(self, split: str, column: str, batch_rows: int = BATCH_ROWS) -> Iterator[Any]:
        """Yield a column's cells in file order, as Arrow scalars; parquet reads no other column."""
        with read_errors(self.query.dataset):
            rows = self.view(split, columns=[column]) if self.kind is Parquet else self.splits[split]
            view = rows.select_columns([column])
            for table in view.with_format("arrow").iter(batch_size=batch_rows):
                yield from table[column]

    def labels(self, split: str, column: str, limit: int | None = None) -> Iterator[Any]:
        """Yield the raw labels of a split's rows in file order, at most `limit` of them."""
        if self.kind is not ImageFolder:
            yield from (cell.as_py() for cell in islice(self.cells(split, column), limit))
            return
        # Of rows without a label `datasets` makes Arrow tables of another type.
        with read_errors(self.query.dataset):
            yield from (row[column] for row in islice(self.splits[split].select_columns([column]), limit))

    def stream(self, split: str, image: str, label: str | None) -> Iterator[tuple[Any, Any]]:
        """Yield (image cell, raw label or None), shuffled by shards and in a buffer; images are not decoded."""
        view = self.splits[split].select_columns([name for name in (image, label) if name])
        if isinstance(self.features(split)[image], datasets.Image):
            view = view.cast_column(image, datasets.Image(decode=False))
        with read_errors(self.query.dataset):
            for row in view.shuffle(seed=self.query.seed, buffer_size=SHUFFLE_BUFFER):
                yield row[image], row.get(label)

    def image(self, cell: Any) -> bytes:
        """Return the encoded image that a cell holds or names, or b""; AcquisitionError if its file can't be read."""
        data, location = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if data is not None or not location:
            return data if isinstance(data, bytes) else b""
        # A member of an archive: zip://MEMBER::ARCHIVE.
        member, separator, archive = location.rpartition("::") if location.startswith("zip://") else ("", "", location)
        with read_errors(self.query.dataset):
            opened: Any = fsspec.open(f"{member}{separator}{self.inside(archive)}", "rb")
            with opened as stream:
                return stream.read()

    def inside(self, file: str) -> str:
        """Return the absolute name of a file of the data set; AcquisitionError if the file is outside of it."""
        path = file.removeprefix(self.root)
        if "://" not in path and "::" not in path:
            if self.folder is None:
                if ".." not in PurePosixPath(path).parts:
                    return self.root + path
            elif (target := (self.folder / path).resolve()).is_relative_to(files_root(self.folder)):
                return str(target)
        named = f"{file!r}, which is not in it: copy it there"
        raise AcquisitionError(f"dataset {self.query.dataset!r} can't be read: it names {named}")


@contextmanager
def read_errors(name: str) -> Generator[None]:
    """Raise a one-line AcquisitionError for errors of `datasets` on damaged or unreachable files."""
    refused = third_party_errors(lambda problem: AcquisitionError(f"dataset {name!r} can't be read: {problem}"))
    with refused, hub_errors("dataset", name, None):
        yield


def open_data(query: DataQuery, *, cache: Path, progress: Progress) -> OpenedData:
    """Open the data set that `query` names: reference:digits, a local folder, or a Hub id to be streamed.

    Raises:
        AcquisitionError: it does not exist, is gated, needs a script or the name of a config, or can't be read.
    """
    name = query.dataset
    if name == DIGITS:
        folder = reference_dataset(progress)
    elif name.startswith(PREFIX):
        raise AcquisitionError(f"there is no reference data set {name!r}: use {DIGITS}")
    elif is_local(name):
        folder = local_folder(name, "dataset").resolve()
    else:
        progress(f"looking up {name}", 0, 0)
        return _open_repository(query, cache)
    data = OpenedData(query=query, folder=folder, root=f"{folder.as_posix().rstrip('/')}/")
    with read_errors(name):
        if not any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            return _choose_config(data, partial(datasets.load_dataset_builder, str(folder), cache_dir=str(cache)))
        advice = "save it again with save_to_disk, with rows in every split"
        with third_party_errors(lambda text: AcquisitionError(f"dataset {name!r} can't be loaded, {text}: {advice}")):
            loaded: Any = datasets.load_from_disk(str(folder))
        splits: Any = loaded if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}
        for split in splits.values():
            for file in split.cache_files:
                data.inside(file["filename"])
        # `datasets` can't read a table without rows.
        return replace(data, splits={key: split.to_iterable_dataset() for key, split in splits.items() if len(split)})


def _open_repository(query: DataQuery, cache: Path) -> OpenedData:
    """Open a Hub repository at one commit, or the Hub's parquet copy of it if it needs a script."""
    name, revision, api = query.dataset, query.dataset_revision, HfApi()
    with hub_errors("dataset", name, revision):
        info = api.dataset_info(name, revision=revision)
    script = f"{name.rpartition('/')[2]}.py"
    if revision in (None, "main") and any(file.rfilename == script for file in info.siblings or []):
        with hub_errors("dataset", name, f"{PARQUET_COPY} (its {script} is never run)"):
            info = api.dataset_info(name, revision=PARQUET_COPY)
    commit = info.sha or revision or "main"
    data = OpenedData(query=query, folder=None, root=f"hf://datasets/{name}@{commit}/")
    with read_errors(name):
        return _choose_config(data, partial(datasets.load_dataset_builder, name, revision=commit, cache_dir=str(cache)))


def _choose_config(data: OpenedData, build: Callable[..., Any]) -> OpenedData:
    """Return the data set opened with the requested config, which is one of its card's or a folder."""
    requested = data.query.dataset_config
    try:
        builder = build(name=requested)
    except (EmptyDatasetError, DataFilesNotFoundError) as error:
        raise AcquisitionError(f"dataset {data.query.dataset!r} can't be read, {error}{data.layout()}") from error
    except ValueError as error:
        if requested is None:
            raise
        try:
            builder = build(data_dir=requested)
        except FileNotFoundError:
            raise error from None
    data_files: Mapping[str, Any] = builder.config.data_files or {}
    num_splits = Counter[str]()
    for names in data_files.values():
        files = list(map(str, names))
        for file in files:
            data.inside(file)
        num_splits.update({file.removeprefix(data.root).partition("/")[0] for file in files})
    # `datasets` would read several data sets as one: each image of one in three sizes would be there three times.
    shared = sorted(top for top, count in num_splits.items() if count > 1)
    if requested is None and len(shared) > 1:
        problem = f"holds several data sets, {', '.join(shared)}: name one with dataset_config, or if these are classes, {LAYOUT}"
        raise AcquisitionError(f"dataset {data.query.dataset!r} {problem}")
    # Threads would decode every image of a Hub data set, not only the drawn ones.
    builder.config.decode_num_threads = 0
    kind = next((kind for kind in (ImageFolder, Parquet) if isinstance(builder, kind)), None)
    data = replace(data, builder=builder, kind=kind)
    # Otherwise `datasets` gives no labels to a split with images of one class.
    options: dict[str, Any] = {"drop_labels": False} if kind is ImageFolder else {}
    return replace(data, splits={str(split): data.view(str(split), **options) for split in data_files})


@dataclass(frozen=True, slots=True)
class Columns:
    """The image column, the label column, and `class_of`: the model's class of each raw label by the first of `matchings`.

    `class_of` is empty for a train split without labels that are classes, whose images are used without.
    With `multi_label` a cell has one label, a list of them or, with `num_flags`, so many numbers, each 0 or 1 for a class.
    """

    split: str
    image: str
    label: str
    matchings: tuple[Matching, ...]
    class_of: Mapping[Any, int]
    notes: tuple[str, ...] = ()
    multi_label: bool = False
    num_flags: int = 0

    def class_id(self, cell: Any) -> int:
        """Return the model's class of a cell, or the id of its set of classes; UNMAPPED if a label is none of them."""
        if not self.multi_label:
            return self.class_of.get(cell, UNMAPPED)
        labels = _labels_in(cell)
        if self.num_flags:
            labels = np.flatnonzero(labels).tolist() if _are_flags(cell, self.num_flags) else [None]
        classes = [self.class_of.get(label, UNMAPPED) for label in labels]
        return UNMAPPED if UNMAPPED in classes else label_set_id(classes)


def choose_columns(data: OpenedData, id2label: Mapping[int, str]) -> Columns:
    """Return the columns of the split to evaluate on: the requested one, or the first usual one whose labels are classes.

    Raises:
        AcquisitionError: there is no such split.
    """
    name, requested, available = data.query.dataset, data.query.split, ", ".join(data.splits)
    if requested is not None and requested not in data.splits:
        raise AcquisitionError(f"dataset {name!r} has no split {requested!r}: use one of {available}")
    refusals: list[AcquisitionError] = []
    for split in EVALUATION if requested is None else [requested]:
        try:
            if split in data.splits:
                return _columns_of(data, split, id2label)
        except AcquisitionError as error:
            # A test split may come without labels, or without the column that the others have.
            refusals.append(error)
    if refusals:
        raise refusals[0]
    advice = f"name one of {available} with split, of images that the model wasn't trained on"
    if data.kind is ImageFolder:
        advice += f", or change its folders{data.layout()}"
    raise AcquisitionError(f"dataset {name!r} has no test or validation split: {advice}")


def train_columns(data: OpenedData, train: str, measured: Columns, id2label: Mapping[int, str]) -> Columns:
    """Return the columns of the train split, with its own names of classes; no label is needed to calibrate."""
    feature = data.features(train).get(measured.label)
    if feature == data.features(measured.split)[measured.label]:
        return replace(measured, split=train)
    if feature is not None:
        # If there are several matchings, the model's predictions choose one for all splits.
        with suppress(AcquisitionError):
            return match_column(data, train, measured.image, measured.label, id2label, measured.matchings[0].by)
    return replace(measured, split=train, class_of={})


def _labels_in(cell: Any) -> list[Any]:
    return cell if isinstance(cell, list) else [cell]


def _are_flags(cell: Any, num_classes: int) -> bool:
    return isinstance(cell, list) and len(cell) == num_classes and set(cell) <= {0, 1}


def _kind_of(feature: Any) -> str:
    """Return what a column holds: image, class, text, number, float, a list of one of these, or another type."""
    if isinstance(feature, LISTS):
        return f"list of {_kind_of(feature.feature)}"
    dtype = str(feature.dtype) if isinstance(feature, datasets.Value) else ""
    if isinstance(feature, datasets.Image) or (isinstance(feature, dict) and "bytes" in feature) or dtype in BINARY:
        return "image"
    if isinstance(feature, datasets.ClassLabel):
        return "class"
    if dtype in STRINGS:
        return "text"
    if dtype.startswith(("int", "uint", "bool")):
        return "number"
    return "float" if dtype.startswith("float") else dtype or "other"


def _columns_of(data: OpenedData, split: str, id2label: Mapping[int, str]) -> Columns:
    """Return the image column and the label column that maps best to the model's classes; AcquisitionError if none does."""
    kinds = {name: _kind_of(feature) for name, feature in data.features(split).items()}
    if not kinds:
        raise AcquisitionError(f"split {split!r} of {data.query.dataset!r} holds no images: {TABLE_ADVICE}")
    described = f"its columns are {', '.join(f'{name} ({kind})' for name, kind in kinds.items())}"
    classes, others = ["class"], ["text", "number"]
    if data.query.multi_label:
        classes, others = ["list of class", "class"], ["list of text", *FLAGS, "text", "number"]
    for option, allowed in (("image_column", ["image"]), ("label_column", [*classes, *others])):
        column = getattr(data.query, option)
        if column is not None and kinds.get(column) not in allowed:
            raise AcquisitionError(f"{option} {column!r} is no {' or '.join(allowed)}: {described}")
    # Other columns of bytes may hold anything, next to one of images.
    images = [name for name, feature in data.features(split).items() if isinstance(feature, datasets.Image)]
    images = images or [name for name, kind in kinds.items() if kind == "image"]
    usual = next((name for name in IMAGE_NAMES if name in images), None)
    image = data.query.image_column or usual or (images[0] if len(images) == 1 else None)
    if image is None:
        raise AcquisitionError(f"no image column: {described}; name image_column, or {TABLE_ADVICE}")
    labels = [data.query.label_column] if data.query.label_column else []
    labels = labels or [name for kind in classes for name in kinds if kinds[name] == kind]
    labels = labels or [name for name in LABEL_NAMES if kinds.get(name) in others]
    if not labels:
        advice = "name label_column"
        if "(list of" in described and not data.query.multi_label:
            several = f"if it answers with several, set problem_type to {MULTI_LABEL!r} in its config.json"
            advice = f"name a label_column of one label an image, as the model answers with one; {several}"
        raise AcquisitionError(f"no label column of classes, texts or whole numbers: {described}; {advice}")
    refusals: list[AcquisitionError] = []
    matched: list[Columns] = []
    for column in labels:
        try:
            matched.append(match_column(data, split, image, column, id2label, data.query.label_match))
        except AcquisitionError as error:
            refusals.append(error)
    if not matched:
        raise refusals[0]
    best = max(matched, key=_matched_share)
    unused = ", ".join(repr(column) for column in labels if column != best.label)
    note = f"labels are read from column {best.label!r}, which maps best to the model's classes; not used: {unused}"
    return replace(best, notes=(note, *best.notes)) if unused else best


def _matched_share(columns: Columns) -> tuple[float, int]:
    is_matched = [match.model_id is not None for match in columns.matchings[0].matches]
    return sum(is_matched) / len(is_matched), sum(is_matched)


def match_column(
    data: OpenedData, split: str, image: str, column: str, id2label: Mapping[int, str], by: MatchBy
) -> Columns:
    """Match the labels of a column to the model's classes; AcquisitionError if none matches.

    For a multi-label model a cell has one label, a list of them, or 0 or 1 for each class.
    """
    if not data.query.multi_label:
        return _match_labels(data, split, image, column, id2label, by)
    kind, num_classes = _kind_of(data.features(split)[column]), len(id2label)
    first = list(data.labels(split, column, NUM_LABELS_CHECKED)) if kind in FLAGS else []
    # Of two classes [0, 1] may be both; longer rows of classes have none twice.
    if (any if num_classes > 2 else all)([_are_flags(cell, num_classes) for cell in first] or [False]):
        matchings = match_numbers(range(num_classes), id2label, by="number")
        columns = Columns(split, image, column, matchings, matchings[0].class_of, num_flags=num_classes)
    elif kind == FLAGS[-1]:
        problem = f"column {column!r} has lists of numbers, but not {num_classes} of 0 or 1 each, one for a class of the model"
        raise AcquisitionError(f"{problem}: give such, or lists of the image's labels")
    else:
        columns = _match_labels(data, split, image, column, id2label, by)
    if columns.matchings[1:]:
        kinds = " or ".join(way.by for way in columns.matchings)
        raise AcquisitionError(f"labels of column {column!r} fit in several ways: set label_match to {kinds}")
    note = f"problem_type is {MULTI_LABEL!r}: an image is right if exactly its labels have a sigmoid of at least 0.5"
    return replace(columns, multi_label=True, notes=(note, *columns.notes))


def _match_labels(
    data: OpenedData, split: str, image: str, column: str, id2label: Mapping[int, str], by: MatchBy
) -> Columns:
    """Match the labels of a column to the model's classes; AcquisitionError if none matches."""
    feature, notes = data.features(split)[column], ()
    feature = feature.feature if isinstance(feature, LISTS) else feature
    kind = _kind_of(feature)
    names = data.class_names(split, column) if kind == "class" else []
    limit = None if data.folder or data.kind else MAX_STREAMED_LABELS
    # -1 marks unlabelled test images.
    cells = data.labels(split, column, NUM_LABELS_CHECKED if kind == "class" else limit)
    labels: list[Any] = sorted({label for cell in cells for label in _labels_in(cell) if label not in (None, -1, "")})
    if not labels:
        raise AcquisitionError(f"column {column!r} of split {split!r} has no labels: name another column or split")
    if kind == "number":
        matchings = match_numbers(labels, id2label, by=by)
        return Columns(split, image, column, matchings, matchings[0].class_of)
    raw_of: Mapping[str, Any] = {name: name for name in labels}
    if kind == "class":
        raw_of, labels = {name: feature.names.index(name) for name in names}, names
    try:
        matchings = match_labels(labels, id2label, ordered=kind == "class", by=by)
    except AcquisitionError as error:
        # Classes of a model without names are matched by their order in all splits, of which one may lack some.
        labels = data.every_class(column)
        if len(labels) <= len(raw_of):
            advice = data.layout() if data.kind is ImageFolder and len(names) == 1 else ""
            raise AcquisitionError(f"{error}{advice}") from error
        matchings = match_labels(labels, id2label, by=by)
    named = {labels[place]: index for place, index in matchings[0].class_of.items()}
    class_of = {raw: named[name] for name, raw in raw_of.items() if name in named}
    if kind == "text" and limit:
        notes = (
            f"the first {limit} rows of split {split!r}, a stream, have {len(labels)} labels: the verdict is about no others; "
            "if rows are sorted by class, download the data set and give its folder",
        )
    return Columns(split, image, column, matchings, class_of, notes)
