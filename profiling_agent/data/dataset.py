"""Data sets: labelled images in a local folder, or streamed from the Hugging Face Hub."""

import itertools
import re
from collections import Counter
from collections.abc import Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any
from zipfile import BadZipFile

import datasets
import fsspec
import pyarrow as pa
from datasets import config as datasets_config
from datasets.exceptions import DatasetsError
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.parquet.parquet import Parquet
from huggingface_hub import DatasetCard, HfApi, hf_hub_download
from huggingface_hub.errors import RevisionNotFoundError
from pydantic import Field
from yaml import YAMLError

from profiling_agent.data.hub import LIBRARY_ERRORS, MAX_TEXT, did_you_mean, hub_errors, is_local, local_folder
from profiling_agent.data.reference import DIGITS, PREFIX, reference_dataset
from profiling_agent.errors import AcquisitionError, ProfilingAgentError
from profiling_agent.lib.io import files_root
from profiling_agent.lib.progress import Progress
from profiling_agent.schemas import MatchBy, Record

# Where the Hub keeps a parquet copy of a data set: CONFIG/SPLIT/*.parquet, of a large split partial-SPLIT.
PARQUET_COPY, PARTIAL = "refs/convert/parquet", "partial-"
CARD, ZIP, ARCHIVES = "README.md", "zip://", (".zip", ".tar")
# What a path may not hold: `datasets` reads it as a pattern.
PATTERN = frozenset("*?[]")
# The words that `datasets` finds splits by, in names of folders and of tables, and which split each means.
SPLIT_OF = {
    word: words[0]
    for words in (
        ("train", "training"),
        ("validation", "valid", "dev", "val"),
        ("test", "testing", "eval", "evaluation"),
    )
    for word in words
}
SPLIT = re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(SPLIT_OF)})(?:$|[-._ 0-9])")
# The name of a photograph says nothing of its split: its folder is its class.
TABLES = frozenset({".parquet", ".arrow", ".csv", ".tsv", ".json", ".jsonl", ".tar", ".zip"})
BATCH_ROWS = 2048
# A table of photographs has hundreds of megabytes in fewer rows.
BATCH_IMAGES = 64
SHUFFLE_BUFFER = 1000


class DataQuery(Record):
    """A labelled image data set, the requested split and columns, and how much to draw."""

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
class Place:
    """A folder, or a repository on the Hub at one commit; `root` is what absolute names of its files begin with."""

    name: str
    folder: Path | None
    commit: str | None
    root: str
    top_folders: frozenset[str]
    has_card: bool
    notes: tuple[str, ...] = ()

    def inside(self, file: str) -> str:
        """Return the absolute name of a file of the data set; AcquisitionError if it lies elsewhere."""
        path = file.removeprefix(self.root)
        if "://" not in path and "::" not in path:
            if self.folder is None and ".." not in PurePosixPath(path).parts:
                return self.root + path
            target = (self.folder / path).resolve() if self.folder is not None else None
            if self.folder is not None and target is not None and target.is_relative_to(files_root(self.folder)):
                return str(target)
        raise AcquisitionError(
            f"dataset {self.name!r} can't be read: it names {file[:MAX_TEXT]!r}, which is not in it: copy the data into it, or give "
            "the images' bytes in the table"
        )

    def builder(self, cache: Path, config: str | None = None, **options: Any) -> Any:
        """Return what reads the files; nothing is downloaded or copied yet."""
        path = self.name if self.folder is None else str(self.folder)
        made = datasets.load_dataset_builder(path, config, revision=self.commit, cache_dir=str(cache), **options)
        if hasattr(made.config, "decode_num_threads"):
            # Threads would decode all images of a Hub data set, also those that aren't drawn.
            setattr(made.config, "decode_num_threads", 0)  # noqa: B010 - only some kinds declare it
        for files in (made.config.data_files or {}).values():
            for file in files:
                self.inside(str(file))
        return made

    def names_configs(self) -> bool:
        """Return whether the data set's card lists its configs."""
        if not self.has_card:
            return False
        if self.folder is None:
            card = hf_hub_download(self.name, CARD, repo_type="dataset", revision=self.commit)
        else:
            card = self.folder / CARD
        return bool(DatasetCard.load(card, ignore_metadata_errors=True).data.get("configs"))


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedData:
    """A data set whose splits can be read; nothing of it has been copied or downloaded yet.

    `options` are what its builder was made with; `builder` is None for what `save_to_disk` wrote.
    """

    query: DataQuery
    place: Place
    cache: Path
    splits: Mapping[str, Any]
    builder: Any = None
    options: Mapping[str, Any]
    notes: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Return whether rows cost no download."""
        return self.place.folder is not None

    @property
    def is_image_folder(self) -> bool:
        """Return whether images are files in it, labelled by their folders."""
        return isinstance(self.builder, ImageFolder)

    @property
    def has_cheap_labels(self) -> bool:
        """Return whether labels are read without downloading images."""
        return self.is_local or self.is_image_folder or isinstance(self.builder, Parquet)

    def features(self, split: str) -> Mapping[str, Any]:
        """Return the columns of a split and their types."""
        return self.splits[split].features or {}

    def misnamed_splits(self) -> str:
        """Return advice for top folders that name a split but for their case, or nothing."""
        tops = self.place.top_folders.difference(SPLIT_OF, self.splits)
        wrong = sorted(top for top in tops if top.lower() in SPLIT_OF)
        advice = (f"its folder {top!r} isn't read as a split: call it {top.lower()!r}" for top in wrong)
        return "; ".join(advice)

    def stray_image(self, split: str) -> str | None:
        """Return which image keeps folders from being labels, and what to do; None if that isn't the problem."""
        if not self.is_image_folder or self.builder.config.drop_labels or len(self.features(split)) > 1:
            return None
        files = itertools.chain.from_iterable(_files(self.place, self.builder).values())
        return odd_depth([file for file in files if file.lower().endswith(tuple(self.builder.EXTENSIONS))])

    def tables(self, split: str, columns: list[str], num_rows: int = BATCH_ROWS) -> Iterator[Any]:
        """Yield a split's rows in file order as Arrow tables of so many; of parquet, no other column is read."""
        with reading(self.query.dataset):
            if isinstance(self.builder, Parquet):
                view: Any = self.place.builder(self.cache, **self.options, columns=columns).as_streaming_dataset(split)
            else:
                view = self.splits[split].select_columns(columns)
            yield from view.with_format("arrow").iter(batch_size=num_rows)

    def labels(self, split: str, column: str, limit: int | None = None) -> Iterator[Any]:
        """Yield the raw labels of a split's rows in file order, at most `limit`."""
        cells = (cell for table in self.tables(split, [column]) for cell in table[column].to_pylist())
        return itertools.islice(cells, limit)

    def stream(self, split: str, image_column: str, label_column: str, seed: int) -> Iterator[tuple[Any, Any]]:
        """Yield (image cell, raw label) in an order shuffled by shards and a buffer, images not decoded."""
        view = self.splits[split].select_columns([image_column, label_column])
        if isinstance(self.features(split)[image_column], datasets.Image):
            view = view.cast_column(image_column, datasets.Image(decode=False))
        with reading(self.query.dataset):
            for row in view.shuffle(seed=seed, buffer_size=SHUFFLE_BUFFER):
                yield row[image_column], row[label_column]

    def image(self, cell: Any) -> bytes | None:
        """Return the encoded image that a cell holds or names, or None; AcquisitionError if its file can't be read."""
        data, location = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if data is not None or not location:
            return data if isinstance(data, bytes) else None
        member, file = _parts(location)
        with reading(self.query.dataset):
            path = self.place.inside(file)
            opened: Any = fsspec.open(f"{ZIP}{member}::{path}" if member else path, "rb")
            with opened as stream:
                return stream.read()

    def file_name(self, cell: Any) -> str | None:
        """Return the quoted name of the file that an image cell names, in an archive below the archive's."""
        location = cell.get("path") if isinstance(cell, dict) else None
        if not location:
            return None
        member, file = _parts(location)
        name = file.removeprefix(self.place.root)
        return repr(f"{name}/{member}" if member else name)


@contextmanager
def reading(name: str) -> Generator[None]:
    """Raise one line for what `datasets` raises on damaged or unreachable files."""
    try:
        with hub_errors("dataset", name, None):
            yield
    except ProfilingAgentError:
        raise
    except (*LIBRARY_ERRORS, EOFError, BadZipFile, pa.ArrowException, YAMLError, DatasetsError) as error:
        text = " ".join(str(error).split())[:MAX_TEXT]
        raise AcquisitionError(f"dataset {name!r} can't be read: {type(error).__name__} ({text!r})") from error


def _parts(location: str) -> tuple[str, str]:
    """Return the member of an archive and the file that a location names; the first is empty for a plain file."""
    member, _, file = location.removeprefix(ZIP).rpartition("::") if location.startswith(ZIP) else ("", "", location)
    return member, file


def open_data(query: DataQuery, *, cache: Path, progress: Progress) -> OpenedData:
    """Return the data set that `query` names: reference:digits, a local folder, or a Hub id to be streamed.

    Raises:
        AcquisitionError: it does not exist, is gated, needs a script or the name of a config, or can't be read.
    """
    name = query.dataset
    if name == DIGITS:
        place = _folder(name, reference_dataset(progress))
    elif name.startswith(PREFIX):
        raise AcquisitionError(f"there is no reference data set {name!r}: use {DIGITS}")
    elif is_local(name):
        place = _folder(name, local_folder(name, "dataset"))
    else:
        progress(f"looking up {name}", 0, 0)
        place = _repository(name, query.dataset_revision)
    with reading(name):
        saved = ("dataset_dict.json", "state.json")
        if place.folder is not None and any((place.folder / file).is_file() for file in saved):
            loaded: Any = datasets.load_from_disk(str(place.folder))
            is_several = isinstance(loaded, datasets.DatasetDict)
            splits: Any = dict(loaded) if is_several else {str(loaded.split or "train"): loaded}
            for rows in splits.values():
                for file in rows.cache_files:
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


def _folder(name: str, folder: Path) -> Place:
    folder = folder.resolve()
    if PATTERN & set(str(folder)):
        raise AcquisitionError(f"dataset {name!r} lies in a folder with one of * ? [ ] in its path: rename it")
    scripts = sorted(path.name for path in folder.glob("*.py"))
    if f"{folder.name}.py" in scripts or (scripts and not any(path.suffix != ".py" for path in folder.iterdir())):
        raise AcquisitionError(
            f"dataset {name!r} needs a Python script ({scripts[0]!r}), which is never run: "
            "give a folder of parquet, arrow or image files"
        )
    return Place(
        name=name,
        folder=folder,
        commit=None,
        root=f"{folder.as_posix().rstrip('/')}/",
        top_folders=frozenset(path.name for path in folder.iterdir() if path.is_dir()),
        has_card=(folder / CARD).is_file(),
    )


def _repository(name: str, revision: str | None) -> Place:
    """Return a repository at `revision`; if it needs a script, which is never run, the Hub's parquet copy of it."""
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
        needs = f"dataset {name!r} needs its Python script {script!r}, which is never run"
        if revision not in (None, "main"):
            raise AcquisitionError(
                f"{needs}: leave out dataset_revision {revision!r} for the Hub's parquet copy of main, or give a local one"
            )
        with hub_errors("dataset", name, PARQUET_COPY):
            try:
                info = HfApi().dataset_info(name, revision=PARQUET_COPY)
            except RevisionNotFoundError as error:
                raise AcquisitionError(f"{needs}, and the Hub has no parquet copy of it: give a local one") from error
        notes = (f"images are read from the Hub's parquet copy, {PARQUET_COPY} at {info.sha}: {script!r} is never run",)
    commit, files = info.sha or revision or "main", [sibling.rfilename for sibling in info.siblings or []]
    return Place(
        name=name,
        folder=None,
        commit=commit,
        root=f"hf://datasets/{name}@{commit}/",
        top_folders=frozenset(PurePosixPath(file).parts[0] for file in files if "/" in file),
        has_card=CARD in files,
        notes=notes,
    )


def _choose_config(requested: str | None, place: Place, cache: Path) -> tuple[Any, dict[str, Any]]:
    """Return a builder of the requested config, and its options.

    Without a card `datasets` reads every folder named as a split into it: of a data set in three sizes, each image thrice.
    """
    if place.names_configs():
        try:
            return place.builder(cache, requested), {"config": requested}
        except ValueError:
            path = place.name if place.folder is None else str(place.folder)
            check_config(place.name, requested, datasets.get_dataset_config_names(path, revision=place.commit))
            raise
    builder = place.builder(cache)
    folder = beside_others(place.name, requested, _files(place, builder))
    options: dict[str, Any] = {} if folder is None else {"data_dir": folder}
    if folder is not None:
        builder = place.builder(cache, **options)
    elif requested is not None:
        check_config(place.name, requested, [builder.config.name])
    if isinstance(builder, ImageFolder):
        files = _files(place, builder)
        tables = tuple(builder.METADATA_FILENAMES)
        has_table = any(file.endswith(tables) for names in files.values() for file in names)
        if not has_table and (patterns := each_once(files)):
            options = {"data_files": patterns}
            builder = place.builder(cache, **options)
    return builder, options


def _files(place: Place, builder: Any) -> dict[str, list[str]]:
    """Return the files that each split is read from, by their names in the data set; of a folder of images no other files."""
    read = ("",)
    if isinstance(builder, ImageFolder):
        read = (*builder.EXTENSIONS, *ARCHIVES, *builder.METADATA_FILENAMES)
    return {
        split: [str(file).removeprefix(place.root) for file in files if str(file).lower().endswith(read)]
        for split, files in (builder.config.data_files or {}).items()
    }


def check_config(dataset: str, requested: str | None, names: Collection[str]) -> None:
    """Check that a config is one of `names`, or that there is only one; AcquisitionError names them."""
    listed = ", ".join(names)
    if len(names) > 1 and requested is None:
        raise AcquisitionError(f"dataset {dataset!r} has several configs, {listed}: name one with dataset_config")
    if requested not in (None, *names):
        raise AcquisitionError(
            f"dataset {dataset!r} has no config {requested!r}: use one of {listed}{did_you_mean(requested or '', names)}"
        )


def beside_others(dataset: str, requested: str | None, files: Mapping[str, Iterable[str]]) -> str | None:
    """Return which folder to read if several lie side by side, whose splits would be of these files; None for only one.

    Raises:
        AcquisitionError: none was requested, or one that isn't there or has another inside.
    """
    above = [{folder for file in names if (folder := _above_split(file)) is not None} for names in files.values()]
    folders = sorted({folder for names in above if len(names) > 1 for folder in names})
    if not folders:
        return None

    def has_inner(folder: str) -> bool:
        start = f"{folder}/" if folder else ""
        return any(other.startswith(start) for other in folders if other != folder)

    outer, inner = list(filter(has_inner, folders)), list(itertools.filterfalse(has_inner, folders))
    if outer and requested not in inner:
        raise AcquisitionError(
            f"dataset {dataset!r} has splits at {outer[0] or 'the top'} and others inside of it, which would be read as one: "
            f"name one of {', '.join(inner)} with dataset_config, or move them out"
        )
    check_config(dataset, requested, inner)
    return requested


def each_once(files: Mapping[str, Sequence[str]]) -> dict[str, list[str]] | None:
    """Return patterns for images of which some would be read into two splits, as those of a class called train.

    Each is left to the split that its outermost folder names. None if no image is read twice, or such a folder names two splits.
    """
    counts = Counter(name for names in files.values() for name in names)
    if all(count == 1 for count in counts.values()):
        return None
    patterns: dict[str, set[str]] = {}
    for name in counts:
        depth, parts = _depth_of_split(name), PurePosixPath(name).parts
        if depth is None or len(parts) == depth + 1:
            return None
        folder = "/".join(parts[: depth + 1])
        splits = {SPLIT_OF[word] for word in re.split(r"[-._ 0-9]", parts[depth]) if word in SPLIT_OF}
        if len(splits) != 1 or PATTERN & set(folder):
            return None
        patterns.setdefault(splits.pop(), set()).add(f"{folder}/**")
    return {split: sorted(folders) for split, folders in patterns.items()}


def _depth_of_split(file: str) -> int | None:
    """Return how deep the first folder or table lies that names a split; None without one."""
    path = PurePosixPath(file)
    is_table = not TABLES.isdisjoint(path.suffixes)
    named = path.parts if is_table else path.parts[:-1]
    return next((depth for depth, part in enumerate(named) if SPLIT.search(part)), None)


def _above_split(file: str) -> str | None:
    """Return the folder, the top as nothing, in which a folder or a table names a split; None without one."""
    depth = _depth_of_split(file)
    return None if depth is None else "/".join(PurePosixPath(file).parts[:depth])


def odd_depth(images: Sequence[str]) -> str | None:
    """Return which image lies deeper or less deep than most, and what to do; None if all lie at one depth.

    `datasets` takes folders for labels only if all do, over all splits.
    """
    depths = Counter(image.count("/") for image in images)
    if len(depths) < 2:
        return None
    ((usual, num_usual),) = depths.most_common(1)
    first = next(image for image in images if image.count("/") == usual)
    odd = next(image for image in images if image.count("/") != usual)
    return (
        f"folders are labels only if all images lie equally deep, and {len(images) - num_usual} of {len(images)} don't lie "
        f"as deep as {first!r}, the first is {odd!r}: move it into its class's folder, or out of the data set"
    )
