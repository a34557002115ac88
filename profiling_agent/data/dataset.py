"""Labelled image data sets in a local folder or on the Hugging Face Hub: their splits, and their image and label columns."""

import re
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from pathlib import Path, PurePosixPath
from typing import Any

import datasets
import fsspec
from datasets import config as datasets_config
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.parquet.parquet import Parquet
from huggingface_hub import DatasetCard, HfApi, hf_hub_download
from huggingface_hub.errors import RevisionNotFoundError
from pydantic import Field

from profiling_agent.data.hub import MAX_TEXT, did_you_mean, hub_errors, is_local, library_errors, local_folder
from profiling_agent.data.labels import Matching, match_labels, match_numbers
from profiling_agent.data.reference import DIGITS, PREFIX, reference_dataset
from profiling_agent.errors import AcquisitionError
from profiling_agent.lib.io import files_root
from profiling_agent.lib.logs import Progress
from profiling_agent.schemas import MatchBy, Record

IMAGE_NAMES = ("image", "img", "picture", "photo", "jpg", "png")
LABEL_NAMES = ("label", "labels", "fine_label", "class", "class_label", "target", "category", "cls", "y")
STRINGS = ("string", "large_string", "string_view")
BINARY = ("binary", "large_binary", "binary_view")
TABLE_ADVICE = "a table that names images is read if it is called metadata.csv, its column of paths file_name, and it lies next to the images"
FOLDER_ADVICE = "folders are labels only if all images lie equally deep, as in test/cat/1.png; or " + TABLE_ADVICE
# The revision of the Hub's parquet copy of a data set: CONFIG/SPLIT/*.parquet.
PARQUET_COPY = "refs/convert/parquet"
CARD, ZIP = "README.md", "zip://"
# The words in names of folders and tables by which `datasets` recognises a split.
SPLIT_WORD = re.compile(
    r"(?:^|[-._ 0-9])(?:train|training|validation|valid|dev|val|test|testing|eval|evaluation)(?:$|[-._ 0-9])"
)
# Only names of these files may name a split: a photograph's name does not, and its folder is its class.
TABLE_EXTENSIONS = frozenset({".parquet", ".arrow", ".csv", ".tsv", ".json", ".jsonl", ".tar", ".zip"})
BATCH_ROWS = 2048
SHUFFLE_BUFFER = 1000
# Rows to read labels from when reading them downloads the images too; every class must occur in them.
MAX_STREAMED_LABELS = 2000


class DataQuery(Record):
    """A labelled image data set, the requested split and columns, and the number of images to draw."""

    dataset: str = Field(min_length=1, description="Hub id, local folder, or reference:digits")
    dataset_config: str | None = None
    dataset_revision: str | None = None
    split: str | None = Field(default=None, description="split to evaluate on")
    image_column: str | None = None
    label_column: str | None = None
    label_match: MatchBy = "auto"
    num_samples: int | None = Field(
        default=None, ge=1, description="images to search on; by default half, at most 2000"
    )
    num_recovery: int = Field(
        default=0, ge=0, description="most images of the train split to recover with; 0 draws none"
    )
    seed: int = Field(default=0, ge=0, lt=2**32)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedData:
    """A data set whose splits can be read; nothing has been copied or downloaded yet.

    `folder` is None for a Hub repository; `root` starts the absolute names of its files. `build` returns a builder, and is None
    for a data set written by `save_to_disk`.
    """

    query: DataQuery
    folder: Path | None
    root: str
    splits: Mapping[str, Any]
    build: Callable[..., Any] | None = None
    kind: type | None = None
    notes: tuple[str, ...] = ()

    @property
    def has_cheap_labels(self) -> bool:
        """Return whether labels can be read without downloading images."""
        return self.folder is not None or self.kind in (ImageFolder, Parquet)

    def features(self, split: str) -> Mapping[str, Any]:
        """Return the columns of a split and their types."""
        return self.splits[split].features or {}

    def tables(self, split: str, columns: list[str], num_rows: int = BATCH_ROWS) -> Iterator[Any]:
        """Yield a split's rows in file order as Arrow tables of `num_rows` rows; parquet reads no other column."""
        with read_errors(self.query.dataset):
            if self.build is not None and self.kind is Parquet:
                view: Any = self.build(columns=columns).as_streaming_dataset(split)
            else:
                view = self.splits[split].select_columns(columns)
            yield from view.with_format("arrow").iter(batch_size=num_rows)

    def labels(self, split: str, column: str, limit: int | None = None) -> Iterator[Any]:
        """Yield the raw labels of a split's rows in file order, at most `limit` of them."""
        cells = (cell for table in self.tables(split, [column]) for cell in table[column].to_pylist())
        return islice(cells, limit)

    def stream(self, split: str, columns: "Columns") -> Iterator[tuple[Any, Any]]:
        """Yield (image cell, raw label), shuffled by shards and in a buffer; images are not decoded."""
        view = self.splits[split].select_columns([columns.image, columns.label])
        if isinstance(self.features(split)[columns.image], datasets.Image):
            view = view.cast_column(columns.image, datasets.Image(decode=False))
        with read_errors(self.query.dataset):
            for row in view.shuffle(seed=self.query.seed, buffer_size=SHUFFLE_BUFFER):
                yield row[columns.image], row[columns.label]

    def image(self, cell: Any) -> bytes | None:
        """Return the encoded image that a cell holds or names, or None; AcquisitionError if its file can't be read."""
        data, location = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if data is not None or not location:
            return data if isinstance(data, bytes) else None
        archive, member = location, ""
        if location.startswith(ZIP):
            member, _, archive = location.rpartition("::")
        with read_errors(self.query.dataset):
            path = self.inside(archive)
            opened: Any = fsspec.open(f"{member}::{path}" if member else path, "rb")
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
        raise AcquisitionError(
            f"dataset {self.query.dataset!r} can't be read: it names {file[:MAX_TEXT]!r}, which is not in it: copy the data "
            "into it, or give the images' bytes in the table"
        )


@contextmanager
def read_errors(name: str) -> Generator[None]:
    """Raise a one-line AcquisitionError for errors of `datasets` on damaged or unreachable files."""
    with library_errors(f"dataset {name!r} can't be read: "), hub_errors("dataset", name, None):
        yield


def open_data(query: DataQuery, *, cache: Path, progress: Progress) -> OpenedData:
    """Open the data set that `query` names: reference:digits, a local folder, or a Hub id to be streamed.

    Raises:
        AcquisitionError: it does not exist, is gated, needs a script or the name of a config, or can't be read.
    """
    name = query.dataset
    if name == DIGITS:
        folder: Path | None = reference_dataset(progress)
    elif name.startswith(PREFIX):
        raise AcquisitionError(f"there is no reference data set {name!r}: use {DIGITS}")
    else:
        folder = local_folder(name, "dataset") if is_local(name) else None
    if folder is None:
        progress(f"looking up {name}", 0, 0)
        return _open_repository(query, cache)
    folder = folder.resolve()
    data = OpenedData(query=query, folder=folder, root=f"{folder.as_posix().rstrip('/')}/", splits={})
    with read_errors(name):
        if not any((folder / file).is_file() for file in ("dataset_dict.json", "state.json")):
            card = folder / CARD if (folder / CARD).is_file() else None
            return _choose_config(data, card, partial(datasets.load_dataset_builder, str(folder), cache_dir=str(cache)))
        loaded: Any = datasets.load_from_disk(str(folder))
        is_dict = isinstance(loaded, datasets.DatasetDict)
        splits: Any = dict(loaded) if is_dict else {str(loaded.split or "train"): loaded}
        for split in splits.values():
            for file in split.cache_files:
                data.inside(file["filename"])
        return replace(data, splits=splits)


def _open_repository(query: DataQuery, cache: Path) -> OpenedData:
    """Open a Hub repository at one commit, or the Hub's parquet copy of it if it needs a script."""
    name, revision, notes, api = query.dataset, query.dataset_revision, (), HfApi()
    if datasets_config.HF_HUB_OFFLINE:
        raise AcquisitionError(
            f"dataset {name!r} is no local folder, and HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set, "
            "so that the Hub can't be reached: give a local folder, or unset it"
        )
    with hub_errors("dataset", name, revision):
        info = api.dataset_info(name, revision=revision)
        api.auth_check(name, repo_type="dataset")
        script = f"{name.rpartition('/')[2]}.py"
        if revision in (None, "main") and script in {sibling.rfilename for sibling in info.siblings or []}:
            try:
                info = api.dataset_info(name, revision=PARQUET_COPY)
            except RevisionNotFoundError as error:
                raise AcquisitionError(
                    f"dataset {name!r} needs its Python script {script!r}, which is never run, and the Hub has no parquet copy of "
                    "it: give a local one"
                ) from error
            copy = f"{PARQUET_COPY} at {info.sha}"
            notes = (f"images are read from the Hub's parquet copy, {copy}: {script!r} is never run",)
    commit = info.sha or revision or "main"
    data = OpenedData(query=query, folder=None, root=f"hf://datasets/{name}@{commit}/", splits={}, notes=notes)
    with read_errors(name):
        card = None
        if CARD in {sibling.rfilename for sibling in info.siblings or []}:
            card = Path(hf_hub_download(name, CARD, repo_type="dataset", revision=commit))
        build = partial(datasets.load_dataset_builder, name, revision=commit, cache_dir=str(cache))
        return _choose_config(data, card, build)


def _choose_config(data: OpenedData, card: Path | None, build: Callable[..., Any]) -> OpenedData:
    """Return the data set opened with the requested config, which is one of the card's or a folder.

    Without a card, `datasets` reads every folder named as a split into that split: a data set in three sizes gives each image
    three times.
    """
    dataset, requested = data.query.dataset, data.query.dataset_config
    configs = DatasetCard.load(card, ignore_metadata_errors=True).data.get("configs") if card else None
    if configs:
        build = partial(build, name=requested)
        try:
            builder = build()
        except ValueError as error:
            names = [config["config_name"] for config in configs]
            if requested in names or (requested is None and len(names) == 1):
                raise
            raise _config_error(dataset, requested, names) from error
    else:
        builder = build()
        files = {
            split: [str(file).removeprefix(data.root) for file in files]
            for split, files in (builder.config.data_files or {}).items()
        }
        if (folder := choose_sibling_folder(dataset, requested, files)) is not None:
            build = partial(build, data_dir=folder)
            builder = build()
        elif requested not in (None, builder.config.name):
            raise _config_error(dataset, requested, [builder.config.name])
    if hasattr(builder.config, "decode_num_threads"):
        # Threads would decode every image of a Hub data set, not only the drawn ones.
        setattr(builder.config, "decode_num_threads", 0)  # noqa: B010 - only some kinds declare it
    split_of: dict[str, str] = {}
    for split, names in (builder.config.data_files or {}).items():
        for file in map(str, names):
            data.inside(file)
            if (other := split_of.setdefault(file, split)) != split and isinstance(builder, ImageFolder):
                raise AcquisitionError(
                    f"{file.removeprefix(data.root)!r} is in split {other!r} and in {split!r}, as folders on its way are called like "
                    "both: rename one of them"
                )
    kind = next((kind for kind in (ImageFolder, Parquet) if isinstance(builder, kind)), None)
    return replace(data, splits=builder.as_streaming_dataset(), build=build, kind=kind)


def _config_error(dataset: str, requested: str | None, names: list[str]) -> AcquisitionError:
    listed = ", ".join(names)
    if requested is None:
        return AcquisitionError(f"dataset {dataset!r} has several configs, {listed}: name one with dataset_config")
    return AcquisitionError(
        f"dataset {dataset!r} has no config {requested!r}: use one of {listed}{did_you_mean(requested, names)}"
    )


def choose_sibling_folder(dataset: str, requested: str | None, files: Mapping[str, Iterable[str]]) -> str | None:
    """Return which of several sibling folders to read, given the files of each split; None if there is only one.

    Raises:
        AcquisitionError: no folder was requested, or one that does not exist or has another inside.
    """

    def parent_of_split(file: str) -> str | None:
        path = PurePosixPath(file)
        names = path.parts if not TABLE_EXTENSIONS.isdisjoint(path.suffixes) else path.parts[:-1]
        return next(("/".join(names[:depth]) for depth, name in enumerate(names) if SPLIT_WORD.search(name)), None)

    parents = [set(map(parent_of_split, names)) - {None} for names in files.values()]
    folders = sorted({folder or "" for names in parents if len(names) > 1 for folder in names})
    if not folders:
        return None
    # A folder with another inside would be read with it; the top, "", has all others inside of it.
    inner = [
        each for each in folders if not any(other.startswith(each and f"{each}/") for other in folders if other != each)
    ]
    if requested not in inner:
        raise _config_error(dataset, requested, inner)
    return requested


@dataclass(frozen=True, slots=True)
class Columns:
    """The image column, the label column, and `class_of`: the model's class of each raw label.

    `class_of` follows the first of `matchings`; `num_classes` of the model's classes may occur.
    """

    image: str
    label: str
    matchings: tuple[Matching, ...]
    class_of: Mapping[Any, int]
    num_classes: int
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


def _is_label(kind: Any) -> bool:
    return isinstance(kind, datasets.ClassLabel) or _is_integer(kind) or _dtype(kind) in STRINGS


def _check_named(column: str, option: str, features: Mapping[str, Any], is_valid: Callable[[Any], bool]) -> str:
    """Return the column that the user named; AcquisitionError if it is missing or of another kind."""
    if column not in features:
        raise AcquisitionError(
            f"{option} is {column!r}, but the data set's columns are {_describe(features)}{did_you_mean(column, list(features))}"
        )
    if not is_valid(features[column]):
        raise AcquisitionError(
            f"{option} {column!r} holds no {option.partition('_')[0]}s: the columns are {_describe(features)}"
        )
    return column


def find_image_column(features: Mapping[str, Any], named: str | None) -> str:
    """Return the image column: the named one, else by type, else by usual name; AcquisitionError if there is none."""
    if named is not None:
        return _check_named(named, "image_column", features, _is_image)
    by_type = [name for name, kind in features.items() if isinstance(kind, datasets.Image)]
    matches = by_type or [name for name in IMAGE_NAMES if name in features and _is_image(features[name])]
    by_name = [name for name in IMAGE_NAMES if name in matches]
    if not matches or (len(matches) > 1 and not by_name):
        problem = "several image columns" if matches else "no image column"
        raise AcquisitionError(
            f"the data set has {problem}: its columns are {_describe(features)}; name image_column, or {TABLE_ADVICE}"
        )
    return (by_name or matches)[0]


def label_candidates(data: OpenedData, split: str) -> list[list[str]]:
    """Return tiers of columns that may hold labels: class labels, then strings with a usual name, then such integers.

    Raises:
        AcquisitionError: there are none, or the named one is missing or of another kind.
    """
    if not (features := data.features(split)):
        raise AcquisitionError(
            f"split {split!r} of {data.query.dataset!r} holds no images, as no CSV or JSON does: {TABLE_ADVICE}"
        )
    if (named := data.query.label_column) is not None:
        return [[_check_named(named, "label_column", features, _is_label)]]
    by_name = [name for name in LABEL_NAMES if name in features]
    tiers = [
        [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)],
        [name for name in by_name if _dtype(features[name]) in STRINGS],
        [name for name in by_name if _dtype(features[name]).startswith(("int", "uint"))],
    ]
    if not any(tiers):
        advice = f"; {FOLDER_ADVICE}" if data.kind is ImageFolder else ""
        raise AcquisitionError(
            f"the data set has no label column: its columns are {_describe(features)}; name label_column{advice}"
        )
    return [tier for tier in tiers if tier]


def is_label(cell: Any) -> bool:
    """Return whether a cell holds a label; -1 marks unlabelled test images."""
    return cell not in (None, -1, "")


def match_column(data: OpenedData, split: str, image: str, column: str, id2label: Mapping[int, str]) -> Columns:
    """Match the labels of a column to the model's classes; AcquisitionError if none matches."""
    kind, by, notes = data.features(split)[column], data.query.label_match, ()
    if isinstance(kind, datasets.ClassLabel):
        matchings = match_labels(list[str](kind.names), id2label, by=by)
        class_of: Mapping[Any, int] = matchings[0].class_of
        return Columns(image, column, matchings, class_of, len(set(class_of.values())))
    limit = None if data.has_cheap_labels else MAX_STREAMED_LABELS
    labels = set(filter(is_label, data.labels(split, column, limit)))
    if not labels:
        raise AcquisitionError(
            f"label column {column!r} of split {split!r} holds no label: name another with label_column"
        )
    if _is_integer(kind):
        matchings = match_numbers(labels, id2label, by=by)
        class_of = matchings[0].class_of
        return Columns(image, column, matchings, class_of, len(class_of) if limit else len(labels))
    texts = sorted(labels)
    matchings = match_labels(texts, id2label, ordered=False, by=by)
    class_of = {texts[place]: index for place, index in matchings[0].class_of.items()}
    if limit:
        notes = (
            f"labels are names in a stream, of which the first {limit} rows of split {split!r} have {len(texts)}: the verdict "
            "is about no others that come later; if rows are sorted by class, download the data set and give its folder",
        )
    return Columns(image, column, matchings, class_of, len(set(class_of.values())), notes)


def choose_columns(data: OpenedData, split: str, id2label: Mapping[int, str]) -> Columns:
    """Return the image column and the label column that maps best to the model's classes; AcquisitionError if none does."""

    def score(columns: Columns) -> tuple[float, int]:
        ids = [match.model_id for match in columns.matchings[0].matches]
        class_ids = [index for index in ids if index is not None]
        return len(class_ids) / len(ids), len(set(class_ids))

    image = find_image_column(data.features(split), data.query.image_column)
    refusals: list[AcquisitionError] = []
    for tier in label_candidates(data, split):
        matched: list[Columns] = []
        for column in tier:
            try:
                matched.append(match_column(data, split, image, column, id2label))
            except AcquisitionError as error:
                refusals.append(error)
        if matched:
            best = max(matched, key=score)
            if not (unused := [repr(column) for column in tier if column != best.label]):
                return best
            note = f"labels are read from column {best.label!r}, which maps best to the model's classes; not used: {', '.join(unused)}"
            return replace(best, notes=(note, *best.notes))
    raise refusals[0]
