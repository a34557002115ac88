"""A saved model that was damaged, or that another version saved, is refused in one line that names the file."""

import json
import pickle
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import zoo
from deployments import resign
from safetensors.torch import load_file, save_file

from profiling_agent.errors import ArtifactError
from profiling_agent.runtimes.torch_artifact import load_module, load_recipe, save_model


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def link_out(path: Path) -> None:
    path.rename(path.parents[1] / path.name)
    path.symlink_to(path.parents[1] / path.name)


@pytest.mark.parametrize(
    ("name", "damage", "verify", "says"),
    [
        ("weights.safetensors", flip_a_byte, True, "sha256 differs"),
        ("golden.safetensors", cut_short, True, "sha256 differs"),
        ("weights.safetensors", Path.unlink, False, "is missing"),
        ("weights.safetensors", cut_short, False, "is damaged"),
        ("recipe.json", cut_short, False, "is damaged"),
        ("preprocessor_config.json", link_out, False, "leads out of"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, name: str, damage: Callable[[Path], None], verify: bool, says: str):
    damage(folder / name)

    with pytest.raises(ArtifactError, match=rf"{re.escape(name)}.*{says}"):
        load_module(folder, verify=verify)


def test_other_files_are_ignored_and_a_folder_and_the_hubs_cache_load_through_links(folder: Path):
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    (folder.parent / "best").symlink_to("model", target_is_directory=True)
    load_module(folder.parent / "best")

    snapshot = folder.parent / "models--me--x" / "snapshots" / "c0ffee"
    (snapshot.parents[1] / "blobs").mkdir(parents=True)
    snapshot.parent.mkdir()
    folder.rename(snapshot)
    (snapshot / "preprocessor_config.json").rename(snapshot.parents[1] / "blobs" / "1")
    (snapshot / "preprocessor_config.json").symlink_to("../../blobs/1")
    load_module(snapshot)


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("weights.bin", r"weights\.bin.* is none of"),
        *((name, "folder itself") for name in ("../a.json", "/etc/a.json", "sub/a.json", "..\\a.json")),
    ],
)
def test_a_file_outside_the_folder_or_of_a_format_with_code_is_refused(folder: Path, name: str, says: str):
    recipe = json.loads((folder / "recipe.json").read_text())
    (folder / "recipe.json").write_text(json.dumps(recipe | {"files": recipe["files"] | {name: "0" * 64}}))

    with pytest.raises(ArtifactError, match=says):
        load_module(folder)


def test_another_schema_version_and_an_ordinary_folder_are_refused(folder: Path):
    resign(folder, schema_version=99)

    with pytest.raises(ArtifactError, match="schema version 99"):
        load_recipe(folder)
    with pytest.raises(ArtifactError, match=r"recipe\.json"):
        load_module(zoo.save(zoo.vit(), folder.parent / "plain"))


def add(tensors: dict[str, torch.Tensor]) -> None:
    tensors["classifier.bias"] += 0.5


def rename(tensors: dict[str, torch.Tensor]) -> None:
    tensors["head.bias"] = tensors.pop("classifier.bias")


@pytest.mark.parametrize(
    ("change", "says"), [(add, "doesn't compute what it did"), (rename, "don't fit ViTForImageClassification")]
)
def test_weights_that_compute_something_else_are_refused_though_their_hash_fits(folder: Path, change, says: str):
    tensors = load_file(folder / "weights.safetensors")
    change(tensors)
    save_file(tensors, folder / "weights.safetensors")
    resign(folder)

    with pytest.raises(ArtifactError, match=says):
        load_module(folder)


def test_a_folder_that_exists_is_never_overwritten(folder: Path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    with pytest.raises(ArtifactError, match="exists already"):
        save_model(zoo.deit(), folder, spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
