"""Origin: the one place that a data set's files come from, its folder or its repository at one commit.

`datasets` opens what a card, a table or an archive names: any path, any address, chains of both. So whatever names a file is
read here before `datasets` sees it, what leads elsewhere is refused untouched, and images that a table names are opened here
alone.
"""

import lzma
import os
import stat
import zipfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import IO, Any, Protocol

import yaml
from huggingface_hub import DatasetCard, HfFileSystem, hf_hub_download
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from profiling_agent.acquisition.hub import files_root
from profiling_agent.acquisition.images import MAX_ENCODED
from profiling_agent.documents import MAX_QUOTED, DocumentError, read_json
from profiling_agent.errors import AcquisitionError
from profiling_agent.files import FileRefusedError, inside, open_regular, read_text

CARD, STANDALONE, INFOS = "README.md", ".huggingface.yaml", "dataset_infos.json"
# The cards of data sets with a thousand class names and dozens of configs have about 2 MB.
MAX_CARD = 4 * 2**20
# Names, values and brackets: as written, since `datasets` parses a card some four times at 30,000 a second; and with its
# aliases followed, since a few lines of aliases of aliases say more than a memory holds.
MAX_SAID = 150_000
MAX_CLASSES = 100_000
ZIP = "zip://"
BROKEN_ARCHIVE = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    NotImplementedError,
    RuntimeError,
    ValueError,
)
# What a path that `datasets` is given may not hold: it would be read as a pattern, as a chain or as an address.
PATTERN = frozenset("*?[]")


class Origin(Protocol):
    """Where a data set's files are, each by its name below it."""

    @property
    def name(self) -> str:
        """Return the data set's name, as it was asked for."""
        ...

    def files(self) -> Iterable[str]:
        """Return the names of its files; AcquisitionError where there is something else that could be read as one."""
        ...

    def text(self, file: str) -> str:
        """Return what a card says; OSError where it can't be read, UnicodeDecodeError where it is no text."""
        ...

    def open(self, file: str) -> IO[bytes]:
        """Open a file; OSError where it can't be."""
        ...

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return how the names begin that `datasets` gives to its files."""
        ...

    def file_at(self, location: str) -> str | None:
        """Return the file that a table or a card means; None where it isn't one of its own."""
        ...


@dataclass(frozen=True, slots=True)
class Folder:
    """A data set's folder on this machine; no link in it leads out of it."""

    name: str
    folder: Path

    @property
    def root(self) -> Path:
        """Return the folder that links may stay in."""
        return files_root(self.folder)

    def files(self) -> Iterator[str]:
        """Yield the name of each file, hidden ones aside: `datasets` leaves these alone, and so do its patterns here."""
        waiting = [self.folder]
        while waiting:
            with os.scandir(waiting.pop()) as entries:
                for entry in entries:
                    path = Path(entry.path)
                    if entry.name.startswith("."):
                        continue
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(path)
                    elif self._is_file(entry):
                        yield path.relative_to(self.folder).as_posix()

    def _is_file(self, entry: os.DirEntry[str]) -> bool:
        """Say whether an entry is a file, or a link to one below the root."""
        path = Path(entry.path)
        if entry.is_symlink():
            try:
                path = inside(path, self.root)
            except FileRefusedError as error:
                raise _refusal(
                    self.name, f"has a link, {_quoted(entry.name)}, and {error.strerror}: copy what it means"
                ) from error
            # What leads nowhere is no file, and `datasets` follows no link to a folder.
            if not path.exists() or path.is_dir():
                return False
        if not stat.S_ISREG(path.stat().st_mode):
            raise _refusal(self.name, f"has a device, a FIFO or a socket, {_quoted(entry.name)}: remove it")
        return True

    def text(self, file: str) -> str:
        """Return it from below the root."""
        return read_text(self.folder / file, max_bytes=MAX_CARD, under=self.root)

    def open(self, file: str) -> IO[bytes]:
        """Open it, if it is a regular file below the root."""
        return open_regular(self.folder / file, max_bytes=None, under=self.root)

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return the folder's path as it was given, and with its links followed."""
        return tuple(f"{folder.as_posix().rstrip('/')}/" for folder in (self.folder, self.folder.resolve()))

    def file_at(self, location: str) -> str | None:
        """Return what a path, absolute or from the folder, leads to."""
        if not _is_plain(location):
            return None
        try:
            inside(self.folder / location, self.root)
        except FileRefusedError:
            return None
        return location


@dataclass(frozen=True, slots=True)
class Repository:
    """A data set's repository on the Hub, at one commit, with the names of its files."""

    name: str
    commit: str
    listed: tuple[str, ...]
    is_parquet_copy: bool = False

    @property
    def prefixes(self) -> tuple[str, ...]:
        """Return its address at this commit."""
        return (f"hf://datasets/{self.name}@{self.commit}/",)

    def files(self) -> Iterable[str]:
        """Return all of them, hidden ones too."""
        return self.listed

    def text(self, file: str) -> str:
        """Return it from the Hub's cache, where `datasets` looks as well."""
        path = hf_hub_download(self.name, file, repo_type="dataset", revision=self.commit)
        return read_text(Path(path), max_bytes=MAX_CARD)

    def open(self, file: str) -> IO[bytes]:
        """Open it for reading in parts."""
        stream: Any = HfFileSystem().open(f"datasets/{self.name}@{self.commit}/{file}", "rb")
        return stream

    def file_at(self, location: str) -> str | None:
        """Return what an address at this commit, or a path from the repository's root, leads to."""
        file = location.removeprefix(*self.prefixes)
        parts = PurePosixPath(file).parts
        return file if _is_plain(file) and ".." not in parts and not file.startswith("/") else None


def check_origin(origin: Origin) -> bool:
    """Refuse a data set of which a file's name, an archive's or its card's words would have `datasets` open something else.

    Returns:
        Whether its card says which of its files belong together.

    Raises:
        AcquisitionError: which of them, or a card that can't be read.
        OSError: a file can't be read.
    """
    files = list(origin.files())
    for file in files:
        if not _is_plain(file):
            raise _refusal(
                origin.name, f"has a file {_quoted(file)}, whose name would be read as an address: rename it"
            )
    # A folder's hidden files are not among its files.
    cards = (
        [*files, STANDALONE] if isinstance(origin, Folder) and os.path.lexists(origin.folder / STANDALONE) else files
    )
    named = [_check_card(origin, file) for file in (CARD, STANDALONE) if file in cards]
    for file in files:
        if file.lower().endswith(".zip"):
            _check_archive(origin, file)
    return any(named)


def check_folder(origin: Folder) -> None:
    """Refuse a folder whose path `datasets` would take for something else, or that doesn't tell what it holds."""
    path = str(origin.folder.resolve())
    if not _is_plain(path) or PATTERN & set(path):
        raise _refusal(
            origin.name, "lies in a folder with one of * ? [ ] or :: in its path, which is no plain path: rename it"
        )
    if os.path.lexists(origin.folder / INFOS):
        _read_json(origin, INFOS)


def check_saved(origin: Folder, folder: Path | None = None) -> None:
    """Refuse what `save_to_disk` would have written where it names a file that isn't beside it."""
    folder = folder or origin.folder
    below = folder.relative_to(origin.folder).as_posix()
    if (folder / "dataset_dict.json").is_file():
        for split in _strings(_member(_read_json(origin, f"{below}/dataset_dict.json"), "splits")):
            if not _is_name(split):
                raise _refusal(origin.name, f"has a split {_quoted(split)}, which is no name of a folder in it")
            if folder == origin.folder:
                check_saved(origin, folder / split)
    elif (folder / "state.json").is_file():
        _read_json(origin, f"{below}/dataset_info.json")
        state = _read_json(origin, f"{below}/state.json")
        for file in _strings([_member(state, "_data_files"), _member(state, "_indices_data_files")]):
            if not _is_name(file):
                raise _refusal(origin.name, f"names a file {_quoted(file)}, which is none beside its state.json")


def check_files(origin: Origin, files: Iterable[Any]) -> None:
    """Refuse files that `datasets` found elsewhere than in the data set."""
    prefixes = origin.prefixes
    for file in map(str, files):
        prefix = next((prefix for prefix in prefixes if file.startswith(prefix)), None)
        if prefix is None or not _is_plain(file.removeprefix(prefix)) or ".." in PurePosixPath(file).parts:
            raise _outside(origin.name, file)


@dataclass(frozen=True, slots=True)
class Images:
    """The images that a data set's cells hold, or name."""

    origin: Origin

    def encoded(self, cells: Iterable[Any]) -> Iterator[bytes | None]:
        """Yield each image cell's bytes, at most one more than an image may have; None where there are none. An archive is opened once.

        Raises:
            AcquisitionError: one names a file that isn't the data set's.
            OSError: one names a file that can't be read.
        """
        with ExitStack() as opened:
            archives: dict[str, zipfile.ZipFile] = {}

            def archive(file: str) -> zipfile.ZipFile:
                if file not in archives:
                    stream = opened.enter_context(self.origin.open(file))
                    archives[file] = opened.enter_context(zipfile.ZipFile(stream))
                return archives[file]

            for cell in cells:
                yield self._encoded(cell, archive)

    def _encoded(self, cell: Any, archive: Callable[[str], zipfile.ZipFile]) -> bytes | None:
        held, location = (cell.get("bytes"), cell.get("path")) if isinstance(cell, dict) else (cell, None)
        if held is not None or not isinstance(location, str) or not location:
            return held if isinstance(held, bytes) else None
        if location.startswith(ZIP):
            member, _, packed = location.removeprefix(ZIP).rpartition("::")
            return _unpacked(archive, self._file(packed), member)
        with self.origin.open(self._file(location)) as stream:
            return stream.read(MAX_ENCODED + 1)

    def _file(self, location: str) -> str:
        if (file := self.origin.file_at(location)) is None:
            raise _outside(self.origin.name, location)
        return file


def _unpacked(archive: Callable[[str], zipfile.ZipFile], file: str, member: str) -> bytes | None:
    try:
        with archive(file).open(member) as stream:
            return stream.read(MAX_ENCODED + 1)
    except (*BROKEN_ARCHIVE, KeyError):
        return None


def _check_card(origin: Origin, file: str) -> bool:
    """Refuse a card that names data elsewhere, or says more than a card does; return whether it names configs."""
    try:
        text = origin.text(file)
        _check_length(origin, file, text)
        said: Any = DatasetCard(text).data.to_dict() if file == CARD else yaml.safe_load(text)
    # YAML that nests deeply, a card that is a list, words that `datasets` knows of another kind.
    except (OSError, UnicodeDecodeError) as error:
        raise _refusal(origin.name, f"has a {file} that can't be read ({_reason(error)})") from error
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, RecursionError) as error:
        raise _refusal(
            origin.name, f"has a {file} that is no card ({type(error).__name__}): repair it or remove it"
        ) from error
    _check_said(origin, file, said)
    configs = _member(said, "configs")
    for config in configs if isinstance(configs, list) else []:
        for pattern in _strings([_member(config, "data_files"), _member(config, "data_dir")]):
            if not is_below(pattern):
                raise _outside(origin.name, pattern, f"its {file}")
    return bool(configs)


def _check_length(origin: Origin, file: str, text: str) -> None:
    """Refuse a card of which the writing alone would take minutes to parse; libyaml is fifty times as fast as what does."""
    block = REGEX_YAML_BLOCK.search(text) if file == CARD else None
    written = text if file != CARD else block.group(2) if block else ""
    loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    for num_said, _ in enumerate(yaml.parse(written, loader)):
        if num_said > MAX_SAID:
            raise _says_too_much(origin, file)


def _says_too_much(origin: Origin, file: str) -> AcquisitionError:
    return _refusal(origin.name, f"has a {file} that says more than {MAX_SAID} things: repair it or remove it")


def _check_said(origin: Origin, file: str, said: Any) -> None:
    """Refuse a card that is endless, or that counts classes without end."""
    waiting, num_said = [said], 0
    while waiting:
        value, num_said = waiting.pop(), num_said + 1
        if num_said > MAX_SAID:
            raise _says_too_much(origin, file)
        if isinstance(value, dict):
            num_classes = value.get("num_classes")
            if isinstance(num_classes, int) and num_classes > MAX_CLASSES:
                raise _refusal(
                    origin.name, f"has a {file} with {num_classes} classes, {MAX_CLASSES} are read: repair it"
                )
            waiting += [*value, *value.values()]
        elif isinstance(value, list):
            waiting += value


def _check_archive(origin: Origin, file: str) -> None:
    try:
        with origin.open(file) as stream, zipfile.ZipFile(stream) as archive:
            odd = [name for name in archive.namelist() if not _is_plain(name)]
    except (OSError, *BROKEN_ARCHIVE) as error:
        raise _refusal(
            origin.name, f"has an archive {_quoted(file)} that can't be read ({type(error).__name__})"
        ) from error
    if odd:
        raise _refusal(
            origin.name, f"has an archive {_quoted(file)} with a file {_quoted(odd[0])}, whose name is an address"
        )


def _read_json(origin: Folder, file: str) -> Any:
    try:
        return read_json(origin.folder / file, under=origin.root)
    except (OSError, DocumentError) as error:
        raise _refusal(origin.name, f"has a {file} that can't be read ({_reason(error)})") from error


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)


def _member(value: Any, key: str) -> Any:
    return value.get(key) if isinstance(value, dict) else None


def _strings(value: Any) -> Iterator[str]:
    """Yield every text that a value holds."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict):
        for each in value.items():
            yield from _strings(list(each))
    elif isinstance(value, list):
        for each in value:
            yield from _strings(each)


def _is_plain(path: str) -> bool:
    """Say whether a path is one to `datasets` too, and no address nor a chain of them."""
    return "::" not in path and "://" not in path and "\0" not in path


def is_below(pattern: str) -> bool:
    """Say whether a pattern stays below the data set, and out of hidden folders."""
    parts = PurePosixPath(pattern).parts
    return (
        ":" not in pattern
        and not pattern.startswith(("/", "~", "\\"))
        and not any(part.startswith(".") and part != "." for part in parts)
    )


def _is_name(name: str) -> bool:
    return _is_plain(name) and "/" not in name and name not in ("", ".", "..")


def _quoted(text: str) -> str:
    return repr(text[:MAX_QUOTED])


def _refusal(name: str, what: str) -> AcquisitionError:
    return AcquisitionError(f"dataset {name!r} {what}")


def _outside(name: str, location: str, who: str = "it") -> AcquisitionError:
    return _refusal(
        name,
        f"can't be read: {who} names {_quoted(location)}, which is not in it, and nothing else is opened: "
        "copy the data into it, or give the images' bytes in the table",
    )
