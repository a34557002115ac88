"""Data sets: labelled images, of Hub ids as streams, of local folders as they lie on disk."""

import itertools
from collections.abc import Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
from datasets.exceptions import DatasetsError
from datasets.packaged_modules.parquet.parquet import Parquet
from pydantic import Field

from profiling_agent.acquisition.hub import hub_errors, is_local, local_folder, resolve_dataset
from profiling_agent.acquisition.reference import DIGITS, PREFIX, reference_dataset
from profiling_agent.errors import AcquisitionError
from profiling_agent.progress import Progress
from profiling_agent.records import Record

READ_ERRORS = (OSError, ValueError, RuntimeError, NotImplementedError, pa.ArrowException, DatasetsError)
BATCH_ROWS = 2048
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

    `cache` is a temporary folder for what `datasets` insists on writing of a local folder; None for the Hub.
    """

    query: DataQuery
    path: str
    revision: str | None
    cache: Path | None
    splits: Mapping[str, Any]
    is_parquet: bool

    @property
    def is_local(self) -> bool:
        """Say whether rows cost no download."""
        return self.cache is not None

    def features(self, split: str) -> Mapping[str, Any]:
        """Return the columns of a split and their types."""
        return self.splits[split].features or {}

    def tables(self, split: str, columns: list[str]) -> Iterator[Any]:
        """Yield a split's rows in file order as Arrow tables; of parquet, no other column is read."""
        with reading(self.query.dataset):
            if self.is_parquet:
                builder = _builder(self.query, self.path, self.revision, self.cache, columns=columns)
                view: Any = builder.as_streaming_dataset(split=split)
            else:
                view = self.splits[split].select_columns(columns)
            yield from view.with_format("arrow").iter(batch_size=BATCH_ROWS)

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
    try:
        with hub_errors("dataset", name, None):
            yield
    except READ_ERRORS as error:
        reason = str(error).strip().split("\n", maxsplit=1)[0][:200]
        raise AcquisitionError(f"dataset {name!r} can't be read ({type(error).__name__}): {reason}") from error


def _builder(query: DataQuery, path: str, revision: str | None, cache: Path | None, **options: Any) -> Any:
    return datasets.load_dataset_builder(
        path,
        query.dataset_config,
        revision=revision,
        cache_dir=None if cache is None else str(cache),
        **options,
    )


def _refuse_scripts(folder: Path, name: str) -> None:
    """Refuse a folder whose data only a Python script could make."""
    scripts = sorted(path.name for path in folder.glob("*.py"))
    if f"{folder.name}.py" in scripts or (scripts and not any(path.suffix != ".py" for path in folder.iterdir())):
        raise AcquisitionError(
            f"dataset {name!r} needs a Python script ({scripts[0]!r}), which is never run: "
            "give a folder of parquet, arrow or image files"
        )


def _from_disk(folder: Path, name: str) -> Mapping[str, Any] | None:
    """Return the splits of a folder that `save_to_disk` wrote; they are mapped, not read."""
    if not any((folder / marker).is_file() for marker in ("dataset_dict.json", "state.json")):
        return None
    with reading(name):
        loaded: Any = datasets.load_from_disk(str(folder))
    if isinstance(loaded, datasets.DatasetDict):
        return {str(split): rows for split, rows in loaded.items()}
    return {str(loaded.split or "train"): loaded}


def _explain_config(query: DataQuery, path: str, revision: str | None) -> None:
    """Raise the error that lists the configs, where the lack or the name of one was what went wrong."""
    with reading(query.dataset):
        configs = datasets.get_dataset_config_names(path, revision=revision)
    if len(configs) > 1 and query.dataset_config is None:
        raise AcquisitionError(
            f"dataset {query.dataset!r} has several configs, {', '.join(configs)}: name one with dataset_config"
        )
    if query.dataset_config not in (None, *configs):
        raise AcquisitionError(
            f"dataset {query.dataset!r} has no config {query.dataset_config!r}: use one of {', '.join(configs)}"
        )


def open_data(query: DataQuery, *, cache: Path, progress: Progress) -> OpenedData:
    """Return the data set that `query` names: reference:digits, a local folder, or a Hub id to be streamed.

    Raises:
        AcquisitionError: it does not exist, is gated, needs a script, has several configs and none was named, or
            can't be read.
    """
    path, revision, kept = query.dataset, None, None
    if query.dataset == DIGITS:
        path, kept = str(reference_dataset(progress)), cache
    elif query.dataset.startswith(PREFIX):
        raise AcquisitionError(f"there is no reference data set {query.dataset!r}: use {DIGITS}")
    elif is_local(query.dataset):
        folder = local_folder(query.dataset, "dataset")
        _refuse_scripts(folder, query.dataset)
        path, kept = str(folder), cache
    else:
        progress(f"looking up {query.dataset}", 0, 0)
        revision = resolve_dataset(query.dataset, query.dataset_revision)
    if kept and (splits := _from_disk(Path(path), query.dataset)):
        return OpenedData(query=query, path=path, revision=None, cache=kept, splits=splits, is_parquet=False)
    with reading(query.dataset):
        try:
            builder = _builder(query, path, revision, kept)
        except ValueError:
            _explain_config(query, path, revision)
            raise
        splits = builder.as_streaming_dataset()
    return OpenedData(
        query=query,
        path=path,
        revision=revision,
        cache=kept,
        splits=splits,
        is_parquet=isinstance(builder, Parquet),
    )
