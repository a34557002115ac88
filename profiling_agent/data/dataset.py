"""Data sets: labelled images in a local folder, or streamed from the Hugging Face Hub."""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
from profiling_agent.data.reference import DIGITS, PREFIX, reference_dataset
from profiling_agent.errors import AcquisitionError
from profiling_agent.lib.io import files_root
from profiling_agent.lib.logs import Progress
from profiling_agent.schemas import MatchBy, Record

# The revision of the Hub's parquet copy of a data set: CONFIG/SPLIT/*.parquet; a large split is partial-SPLIT.
PARQUET_COPY, PARTIAL = "refs/convert/parquet", "partial-"
CARD, ZIP, ARCHIVE_EXTENSIONS = "README.md", "zip://", (".zip", ".tar")
# Not allowed in a path: `datasets` reads them as a pattern.
PATTERN_CHARACTERS = frozenset("*?[]")
# The words in names of folders and tables by which `datasets` recognises a split, each with its split.
SPLIT_BY_WORD = {
    word: words[0]
    for words in (
        ("train", "training"),
        ("validation", "valid", "dev", "val"),
        ("test", "testing", "eval", "evaluation"),
    )
    for word in words
}
SPLIT_WORD = re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(SPLIT_BY_WORD)})(?:$|[-._ 0-9])")
# Only names of these files may name a split: a photograph's name does not, and its folder is its class.
TABLE_EXTENSIONS = frozenset({".parquet", ".arrow", ".csv", ".tsv", ".json", ".jsonl", ".tar", ".zip"})
BATCH_ROWS = 2048
# Smaller than BATCH_ROWS: a table of photographs has hundreds of megabytes in fewer rows.
BATCH_IMAGES = 64
SHUFFLE_BUFFER = 1000


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
class DataSource:
    """A local folder, or a Hub repository at one commit; `root` starts the absolute names of its files."""

    name: str
    folder: Path | None
    commit: str | None
    root: str
    top_folders: frozenset[str]
    has_card: bool
    notes: tuple[str, ...] = ()

    @property
    def path(self) -> str:
        """Return the name by which `datasets` opens it."""
        return self.name if self.folder is None else str(self.folder)

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
            f"dataset {self.name!r} can't be read: it names {file[:MAX_TEXT]!r}, which is not in it: copy the data into it, or give "
            "the images' bytes in the table"
        )

    def builder(self, cache: Path, config: str | None = None, **options: Any) -> Any:
        """Return the builder that reads the files; nothing is downloaded or copied yet."""
        builder = datasets.load_dataset_builder(
            self.path, config, revision=self.commit, cache_dir=str(cache), **options
        )
        if hasattr(builder.config, "decode_num_threads"):
            # Threads would decode every image of a Hub data set, not only the drawn ones.
            setattr(builder.config, "decode_num_threads", 0)  # noqa: B010 - only some kinds declare it
        for files in (builder.config.data_files or {}).values():
            for file in files:
                self.inside(str(file))
        return builder


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedData:
    """A data set whose splits can be read; nothing has been copied or downloaded yet.

    `options` are the arguments of its builder; `builder` is None for a data set written by `save_to_disk`.
    """

    query: DataQuery
    place: DataSource
    cache: Path
    splits: Mapping[str, Any]
    builder: Any = None
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Return whether reading rows needs no download."""
        return self.place.folder is not None

    @property
    def is_image_folder(self) -> bool:
        """Return whether the images are files, labelled by their folders."""
        return isinstance(self.builder, ImageFolder)

    @property
    def has_cheap_labels(self) -> bool:
        """Return whether labels can be read without downloading images."""
        return self.is_local or self.is_image_folder or isinstance(self.builder, Parquet)

    def features(self, split: str) -> Mapping[str, Any]:
        """Return the columns of a split and their types."""
        return self.splits[split].features or {}

    def misnamed_splits(self) -> str:
        """Return advice on top folders that would be splits if they were lower case, or an empty string."""
        folders = self.place.top_folders.difference(SPLIT_BY_WORD, self.splits)
        misnamed = sorted(folder for folder in folders if folder.lower() in SPLIT_BY_WORD)
        advice = (f"its folder {folder!r} isn't read as a split: call it {folder.lower()!r}" for folder in misnamed)
        return "; ".join(advice)

    def stray_image(self, split: str) -> str | None:
        """Return which image keeps folders from being labels, and advice; None if that is not the problem."""
        if not self.is_image_folder or self.builder.config.drop_labels or len(self.features(split)) > 1:
            return None
        files = itertools.chain.from_iterable(_files_by_split(self.place, self.builder).values())
        return depth_advice([file for file in files if file.lower().endswith(tuple(self.builder.EXTENSIONS))])

    def tables(self, split: str, columns: list[str], num_rows: int = BATCH_ROWS) -> Iterator[Any]:
        """Yield a split's rows in file order as Arrow tables of `num_rows` rows; parquet reads no other column."""
        with read_errors(self.query.dataset):
            if isinstance(self.builder, Parquet):
                view: Any = self.place.builder(self.cache, **self.options, columns=columns).as_streaming_dataset(split)
            else:
                view = self.splits[split].select_columns(columns)
            yield from view.with_format("arrow").iter(batch_size=num_rows)

    def labels(self, split: str, column: str, limit: int | None = None) -> Iterator[Any]:
        """Yield the raw labels of a split's rows in file order, at most `limit` of them."""
        cells = (cell for table in self.tables(split, [column]) for cell in table[column].to_pylist())
        return itertools.islice(cells, limit)

    def stream(self, split: str, image_column: str, label_column: str, seed: int) -> Iterator[tuple[Any, Any]]:
        """Yield (image cell, raw label), shuffled by shards and in a buffer; images are not decoded."""
        view = self.splits[split].select_columns([image_column, label_column])
        if isinstance(self.features(split)[image_column], datasets.Image):
            view = view.cast_column(image_column, datasets.Image(decode=False))
        with read_errors(self.query.dataset):
            for row in view.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER):
                yield row[image_column], row[label_column]

    def image(self, cell: Any) -> bytes | None:
        """Return the encoded image that a cell holds or names, or None; AcquisitionError if its file can't be read."""
        data, location = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if data is not None or not location:
            return data if isinstance(data, bytes) else None
        member, file = _parse_location(location)
        with read_errors(self.query.dataset):
            path = self.place.inside(file)
            opened: Any = fsspec.open(f"{ZIP}{member}::{path}" if member else path, "rb")
            with opened as stream:
                return stream.read()

    def file_name(self, cell: Any) -> str | None:
        """Return the quoted name of the file that an image cell names, as ARCHIVE/MEMBER inside an archive; None without one."""
        location = cell.get("path") if isinstance(cell, dict) else None
        if not location:
            return None
        member, file = _parse_location(location)
        name = file.removeprefix(self.place.root)
        return repr(f"{name}/{member}" if member else name)


@contextmanager
def read_errors(name: str) -> Generator[None]:
    """Raise a one-line AcquisitionError for errors of `datasets` on damaged or unreachable files."""
    with library_errors(f"dataset {name!r} can't be read: "), hub_errors("dataset", name, None):
        yield


def _parse_location(location: str) -> tuple[str, str]:
    """Return the member of an archive and the file that a location names; the member is empty for a plain file."""
    member, _, file = location.removeprefix(ZIP).rpartition("::") if location.startswith(ZIP) else ("", "", location)
    return member, file


def open_data(query: DataQuery, *, cache: Path, progress: Progress) -> OpenedData:
    """Open the data set that `query` names: reference:digits, a local folder, or a Hub id to be streamed.

    Raises:
        AcquisitionError: it does not exist, is gated, needs a script or the name of a config, or can't be read.
    """
    name = query.dataset
    if name == DIGITS:
        place = _local_place(name, reference_dataset(progress))
    elif name.startswith(PREFIX):
        raise AcquisitionError(f"there is no reference data set {name!r}: use {DIGITS}")
    elif is_local(name):
        place = _local_place(name, local_folder(name, "dataset"))
    else:
        progress(f"looking up {name}", 0, 0)
        place = _hub_place(name, query.dataset_revision)
    with read_errors(name):
        marker_files = ("dataset_dict.json", "state.json")
        if place.folder is not None and any((place.folder / file).is_file() for file in marker_files):
            loaded: Any = datasets.load_from_disk(str(place.folder))
            is_dict = isinstance(loaded, datasets.DatasetDict)
            splits: Any = dict(loaded) if is_dict else {str(loaded.split or "train"): loaded}
            for split in splits.values():
                for file in split.cache_files:
                    place.inside(file["filename"])
            return OpenedData(query=query, place=place, cache=cache, splits=splits, options={}, notes=place.notes)
        builder, options = _choose_config(query.dataset_config, place, cache)
        files = itertools.chain.from_iterable((builder.config.data_files or {}).values())
        parts = sorted({part for file in files for part in PurePosixPath(str(file)).parts if part.startswith(PARTIAL)})
        notes = [
            f"of split {part.removeprefix(PARTIAL)!r} only the first part is read: the Hub copied no more of it"
            for part in parts
        ]
        return OpenedData(
            query=query,
            place=place,
            cache=cache,
            splits=builder.as_streaming_dataset(),
            builder=builder,
            options=options,
            notes=(*place.notes, *notes),
        )


def _local_place(name: str, folder: Path) -> DataSource:
    folder = folder.resolve()
    if PATTERN_CHARACTERS & set(str(folder)):
        raise AcquisitionError(f"dataset {name!r} lies in a folder with one of * ? [ ] in its path: rename it")
    scripts = sorted(path.name for path in folder.glob("*.py"))
    if f"{folder.name}.py" in scripts or (scripts and not any(path.suffix != ".py" for path in folder.iterdir())):
        raise AcquisitionError(
            f"dataset {name!r} needs a Python script ({scripts[0]!r}), which is never run: "
            "give a folder of parquet, arrow or image files"
        )
    return DataSource(
        name=name,
        folder=folder,
        commit=None,
        root=f"{folder.as_posix().rstrip('/')}/",
        top_folders=frozenset(path.name for path in folder.iterdir() if path.is_dir()),
        has_card=(folder / CARD).is_file(),
    )


def _hub_place(name: str, revision: str | None) -> DataSource:
    """Return a Hub repository at `revision`, or the Hub's parquet copy of it if it needs a script."""
    if datasets_config.HF_HUB_OFFLINE:
        raise AcquisitionError(
            f"dataset {name!r} is no local folder, and HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set, "
            "so that the Hub can't be reached: give a local folder, or unset it"
        )
    notes: tuple[str, ...] = ()
    with hub_errors("dataset", name, revision):
        info = HfApi().dataset_info(name, revision=revision)
        HfApi().auth_check(name, repo_type="dataset")
    script = f"{name.rsplit('/', maxsplit=1)[-1]}.py"
    if script in {sibling.rfilename for sibling in info.siblings or []}:
        problem = f"dataset {name!r} needs its Python script {script!r}, which is never run"
        if revision not in (None, "main"):
            raise AcquisitionError(
                f"{problem}: leave out dataset_revision {revision!r} for the Hub's parquet copy of main, or give a local one"
            )
        with hub_errors("dataset", name, PARQUET_COPY):
            try:
                info = HfApi().dataset_info(name, revision=PARQUET_COPY)
            except RevisionNotFoundError as error:
                raise AcquisitionError(f"{problem}, and the Hub has no parquet copy of it: give a local one") from error
        notes = (f"images are read from the Hub's parquet copy, {PARQUET_COPY} at {info.sha}: {script!r} is never run",)
    commit, files = info.sha or revision or "main", [sibling.rfilename for sibling in info.siblings or []]
    return DataSource(
        name=name,
        folder=None,
        commit=commit,
        root=f"hf://datasets/{name}@{commit}/",
        top_folders=frozenset(PurePosixPath(file).parts[0] for file in files if "/" in file),
        has_card=CARD in files,
        notes=notes,
    )


def _choose_config(requested: str | None, place: DataSource, cache: Path) -> tuple[Any, dict[str, Any]]:
    """Return a builder of the requested config, and its options.

    Without a card, `datasets` reads every folder named as a split into that split: a data set in three sizes gives each image
    three times.
    """
    if place.has_card:
        if place.folder is None:
            card = hf_hub_download(place.name, CARD, repo_type="dataset", revision=place.commit)
        else:
            card = place.folder / CARD
        if DatasetCard.load(card, ignore_metadata_errors=True).data.get("configs"):
            try:
                return place.builder(cache, requested), {"config": requested}
            except ValueError:
                names = datasets.get_dataset_config_names(place.path, revision=place.commit)
                check_config(place.name, requested, names)
                raise
    builder = place.builder(cache)
    folder = choose_sibling_folder(place.name, requested, _files_by_split(place, builder))
    options: dict[str, Any] = {} if folder is None else {"data_dir": folder}
    if folder is not None:
        builder = place.builder(cache, **options)
    elif requested is not None:
        check_config(place.name, requested, [builder.config.name])
    if isinstance(builder, ImageFolder):
        files = _files_by_split(place, builder)
        tables = tuple(builder.METADATA_FILENAMES)
        has_table = any(file.endswith(tables) for names in files.values() for file in names)
        if not has_table and (patterns := patterns_without_duplicates(files)):
            options = {"data_files": patterns}
            builder = place.builder(cache, **options)
    return builder, options


def _files_by_split(place: DataSource, builder: Any) -> dict[str, list[str]]:
    """Return the file names of each split, relative to the data set; an image folder's other files are left out."""
    extensions = ("",)
    if isinstance(builder, ImageFolder):
        extensions = (*builder.EXTENSIONS, *ARCHIVE_EXTENSIONS, *builder.METADATA_FILENAMES)
    return {
        split: [str(file).removeprefix(place.root) for file in files if str(file).lower().endswith(extensions)]
        for split, files in (builder.config.data_files or {}).items()
    }


def check_config(dataset: str, requested: str | None, names: Collection[str]) -> None:
    """Check that the requested config is one of `names`, or that there is only one; AcquisitionError lists them."""
    listed = ", ".join(names)
    if len(names) > 1 and requested is None:
        raise AcquisitionError(f"dataset {dataset!r} has several configs, {listed}: name one with dataset_config")
    if requested not in (None, *names):
        raise AcquisitionError(
            f"dataset {dataset!r} has no config {requested!r}: use one of {listed}{did_you_mean(requested or '', names)}"
        )


def choose_sibling_folder(dataset: str, requested: str | None, files: Mapping[str, Iterable[str]]) -> str | None:
    """Return which of several sibling folders to read, given the files of each split; None if there is only one.

    Raises:
        AcquisitionError: no folder was requested, or one that does not exist or has another inside.
    """
    parents = [{"/".join(parts[:-1]) for parts in map(_split_parts, names) if parts} for names in files.values()]
    folders = sorted({folder for names in parents if len(names) > 1 for folder in names})
    if not folders:
        return None
    # A folder at the top, "", has all others inside of it.
    outer = [
        each for each in folders if any(other.startswith(each and f"{each}/") for other in folders if other != each)
    ]
    inner = [folder for folder in folders if folder not in outer]
    if outer and requested not in inner:
        raise AcquisitionError(
            f"dataset {dataset!r} has splits at {outer[0] or 'the top'} and others inside of it, which would be read as one: "
            f"name one of {', '.join(inner)} with dataset_config, or move them out"
        )
    check_config(dataset, requested, inner)
    return requested


def patterns_without_duplicates(files: Mapping[str, Sequence[str]]) -> dict[str, list[str]] | None:
    """Return file patterns that put each image into one split, if some would be read twice, as with a class called train.

    The outermost folder that names a split decides. None if no image is read twice, or if such a folder names two splits.
    """
    counts = Counter(name for names in files.values() for name in names)
    if all(count == 1 for count in counts.values()):
        return None
    patterns: dict[str, set[str]] = {}
    for name in counts:
        parts = _split_parts(name)
        if parts is None or len(parts) == len(PurePosixPath(name).parts):
            return None
        folder = "/".join(parts)
        splits = {SPLIT_BY_WORD[word] for word in re.split(r"[-._ 0-9]", parts[-1]) if word in SPLIT_BY_WORD}
        if len(splits) != 1 or PATTERN_CHARACTERS & set(folder):
            return None
        patterns.setdefault(splits.pop(), set()).add(f"{folder}/**")
    return {split: sorted(folders) for split, folders in patterns.items()}


def _split_parts(file: str) -> tuple[str, ...] | None:
    """Return the parts of a path up to the first folder or table whose name names a split; None without one."""
    path = PurePosixPath(file)
    is_table = not TABLE_EXTENSIONS.isdisjoint(path.suffixes)
    candidates = path.parts if is_table else path.parts[:-1]
    return next((path.parts[: depth + 1] for depth, part in enumerate(candidates) if SPLIT_WORD.search(part)), None)


def depth_advice(images: Sequence[str]) -> str | None:
    """Return advice on the first image at another depth than most; None if all lie at one depth.

    `datasets` takes folders for labels only if the images of all splits lie at one depth.
    """
    depths = Counter(image.count("/") for image in images)
    if len(depths) < 2:
        return None
    ((usual_depth, num_usual),) = depths.most_common(1)
    typical = next(image for image in images if image.count("/") == usual_depth)
    odd = next(image for image in images if image.count("/") != usual_depth)
    return (
        f"folders are labels only if all images lie equally deep, and {len(images) - num_usual} of {len(images)} don't lie "
        f"as deep as {typical!r}, the first is {odd!r}: move it into its class's folder, or out of the data set"
    )
