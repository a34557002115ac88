"""Model folder: what transformers gets to see of one, checked: its settings as they were read, and links to its weights.

Whatever else lies there (code, adapters that name another model, pickles) isn't in the folder that transformers opens, and
what is there is a regular file of the model's own.
"""

import json
import tempfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from profiling_agent.acquisition.hub import files_root
from profiling_agent.documents import MAX_QUOTED, DocumentError, clean, parse_json
from profiling_agent.errors import AcquisitionError
from profiling_agent.files import inside, open_regular, read_bytes, write_bytes
from profiling_agent.timm_config import check_names, check_timm, is_timm, settled

CONFIG, WEIGHTS, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
PROCESSORS = ("preprocessor_config.json", "processor_config.json")
PICKLES = (".bin", ".pt", ".pth", ".pkl", ".ckpt")
# What a clone without Git LFS holds in the place of a large file.
LFS = b"version https://git-lfs"
# The configuration of an ImageNet-21k model has 2 MB, most of it names of classes.
MAX_SETTINGS = 16 * 2**20
# Nothing in a classifier of images is counted so far; modules, lists and images of that size are built before weights are.
MAX_COUNT, MAX_CLASSES, MAX_LAYERS, MAX_SIDE = 10_000_000, 100_000, 2000, 8192


@contextmanager
def checked(folder: Path, name: str) -> Generator[Path]:
    """Give a folder with a model's settings and links to its weights alone; it is gone when the block ends.

    Raises:
        AcquisitionError: a file is missing, is none of the model's own, or says what no image classifier's would.
    """
    with tempfile.TemporaryDirectory(prefix="model-") as made:
        staged = Path(made)
        for file, check in ((CONFIG, _check_config), *((file, _check_processor) for file in PROCESSORS)):
            if (data := _read(folder, name, file)) is not None:
                said = _parsed(name, file, data)
                check(said, name, file)
                if file == CONFIG and is_timm(said):
                    data = _timms(said, name)
                write_bytes(staged / file, data)
        if not (staged / CONFIG).is_file():
            raise AcquisitionError(
                f"model {name!r} has no config.json: give an ordinary Hugging Face model folder or id"
            )
        for file in _weights(folder, name, staged):
            (staged / file).symlink_to(_own(folder, name, file))
        yield staged


def read_settings(folder: Path, name: str, file: str) -> Any:
    """Return what a model's JSON file says, None where it isn't there; AcquisitionError where it can't be read."""
    data = _read(folder, name, file)
    return None if data is None else _parsed(name, file, data)


def has_weights(folder: Path) -> bool:
    """Say whether there are weights of a kind that is loaded."""
    return any((folder / file).exists() for file in (WEIGHTS, INDEX))


def _read(folder: Path, name: str, file: str) -> bytes | None:
    try:
        return read_bytes(folder / file, max_bytes=MAX_SETTINGS, under=files_root(folder))
    except FileNotFoundError:
        return None
    except OSError as error:
        raise AcquisitionError(f"model {name!r} has a {file} that can't be read: {error.strerror or error}") from error


def _parsed(name: str, file: str, data: bytes) -> dict[str, Any]:
    try:
        said = parse_json(data)
    except DocumentError as error:
        raise AcquisitionError(f"model {name!r} has a {file} that is damaged: {error}") from error
    if not isinstance(said, dict):
        raise AcquisitionError(f"model {name!r} has a {file} that is damaged: it is no JSON object")
    return said


def _weights(folder: Path, name: str, staged: Path) -> Iterator[str]:
    """Yield the names of a model's weights; an index of several is read and staged."""
    if (folder / WEIGHTS).exists():
        yield WEIGHTS
        return
    if (data := _read(folder, name, INDEX)) is None:
        return
    shards = _parsed(name, INDEX, data).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise AcquisitionError(f"model {name!r} has a {INDEX} that is damaged: it maps no weights to files")
    for shard in {str(shard) for shard in shards.values()}:
        if "/" in shard or not shard.endswith(".safetensors"):
            raise AcquisitionError(
                f"model {name!r} has a {INDEX} that names {shard[:MAX_QUOTED]!r}, which is no safetensors file beside it"
            )
        yield shard
    write_bytes(staged / INDEX, data)


def _own(folder: Path, name: str, file: str) -> Path:
    """Return where a weights file really lies."""
    root = files_root(folder)
    try:
        with open_regular(folder / file, max_bytes=None, under=root) as stream:
            is_pointer = stream.read(len(LFS)) == LFS
        if is_pointer:
            raise AcquisitionError(
                f"model {name!r} has a {clean(file)} that only points to its weights (Git LFS): fetch them with `git lfs pull`"
            )
        return inside(folder / file, root)
    except OSError as error:
        raise AcquisitionError(
            f"model {name!r} has a {clean(file)} that can't be read: {error.strerror or error}"
        ) from error


def _numbers(value: Any, within: str = "") -> Iterator[tuple[str, float]]:
    """Yield every number that settings hold, with the names that lead to it."""
    if isinstance(value, dict):
        for key, each in value.items():
            yield from _numbers(each, f"{within}.{key}" if within else str(key))
    elif isinstance(value, list):
        for each in value:
            yield from _numbers(each, within)
    elif isinstance(value, int | float):
        yield within, value


def _check_config(config: dict[str, Any], name: str, file: str) -> None:
    if config.get("quantization_config") is not None:
        raise AcquisitionError(
            f"model {name!r} is quantized already (quantization_config): give the one it was made from"
        )
    for key, number in _numbers(config):
        *within, last = key.split(".")
        # A class may be called anything: ImageNet-21k has depth finders.
        if last in ("num_labels", "num_classes") or not {"label2id", "id2label"}.isdisjoint(within):
            limit = MAX_CLASSES
        elif "layers" in last or "depth" in last:
            limit = MAX_LAYERS
        else:
            limit = MAX_COUNT
        _check_number(name, file, key, number, limit)
    labels = config.get("id2label")
    if labels is not None and not isinstance(labels, dict):
        raise AcquisitionError(
            f'model {name!r} has a {file} whose id2label maps no numbers to names: give it as {{"0": "cat", "1": "dog"}}'
        )
    if labels and len(labels) > MAX_CLASSES:
        raise AcquisitionError(f"model {name!r} has a {file} with {len(labels)} classes, {MAX_CLASSES} are read")


def _timms(config: dict[str, Any], name: str) -> bytes:
    """Return the config of a timm model as transformers reads it, once it is known to ask for nothing that it doesn't get."""

    def refuse(said: str) -> AcquisitionError:
        return AcquisitionError(f"model {name!r} can't be built: {said}")

    config = settled(config)
    check_timm(config, refuse)
    check_names(config, refuse)
    return json.dumps(config).encode()


def _check_processor(settings: dict[str, Any], name: str, file: str) -> None:
    for key, number in _numbers(settings):
        _check_number(name, file, key, number, MAX_SIDE if "size" in key else MAX_COUNT)


def _check_number(name: str, file: str, key: str, number: float, limit: int) -> None:
    if abs(number) > limit:
        raise AcquisitionError(
            f"model {name!r} has a {file} with {clean(key)[:MAX_QUOTED]} = {number}, at most {limit} is taken: "
            "it is damaged, or no image classifier's"
        )
