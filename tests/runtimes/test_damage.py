"""A saved model that was damaged, or that another version saved, is refused in one line that names the file."""

import json
import pickle
from pathlib import Path

import pytest
import torch
import zoo
from safetensors.torch import load_file, save_file

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.io import file_sha256
from profiling_agent.runtimes.torch_artifact import load_module, load_recipe, save_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(zoo.vit(), tmp_path / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    return tmp_path / "model"


def rewrite_recipe(folder: Path, **fields: object) -> None:
    path = folder / "recipe.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def rehash(folder: Path) -> None:
    """Make the recipe vouch for the files as they are now."""
    names = json.loads((folder / "recipe.json").read_text())["files"]
    rewrite_recipe(folder, files={name: file_sha256(folder / name) for name in names})


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[-3] ^= 0x10
    path.write_bytes(data)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def change_a_number(path: Path) -> None:
    path.write_text(path.read_text().replace("4", "8", 1))


@pytest.mark.parametrize("damage", [flip_a_byte, cut_short])
@pytest.mark.parametrize("name", ["weights.safetensors", "golden.safetensors"])
def test_damaged_tensors_are_named(folder: Path, name: str, damage):
    damage(folder / name)

    with pytest.raises(ArtifactError, match=name):
        load_module(folder)


def test_a_changed_config_is_named(folder: Path):
    change_a_number(folder / "preprocessor_config.json")

    with pytest.raises(ArtifactError, match=r"preprocessor_config\.json"):
        load_module(folder)


def test_a_missing_file_is_named_even_without_verification(folder: Path):
    (folder / "weights.safetensors").unlink()

    with pytest.raises(ArtifactError, match=r"weights\.safetensors.*missing"):
        load_module(folder, verify=False)


def test_truncated_weights_are_refused_even_without_verification(folder: Path):
    cut_short(folder / "weights.safetensors")

    with pytest.raises(ArtifactError, match=r"weights\.safetensors.*damaged"):
        load_module(folder, verify=False)


def test_files_beside_the_saved_ones_are_ignored_and_the_hubs_cache_loads_through_its_links(folder: Path):
    (folder / ".gitattributes").write_text("*.safetensors filter=lfs")
    (folder / "pytorch_model.bin").write_bytes(pickle.dumps({}))
    load_module(folder)

    snapshot = folder.parent / "models--me--x" / "snapshots" / "c0ffee"
    (snapshot.parents[1] / "blobs").mkdir(parents=True)
    snapshot.parent.mkdir()
    folder.rename(snapshot)
    (snapshot / "preprocessor_config.json").rename(snapshot.parents[1] / "blobs" / "1")
    (snapshot / "preprocessor_config.json").symlink_to("../../blobs/1")
    load_module(snapshot)


def test_a_pickle_is_refused_even_if_the_recipe_lists_it(folder: Path):
    (folder / "weights.bin").write_bytes(pickle.dumps({}))
    files = load_recipe_files(folder) | {"weights.bin": file_sha256(folder / "weights.bin")}
    rewrite_recipe(folder, files=files)

    with pytest.raises(ArtifactError, match=r"weights\.bin"):
        load_module(folder)


def load_recipe_files(folder: Path) -> dict[str, str]:
    return json.loads((folder / "recipe.json").read_text())["files"]


@pytest.mark.parametrize("name", ["../outside.json", "/etc/hosts.json", "sub/inside.json", "..\\outside.json"])
def test_a_file_outside_the_folder_is_refused(folder: Path, name: str):
    rewrite_recipe(folder, files=load_recipe_files(folder) | {name: "0" * 64})

    with pytest.raises(ArtifactError, match="folder itself"):
        load_module(folder)


def test_a_link_that_leads_out_of_the_folder_is_refused(folder: Path):
    elsewhere = folder.parent / "preprocessor_config.json"
    (folder / "preprocessor_config.json").rename(elsewhere)
    (folder / "preprocessor_config.json").symlink_to(elsewhere)

    for verify in (True, False):
        with pytest.raises(ArtifactError, match=r"preprocessor_config\.json.*leads out of"):
            load_module(folder, verify=verify)


def test_the_folder_itself_may_be_reached_by_a_link(folder: Path):
    best = folder.parent / "best"
    best.symlink_to("model", target_is_directory=True)

    reached, known = zoo.inside(load_module(best)), zoo.inside(load_module(folder))
    assert torch.equal(reached.classifier.weight, known.classifier.weight)


def test_another_schema_version_is_refused(folder: Path):
    rewrite_recipe(folder, schema_version=99)

    with pytest.raises(ArtifactError, match="schema version 99"):
        load_recipe(folder)


def test_a_recipe_that_is_no_json_is_refused(folder: Path):
    cut_short(folder / "recipe.json")

    with pytest.raises(ArtifactError, match=r"recipe\.json.*damaged"):
        load_recipe(folder)


def test_an_ordinary_folder_is_no_saved_model(tmp_path: Path):
    with pytest.raises(ArtifactError, match=r"recipe\.json"):
        load_module(zoo.save(zoo.vit(), tmp_path / "plain"))


def test_weights_that_compute_something_else_are_refused_though_their_hash_fits(folder: Path):
    tensors = load_file(folder / "weights.safetensors")
    tensors["classifier.bias"] += 0.5
    save_file(tensors, folder / "weights.safetensors")
    rehash(folder)

    with pytest.raises(ArtifactError, match="doesn't compute what it did"):
        load_module(folder)


def test_weights_with_other_names_than_the_installed_librarys_are_refused(folder: Path):
    tensors = load_file(folder / "weights.safetensors")
    tensors["head.bias"] = tensors.pop("classifier.bias")
    save_file(tensors, folder / "weights.safetensors")
    rehash(folder)

    with pytest.raises(ArtifactError, match="don't fit ViTForImageClassification"):
        load_module(folder)


def test_a_folder_that_exists_is_never_overwritten(folder: Path):
    before = {path.name: path.read_bytes() for path in folder.iterdir()}

    with pytest.raises(ArtifactError, match="exists already"):
        save_model(zoo.deit(), folder, spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")

    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before


class FailingProcessor:
    def save_pretrained(self, folder: Path) -> None:
        raise OSError("no space left on device")


def test_a_save_that_fails_leaves_nothing_behind(tmp_path: Path):
    with pytest.raises(OSError, match="no space"):
        save_model(zoo.vit(), tmp_path / "model", spec=zoo.SPEC, processor=FailingProcessor(), base_model="zoo")

    assert list(tmp_path.iterdir()) == []
