"""Data sets: labelled images, of Hub ids as streams, of local folders as they lie on disk."""

import itertools
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Any

import datasets
import pyarrow as pa
from datasets import config as datasets_config
from datasets.packaged_modules.arrow.arrow import Arrow
from datasets.packaged_modules.csv.csv import Csv
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder
from datasets.packaged_modules.json.json import Json
from datasets.packaged_modules.parquet.parquet import Parquet
from datasets.packaged_modules.webdataset.webdataset import WebDataset
from huggingface_hub import constants
from pydantic import Field

from profiling_agent.acquisition.configs import (
    Config,
    beside_others,
    check_config,
    each_once,
    misnamed_splits,
    odd_depth,
    parquet_copy,
    quoted_path,
)
from profiling_agent.acquisition.hub import hub_errors, is_local, local_folder, resolve_dataset
from profiling_agent.acquisition.origin import (
    ZIP,
    Folder,
    Images,
    Origin,
    Repository,
    check_files,
    check_folder,
    check_origin,
    check_saved,
)
from profiling_agent.acquisition.reference import DIGITS, PREFIX, reference_dataset
from profiling_agent.errors import AcquisitionError
from profiling_agent.foreign import foreign_code
from profiling_agent.progress import Progress
from profiling_agent.records import Record

# What Arrow raises where we call it ourselves; what its callers in other packages make of it is a stranger's.
READ_ERRORS = (OSError, pa.ArrowException, UnicodeDecodeError)
# The kinds of files that hold labelled images and name no file of their own.
BUILDERS = (Parquet, Arrow, Csv, Json, ImageFolder, WebDataset)
ARCHIVES = (".zip", ".tar")
BY_TABLE = "a table that names images is read where it is called metadata.csv, its column of paths file_name, and it lies beside the images"
BATCH_ROWS = 2048
# A table of photographs has hundreds of megabytes by fewer.
BATCH_IMAGES = 64
SHUFFLE_BUFFER = 1000


class DataQuery(Record):
    """A labelled image data set, the split and columns to use where they were named, and how much to draw."""

    dataset: str = Field(min_length=1, description="Hub id, local folder, or reference:digits")
    dataset_config: str | None = None
    dataset_revision: str | None = None
    split: str | None = Field(default=None, description="split to evaluate on")
    image_column: str | None = None
    label_column: str | None = None
    num_samples: int | None = Field(
        default=None, ge=1, description="images to search on; by default half, at most 2000"
    )
    num_recovery: int = Field(
        default=0, ge=0, description="most images of the train split to recover with; 0 draws none"
    )
    seed: int = Field(default=0, ge=0, lt=2**32)


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedData:
    """A data set whose splits can be read; nothing of it has been copied or downloaded yet.

    `cache` is a temporary folder for what `datasets` insists on writing of a local folder; None for the Hub. `builder` reads
    its files; None of what `save_to_disk` wrote. `notes` say what a reader of the results should know of where it comes from.
    """

    query: DataQuery
    config: Config
    cache: Path | None
    splits: Mapping[str, Any]
    builder: Any
    images: Images
    notes: tuple[str, ...] = ()

    @property
    def is_local(self) -> bool:
        """Say whether rows cost no download."""
        return self.cache is not None

    @property
    def is_parquet(self) -> bool:
        """Say whether a column is read without the others."""
        return isinstance(self.builder, Parquet)

    @property
    def is_image_folder(self) -> bool:
        """Say whether images lie in it as files, with their folders for labels."""
        return isinstance(self.builder, ImageFolder)

    def features(self, split: str) -> Mapping[str, Any]:
        """Return the columns of a split and their types."""
        return self.splits[split].features or {}

    def file_name(self, location: str) -> str:
        """Return the path in the data set of what a cell names, in an archive below the archive's; quoted, as it may be shown."""
        is_packed = location.startswith(ZIP)
        member, _, file = location.removeprefix(ZIP).rpartition("::") if is_packed else ("", "", location)
        prefix = next((prefix for prefix in self.images.origin.prefixes if file.startswith(prefix)), "")
        path = file.removeprefix(prefix)
        return quoted_path(f"{path}/{member}" if member else path)

    def stray_image(self, split: str) -> str | None:
        """Return which image keeps folders from being labels, and what to do; None where it isn't that."""
        if not self.is_image_folder or self.builder.config.drop_labels or len(self.features(split)) > 1:
            return None
        files = itertools.chain.from_iterable(_names(self.images.origin, self.builder).values())
        return odd_depth([file for file in files if not file.lower().endswith(ARCHIVES)])

    def misnamed_splits(self) -> tuple[str, ...]:
        """Return what to call the folders that would be splits but for their case; the data set is looked through."""
        with reading(self.query.dataset):
            return misnamed_splits(self.images.origin.files(), self.splits)

    def tables(self, split: str, columns: list[str], num_rows: int = BATCH_ROWS) -> Iterator[Any]:
        """Yield a split's rows in file order as Arrow tables of so many; of parquet, no other column is read."""
        with reading(self.query.dataset):
            if self.is_parquet:
                builder = _builder(self.images.origin, self.config, self.cache, columns=columns)
                view: Any = builder.as_streaming_dataset(split=split)
            else:
                view = self.splits[split].select_columns(columns)
            for table in view.with_format("arrow").iter(batch_size=num_rows):
                # A file says itself where in it a text or an image begins; Arrow believes it until it is asked.
                table.validate(full=True)
                yield table

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


@contextmanager
def reading(name: str) -> Generator[None]:
    """Turn what `datasets` raises on damaged or unreachable files into one line."""

    def refuse(raised: str) -> AcquisitionError:
        return AcquisitionError(f"dataset {name!r} can't be read: {raised}")

    try:
        with foreign_code(refuse), hub_errors("dataset", name, None):
            yield
    except READ_ERRORS as error:
        raise refuse(f"{type(error).__name__} ({str(error).strip().split(chr(10), maxsplit=1)[0][:200]!r})") from error


def _place(origin: Origin) -> tuple[str, str | None]:
    """Return the path or the id that `datasets` knows an origin by, and its commit."""
    if isinstance(origin, Repository):
        return origin.name, origin.commit
    assert isinstance(origin, Folder), "there is no third kind"
    return str(origin.folder), None


def _builder(origin: Origin, config: Config, cache: Path | None, **options: Any) -> Any:
    path, revision = _place(origin)
    builder = datasets.load_dataset_builder(
        path,
        config.name,
        revision=revision,
        cache_dir=None if cache is None else str(cache),
        **config.files,
        **options,
    )
    # In threads of its own `datasets` would open the images of a Hub data set, whatever their cells name.
    setattr(builder.config, "decode_num_threads", 0)  # noqa: B010 - it is declared for some kinds of files only
    return builder


def _refuse_scripts(folder: Path, name: str) -> None:
    """Refuse a folder whose data only a Python script could make."""
    scripts = sorted(path.name for path in folder.glob("*.py"))
    if f"{folder.name}.py" in scripts or (scripts and not any(path.suffix != ".py" for path in folder.iterdir())):
        raise AcquisitionError(
            f"dataset {name!r} needs a Python script ({scripts[0]!r}), which is never run: "
            "give a folder of parquet, arrow or image files"
        )


def _from_disk(origin: Folder) -> Mapping[str, Any] | None:
    """Return the splits of a folder that `save_to_disk` wrote; they are mapped, not read."""
    if not any((origin.folder / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        return None
    with reading(origin.name):
        check_saved(origin)
        loaded: Any = datasets.load_from_disk(str(origin.folder))
    if isinstance(loaded, datasets.DatasetDict):
        return {str(split): rows for split, rows in loaded.items()}
    return {str(loaded.split or "train"): loaded}


def _explain_config(query: DataQuery, origin: Origin) -> None:
    """Raise the error that lists the configs, where the lack or the name of one was what went wrong."""
    path, revision = _place(origin)
    with reading(query.dataset):
        configs = [str(name) for name in datasets.get_dataset_config_names(path, revision=revision)]
    check_config(query.dataset, query.dataset_config, configs)


def open_data(query: DataQuery, *, cache: Path, progress: Progress) -> OpenedData:
    """Return the data set that `query` names: reference:digits, a local folder, or a Hub id to be streamed.

    Raises:
        AcquisitionError: it does not exist, is gated, needs a script, has several configs and none was named, or
            can't be read.
    """
    local = _local_folder(query, progress)
    if local is None:
        progress(f"looking up {query.dataset}", 0, 0)
        _refuse_offline(query.dataset)
        found = resolve_dataset(query.dataset, query.dataset_revision)
        origin = Repository(query.dataset, found.commit, found.files, found.is_parquet_copy)
        return _open(query, origin, None, found.notes)
    folder = Folder(query.dataset, local)
    with reading(query.dataset):
        check_folder(folder)
    return _open(query, folder, cache)


def _open(query: DataQuery, origin: Origin, cache: Path | None, notes: tuple[str, ...] = ()) -> OpenedData:
    """Return a data set that is looked into before `datasets` opens it."""
    with reading(query.dataset):
        names_configs = check_origin(origin)
    splits = _from_disk(origin) if isinstance(origin, Folder) else None
    config, builder = Config(), None
    if splits is None:
        with reading(query.dataset):
            config, builder = _choose_builder(query, origin, cache, names_configs=names_configs)
            splits = builder.as_streaming_dataset()
    return OpenedData(
        query=query,
        config=config,
        cache=cache,
        splits=splits,
        builder=builder,
        images=Images(origin),
        notes=(*notes, *config.notes),
    )


def _choose_builder(query: DataQuery, origin: Origin, cache: Path | None, *, names_configs: bool) -> tuple[Config, Any]:
    """Return what to read of a data set, and what reads it: where no card says it, one of those that lie side by side."""
    asked, config = query.dataset_config, None
    if names_configs:
        return Config(asked), _checked_builder(query, origin, Config(asked), cache)
    if isinstance(origin, Repository) and origin.is_parquet_copy:
        config = parquet_copy(query.dataset, asked, origin.listed)
    if config is None:
        builder = _checked_builder(query, origin, Config(), cache)
        config = beside_others(query.dataset, asked, _names(origin, builder))
        if config is None and asked is None:
            return _read_once(query, origin, Config(), builder, cache)
    config = config or Config(asked)
    return _read_once(query, origin, config, _checked_builder(query, origin, config, cache), cache)


def _read_once(
    query: DataQuery, origin: Origin, config: Config, builder: Any, cache: Path | None
) -> tuple[Config, Any]:
    """Return what to read instead where images would be read into two splits; not where a table labels them, wherever it lies."""
    own = each_once(_names(origin, builder)) if isinstance(builder, ImageFolder) else None
    if own is None or any(PurePosixPath(file).name in builder.METADATA_FILENAMES for file in origin.files()):
        return config, builder
    own = replace(own, notes=config.notes)
    return own, _checked_builder(query, origin, own, cache)


def _names(origin: Origin, builder: Any) -> dict[str, list[str]]:
    """Return the files that each split is read from, by their names in the data set; of images and what else lies there, the images and archives."""
    prefixes = origin.prefixes
    read = (*builder.EXTENSIONS, *ARCHIVES) if isinstance(builder, ImageFolder) else ("",)

    def name(file: str) -> str:
        return file.removeprefix(next(prefix for prefix in prefixes if file.startswith(prefix)))

    return {
        split: [name(str(file)) for file in files if str(file).lower().endswith(read)]
        for split, files in (builder.config.data_files or {}).items()
    }


def _checked_builder(query: DataQuery, origin: Origin, config: Config, cache: Path | None) -> Any:
    """Return what reads a data set's files: of a kind that holds images, and no file but its own."""
    try:
        builder = _builder(origin, config, cache)
    except ValueError:
        if not config.files:
            _explain_config(query, origin)
        raise
    if not isinstance(builder, BUILDERS):
        held = type(builder).__module__.rsplit(".", maxsplit=1)[-1]
        raise AcquisitionError(
            f"dataset {query.dataset!r} holds files of kind {held!r}, which hold no labelled images: "
            f"give parquet, arrow, tar or image files; {BY_TABLE}"
        )
    for files in (builder.config.data_files or {}).values():
        check_files(origin, files)
    return builder


def _local_folder(query: DataQuery, progress: Progress) -> Path | None:
    """Return the folder that a query means, prepared where it is a reference; None where it means a Hub id."""
    if query.dataset == DIGITS:
        return reference_dataset(progress)
    if query.dataset.startswith(PREFIX):
        raise AcquisitionError(f"there is no reference data set {query.dataset!r}: use {DIGITS}")
    if not is_local(query.dataset):
        return None
    folder = local_folder(query.dataset, "dataset")
    _refuse_scripts(folder, query.dataset)
    return folder


def _refuse_offline(name: str) -> None:
    """Refuse a Hub id where the environment says to make no connection, to `datasets` or to the Hub's client."""
    if constants.HF_HUB_OFFLINE or datasets_config.HF_HUB_OFFLINE:
        raise AcquisitionError(
            f"dataset {name!r} is no local folder, and HF_HUB_OFFLINE or HF_DATASETS_OFFLINE says to make no connection, "
            "so that the Hub can't be reached: give a local folder, or unset it"
        )
