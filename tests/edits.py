"""Edits of a saved model whose hashes are computed anew: what a stranger's folder may hold that vouches for itself."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from profiling_agent.errors import ArtifactError
from profiling_agent.files import file_sha256

Edit = Callable[[Path], None]


def rehash(folder: Path) -> None:
    """Make the recipe vouch for the files as they are now."""
    path = folder / "recipe.json"
    recipe = json.loads(path.read_text())
    recipe["files"] = {name: file_sha256(folder / name) for name in recipe["files"] if (folder / name).is_file()}
    path.write_text(json.dumps(recipe))


def edited(source: Path, folder: Path, *done: Edit) -> Path:
    """Copy a saved model to `folder`, edit it, and have the recipe vouch for what came of it."""
    shutil.copytree(source, folder)
    for edit in done:
        edit(folder)
    rehash(folder)
    return folder


def refuses(load: Callable[[Path], object], folder: Path, words: str = ".") -> None:
    """Hold that a folder is refused in one line that a terminal shows as it reads."""
    with pytest.raises(ArtifactError, match=words) as caught:
        load(folder)
    assert "\n" not in str(caught.value)
    assert str(caught.value).isprintable()


def recipe(**fields: Any) -> Edit:
    def do(folder: Path) -> None:
        path = folder / "recipe.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return do


def config(**fields: Any) -> Edit:
    def do(folder: Path) -> None:
        path = folder / "recipe.json"
        held = json.loads(path.read_text())
        held["config"] |= fields
        path.write_text(json.dumps(held))

    return do


def processor(**fields: Any) -> Edit:
    def do(folder: Path) -> None:
        path = folder / "preprocessor_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | fields))

    return do


def tensors(name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Edit:
    """Change one tensor of the weights, or drop it."""
    return _tensors("weights.safetensors", name, change)


def golden(name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Edit:
    return _tensors("golden.safetensors", name, change)


def _tensors(file: str, name: str, change: Callable[[np.ndarray], np.ndarray | None]) -> Edit:
    def do(folder: Path) -> None:
        held = load_file(folder / file)
        made = change(held.pop(name))
        save_file(held if made is None else held | {name: np.ascontiguousarray(made)}, folder / file)

    return do


def bytes_of(file: str, change: Callable[[bytes], bytes]) -> Edit:
    def do(folder: Path) -> None:
        (folder / file).write_bytes(change((folder / file).read_bytes()))

    return do


def folder_at(file: str) -> Edit:
    def do(folder: Path) -> None:
        (folder / file).unlink()
        (folder / file).mkdir()

    return do
