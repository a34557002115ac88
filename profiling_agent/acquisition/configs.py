"""Configs: which of several data sets that lie side by side in one folder or repository is read.

Where a card names configs, `datasets` goes by it. Where none does, it reads into a split every folder that names that split
somewhere below: of a data set that is there in three sizes, each photograph three times, some copies of it to be searched on
and others held out. And where folders aren't named or nested as it expects, it leaves out splits or labels without a word:
what is wrong is found here.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from profiling_agent.acquisition.origin import PATTERN, is_below
from profiling_agent.documents import clean
from profiling_agent.errors import AcquisitionError

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
WORDS = tuple(SPLIT_OF)
SPLIT = re.compile(rf"(?:^|[-._ 0-9])(?:{'|'.join(WORDS)})(?:$|[-._ 0-9])")
# The name of a photograph says nothing of its split: its folder is its class.
TABLES = frozenset({".parquet", ".arrow", ".csv", ".tsv", ".json", ".jsonl", ".tar", ".zip"})
# The Hub copies the first gigabytes of a large split alone, and says so by its folder's name.
PARTIAL = "partial-"
# A file's own name is at the end of its path.
MAX_PATH = 200
NUM_MISNAMED = 3


@dataclass(frozen=True, slots=True)
class Config:
    """What `datasets` is asked for: a card's config by its name, or files; and what of it a reader should know."""

    name: str | None = None
    files: Mapping[str, Any] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def check_config(dataset: str, asked: str | None, names: Collection[str]) -> None:
    """Refuse a config that a data set with these doesn't have, and none where there are several.

    Raises:
        AcquisitionError: it names them.
    """
    listed = ", ".join(map(clean, names))
    if len(names) > 1 and asked is None:
        raise AcquisitionError(f"dataset {dataset!r} has several configs, {listed}: name one with dataset_config")
    if asked not in (None, *names):
        raise AcquisitionError(f"dataset {dataset!r} has no config {asked!r}: use one of {listed}")


def parquet_copy(dataset: str, asked: str | None, files: Iterable[str]) -> Config | None:
    """Return which config to read of the Hub's parquet copy, CONFIG/SPLIT/*.parquet; None where that isn't what it holds.

    Raises:
        AcquisitionError: there are several and none was asked for, or one that isn't there.
    """
    folders = sorted({PurePosixPath(file).parts[:-1] for file in files if file.endswith(".parquet")})
    configs: dict[str, list[str]] = {}
    for config, folder in (parts for parts in folders if len(parts) == 2 and is_below("/".join(parts))):
        configs.setdefault(config, []).append(folder)
    if not configs:
        return None
    check_config(dataset, asked, configs)
    config = asked or next(iter(configs))
    splits = {folder.removeprefix(PARTIAL): folder for folder in configs[config]}
    return Config(
        files={"data_files": {split: f"{config}/{folder}/*.parquet" for split, folder in splits.items()}},
        notes=tuple(
            f"of split {split!r} only the first part is read: the Hub copied no more of it"
            for split, folder in splits.items()
            if folder != split
        ),
    )


def beside_others(dataset: str, asked: str | None, files: Mapping[str, Iterable[str]]) -> Config | None:
    """Return which folder to read of a data set without a card, whose splits would be of these files; None where it is one.

    Raises:
        AcquisitionError: several lie side by side and none was asked for, or one that isn't there, or that has another inside.
    """
    above = [{folder for file in names if (folder := _above_split(file)) is not None} for names in files.values()]
    folders = sorted({folder for found in above if len(found) > 1 for folder in found})
    if not folders:
        return None
    # What has another inside would be read with it.
    outer = [
        one for one in folders if any(other.startswith(f"{one}/" if one else "") for other in folders if other != one)
    ]
    inner = [folder for folder in folders if folder not in outer]
    if outer and asked not in inner:
        listed, at = ", ".join(map(clean, inner)), clean(outer[0]) or "the top"
        raise AcquisitionError(
            f"dataset {dataset!r} has splits at {at} and others inside of it, which would be read as one: name one of {listed} with "
            "dataset_config, or move them out"
        )
    check_config(dataset, asked, inner)
    return Config(files={"data_dir": asked})


def each_once(files: Mapping[str, Sequence[str]]) -> Config | None:
    """Return what to read of images of which some would be read into two splits, as where a class is called train.

    Each is left to the split that its outermost folder names. None where none is read twice, or such a folder names two splits.
    """
    splits: dict[str, set[str]] = {}
    for split, names in files.items():
        for name in names:
            splits.setdefault(name, set()).add(split)
    if all(len(found) == 1 for found in splits.values()):
        return None
    patterns: dict[str, set[str]] = {}
    for name in splits:
        depth, parts = _depth_of_split(name), PurePosixPath(name).parts
        if depth is None or len(parts) == depth + 1:
            return None
        folder = "/".join(parts[: depth + 1])
        meant = {SPLIT_OF[word] for word in re.split(r"[-._ 0-9]", parts[depth]) if word in SPLIT_OF}
        if len(meant) != 1 or PATTERN & set(folder):
            return None
        patterns.setdefault(meant.pop(), set()).add(f"{folder}/**")
    return Config(files={"data_files": {split: sorted(found) for split, found in patterns.items()}})


def _depth_of_split(file: str) -> int | None:
    """Return how deep the first folder or table lies that names a split; None where none does."""
    path = PurePosixPath(file)
    is_table = not TABLES.isdisjoint(path.suffixes)
    named = path.parts if is_table else path.parts[:-1]
    return next((depth for depth, part in enumerate(named) if SPLIT.search(part)), None)


def _above_split(file: str) -> str | None:
    """Return the folder, the top as nothing, in which a folder or a table names a split; None where none does."""
    depth = _depth_of_split(file)
    return None if depth is None else "/".join(PurePosixPath(file).parts[:depth])


def misnamed_splits(files: Iterable[str], splits: Collection[str]) -> tuple[str, ...]:
    """Return what to call the top folders that name a split but for their case, where they aren't among the splits."""
    tops = {PurePosixPath(file).parts[0] for file in files if "/" in file}
    found = sorted(top for top in tops if top.lower() in WORDS and top not in (*WORDS, *splits))
    return tuple(f"its folder {top!r} isn't read as a split: call it {top.lower()!r}" for top in found[:NUM_MISNAMED])


def odd_depth(images: Sequence[str]) -> str | None:
    """Return which image lies deeper or less deep than most, and what to do; None where all lie at one depth.

    `datasets` takes folders for labels only where all do, over all splits.
    """
    depths = Counter(image.count("/") for image in images)
    if len(depths) < 2:
        return None
    ((usual, num_usual),) = depths.most_common(1)
    one = next(image for image in images if image.count("/") == usual)
    odd = next(image for image in images if image.count("/") != usual)
    return (
        f"folders are labels only where all images lie equally deep, and {len(images) - num_usual} of {len(images)} don't lie "
        f"as deep as {quoted_path(one)}, the first is {quoted_path(odd)}: move it into its class's folder, or out of the "
        "data set"
    )


def quoted_path(path: str) -> str:
    """Return a file's path in quotes as it may be shown, of a long one the end."""
    shown = clean(path)
    return f"'{shown}'" if len(shown) <= MAX_PATH else f"'...{shown[-MAX_PATH:]}'"
