"""The Hub's answers, from a server on the loopback that speaks enough of its protocol."""

import importlib.util
import json
import os
import shutil
import socket
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zoo

from profiling_agent.data.images import SplitImages
from profiling_agent.errors import AcquisitionError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
# Runs in a process of its own: the libraries read HF_ENDPOINT once, when they are imported.
ASK = """
import json, sys, tempfile
from pathlib import Path
import datasets.config
# By default 5 s at the end of each stream, for threads of parquet's reader.
datasets.config.SLEEP_TIME_ON_THREADS_SHUTDOWN = 0.5
from profiling_agent.data.models import load_model
from profiling_agent.data.dataset import DataQuery
from profiling_agent.data.splits import draw_splits
from profiling_agent.errors import AcquisitionError

def model(name, **options):
    return load_model(name, **options).revision

def data(dataset, **options):
    with tempfile.TemporaryDirectory() as folder:
        drawn = draw_splits(DataQuery(dataset=dataset, **options), id2label={0: "ant", 1: "bee"}, folder=Path(folder))
    sizes = [part.num_images for part in (drawn.calibration, drawn.search, drawn.heldout)]
    return {"sizes": sizes, "notes": drawn.notes}

answers = []
for kind, name, options in json.loads(sys.argv[1]):
    try:
        answers.append({"model": model, "data": data}[kind](name, **options))
    except AcquisitionError as error:
        answers.append(str(error))
print(json.dumps(answers))
"""


def load_sibling(name):
    spec = importlib.util.spec_from_file_location(name, Path(__file__).with_name(f"{name}.py"))
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def ask(endpoint, home, *questions, **settings):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **settings}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(questions)],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return json.loads(done.stdout)


def write_pictures(folder, png):
    for row in range(40):
        place = folder / "test" / ("ant", "bee")[row % 2] / f"{row}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(png(row))


def write_elsewhere(folder, table):
    """Write data sets that name another, `acme/insects`: in the card, in the cells."""
    for name in ("card", "cells"):
        (folder / name).mkdir()
        rows = table([0, 1] * 20, datasets.ClassLabel(names=["ant", "bee"]))
        if name == "cells":
            cells = [{"bytes": None, "path": "hf://datasets/acme/pictures@main/test/ant/0.png"}] * 40
            rows = rows.remove_columns("image").add_column("image", cells)
        rows.to_parquet(folder / name / "test.parquet")
    there = "hf://datasets/acme/insects/data/*.parquet"
    (folder / "card" / "README.md").write_text(f"---\nconfigs:\n- config_name: a\n  data_files: '{there}'\n---\n")


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return what a few questions were answered by a Hub that is there, and then by one that is gone."""
    root, home = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("home")
    for name in ("vit", "gated-vit", "pickle"):
        zoo.save(zoo.vit(), root / "models/acme" / name)
    (root / "models/acme/pickle/model.safetensors").rename(root / "models/acme/pickle/pytorch_model.bin")
    table = load_sibling("conftest").table
    for name in ("insects", "gated-imagenet"):
        (root / "datasets/acme" / name / "data").mkdir(parents=True)
        for split, first in (("train", 0), ("test", 1000)):
            rows = table(np.arange(400) % 2, datasets.ClassLabel(names=["ant", "bee"]), first=first)
            rows.to_parquet(root / "datasets/acme" / name / f"data/{split}-00000-of-00001.parquet")
    write_pictures(root / "datasets/acme/pictures", load_sibling("conftest").png)
    write_elsewhere(root / "datasets/acme", table)
    (root / "datasets/acme/scripted").mkdir()
    (root / "datasets/acme/scripted/scripted.py").write_text("raise SystemExit('ran')")
    v9, on_test = {"revision": "v9"}, {"split": "test"}
    online: dict[str, tuple[str, str, dict]] = {
        "model": ("model", "vit", {}),
        "gated model": ("model", "gated-vit", {}),
        "pickle": ("model", "pickle", {}),
        "no model": ("model", "nothing", {}),
        "no revision": ("model", "vit", v9),
        "gated data": ("data", "gated-imagenet", {}),
        "no data": ("data", "nothing", {}),
        "script": ("data", "scripted", {}),
        "no data revision": ("data", "insects", {"dataset_revision": "v9"}),
        "stream": ("data", "insects", {"num_samples": 30}),
        "no split": ("data", "insects", {"split": "dev"}),
        "pictures": ("data", "pictures", on_test),
        "card": ("data", "card", on_test),
        "cells": ("data", "cells", on_test),
    }
    offline: dict[str, tuple[str, str, dict]] = {
        "cached model": ("model", "vit", {}),
        "unreachable model": ("model", "other", {}),
        "unreachable data": ("data", "insects", {}),
        "cached pickle": ("model", "pickle", {}),
    }
    with load_sibling("hub_server").serve(root) as endpoint:
        there = ask(endpoint, home, *([kind, f"acme/{name}", query] for kind, name, query in online.values()))
    (home / "hub/models--acme--pickle/snapshots" / COMMIT / "pytorch_model.bin").touch()
    gone = ask(endpoint, home, *([kind, f"acme/{name}", query] for kind, name, query in offline.values()))
    return dict(zip([*online, *offline], [*there, *gone], strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "cached model"])
def test_a_model_comes_with_the_commit_that_was_read_and_the_next_time_without_the_network(answers, what):
    assert answers[what] == COMMIT


GATED = ("is gated: accept its terms at http://127.0.0.1", "HF_TOKEN", "hf auth login")
NOWHERE = ("'acme/nothing' is neither a local folder nor a public Hub id",)
UNREACHABLE = ("can't be reached", "check the network")
IS_PICKLE = ("only as pickle ('pytorch_model.bin')",)


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("gated model", GATED),
        ("gated data", GATED),
        ("no model", NOWHERE),
        ("no data", NOWHERE),
        ("no revision", ("has no revision 'v9'",)),
        ("no data revision", ("has no revision 'v9'",)),
        ("pickle", IS_PICKLE),
        ("cached pickle", IS_PICKLE),
        ("script", ("'scripted.py', which is never run, and the Hub has no parquet copy of it: give a local",)),
        ("no split", ("no split 'dev': use one of train, test",)),
        ("card", ("Data files don't belong to acme/card",)),
        ("cells", ("it names 'hf://datasets/acme/pictures@main/test/ant/0.png', which is not in it",)),
        ("unreachable model", UNREACHABLE),
        ("unreachable data", UNREACHABLE),
    ],
)
def test_what_can_not_be_had_is_told_with_what_to_do(answers, what, parts):
    assert all(part in answers[what] for part in parts)


# Rows of each size that the Hub's copy of acme/photos has photographs in, and the number of the first.
SIZES = {"160px": (40, 2000), "320px": (60, 3000)}


def write_copy(folder, table, rows, first, splits=("train", "validation")):
    """Write what the Hub's parquet copy has of one config: SPLIT/0000.parquet."""
    for index, split in enumerate(splits):
        (folder / split).mkdir(parents=True)
        kind = datasets.ClassLabel(names=["ant", "bee"])
        table(np.arange(rows) % 2, kind, first=first + 500 * index).to_parquet(folder / split / "0000.parquet")


@pytest.fixture(scope="module")
def copied(tmp_path_factory):
    """Return what was answered of data sets with a script by a Hub that has parquet copies of them."""
    root, server = tmp_path_factory.mktemp("copies"), load_sibling("hub_server")
    table = load_sibling("conftest").table
    for name in ("photos", "large"):
        (root / "datasets/acme" / name).mkdir(parents=True)
        (root / "datasets/acme" / name / f"{name}.py").write_text("raise SystemExit('ran')")
    for config, (rows, first) in SIZES.items():
        write_copy(root / "copies/acme/photos" / config, table, rows, first)
    write_copy(root / "copies/acme/large/default", table, 300, 5000, ("partial-train", "test"))
    shutil.copytree(root / "copies/acme/photos", root / "datasets/acme/cardless")
    there, pinned = {"dataset_revision": server.COPY}, {"dataset_revision": server.COPY_SHA}
    asked = {
        "none named": ("photos", {}),
        "named": ("photos", {"dataset_config": "320px"}),
        "no such": ("photos", {"dataset_config": "32px"}),
        "main": ("photos", {"dataset_config": "320px", "dataset_revision": "main"}),
        "another revision": ("photos", {"dataset_config": "320px", "dataset_revision": server.SHA}),
        "copy, none named": ("photos", there),
        "copy, named": ("photos", {"dataset_config": "160px", **there}),
        "copy's commit, none named": ("photos", pinned),
        "copy's commit, named": ("photos", {"dataset_config": "160px", **pinned}),
        "only one": ("large", {}),
        "cardless, none named": ("cardless", {}),
        "cardless, named": ("cardless", {"dataset_config": "320px"}),
    }
    with server.serve(root) as endpoint:
        said = ask(
            endpoint,
            tmp_path_factory.mktemp("home"),
            *(["data", f"acme/{name}", query] for name, query in asked.values()),
        )
    return dict(zip(asked, said, strict=True))


def sizes_of(config):
    helpers, (rows, first) = load_sibling("conftest"), SIZES[config]
    num_search, num_heldout = helpers.halves([helpers.png(first + 500 + row) for row in range(rows)])
    num_search = min(num_search, num_heldout)
    return [rows, num_search, min(4 * num_search, num_heldout)]


@pytest.mark.slow
@pytest.mark.parametrize("what", ["named", "main"])
def test_a_script_makes_way_for_the_hubs_parquet_copy_and_the_run_says_so(copied, what):
    assert copied[what]["sizes"] == sizes_of("320px")
    commit = load_sibling("hub_server").COPY_SHA
    said = f"images are read from the Hub's parquet copy, refs/convert/parquet at {commit}: 'photos.py' is never run"
    assert said in copied[what]["notes"]


@pytest.mark.parametrize(
    "what", ["none named", "copy, none named", "copy's commit, none named", "cardless, none named"]
)
def test_one_of_several_configs_has_to_be_named_where_no_card_names_them(copied, what):
    assert "has several configs, 160px, 320px: name one with dataset_config" in copied[what]


def test_a_config_that_the_copy_does_not_have_lists_those_it_has(copied):
    assert "has no config '32px': use one of 160px, 320px" in copied["no such"]


@pytest.mark.parametrize(
    ("what", "config"), [("copy, named", "160px"), ("copy's commit, named", "160px"), ("cardless, named", "320px")]
)
def test_a_named_config_is_read_alone(copied, what, config):
    assert copied[what]["sizes"] == sizes_of(config)
    assert not any("parquet copy" in note for note in copied[what]["notes"])


def test_a_copy_of_main_does_not_stand_for_another_revision(copied):
    commit = load_sibling("hub_server").SHA
    said = (
        f"is never run: leave out dataset_revision '{commit}' for the Hub's parquet copy of main, or give a local one"
    )
    assert said in copied["another revision"]


def test_an_only_config_needs_no_name_and_a_part_of_a_split_is_said_to_be_one(copied):
    assert copied["only one"]["sizes"][0] == 256
    assert "of split 'train' only the first part is read: the Hub copied no more of it" in copied["only one"]["notes"]


def test_a_stream_fills_its_quotas(answers):
    assert answers["stream"]["sizes"] == [256, 30, 120]
    assert answers["stream"]["notes"] == ["images were streamed and drawn in equal numbers per class"]


def test_pictures_in_a_repository_are_read_from_it(answers):
    helpers = load_sibling("conftest")
    num_search, num_heldout = helpers.halves([helpers.png(row) for row in range(40)])
    wanted = min(num_search - num_search // 2, num_heldout)
    assert answers["pictures"]["sizes"] == [num_search // 2, wanted, min(4 * wanted, num_heldout)]


@pytest.mark.slow
@pytest.mark.parametrize("setting", ["HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"])
def test_offline_makes_no_connection(tmp_path, setting):
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        here = f"127.0.0.1:{listener.getsockname()[1]}"
        (said,) = ask(f"http://{here}", tmp_path, ["data", "acme/insects", {}], **{setting: "1"})
        assert "can't be reached" in said
        assert setting in said
        with pytest.raises(BlockingIOError):
            listener.accept()


NAMES = ["cat", "dog"]
CLASSES = datasets.ClassLabel(names=NAMES)


@pytest.fixture
def private(tmp_path, make):
    """Return a picture outside of the data set."""
    path = tmp_path / "private" / "secret.png"
    path.parent.mkdir()
    path.write_bytes(make.png(999))
    return path


@pytest.fixture
def pictures(tmp_path, make):
    """Return a function that writes tables of images next to img/0.png; the first cell of the test split names a path."""
    folder = tmp_path / "set"
    (folder / "img").mkdir(parents=True)
    (folder / "img" / "0.png").write_bytes(make.png(0))

    def write(path, *, image=None):
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        for split, first in (("train", 100), ("test", 200)):
            named = {"bytes": image, "path": path} if split == "test" else {"bytes": make.png(first), "path": None}
            others = [{"bytes": make.png(first + row), "path": None} for row in range(1, 40)]
            cells = pa.array([named, *others], kind)
            pq.write_table(pa.table({"image": cells, "label": [0, 1] * 20}), folder / f"{split}.parquet")
        card = "dataset_info:\n  features:\n  - name: image\n    dtype: image\n  - name: label\n    dtype:\n      class_label:\n        names: [cat, dog]\n"
        split = "".join(f"  - split: {name}\n    path: {name}.parquet\n" for name in ("train", "test"))
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{split}{card}---\n")
        return folder

    return write


def drawn_images(drawn):
    """Return the bytes of all images that are measured on."""
    splits = [SplitImages(part.path) for part in (drawn.search, drawn.heldout)]
    return {split.encoded(row) for split in splits for row in range(len(split))}


def refusal(draw, folder, **query):
    with pytest.raises(AcquisitionError) as caught:
        draw(folder, NAMES, **query)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize(
    "location", ["{secret}", "../private/secret.png", "img/../../private/secret.png", "zip://a.png::{secret}"]
)
def test_a_cell_that_names_a_file_elsewhere_is_refused(pictures, draw, private, location):
    assert "which is not in it" in refusal(draw, pictures(location.format(secret=private)))


def test_a_cell_that_names_a_file_of_the_folder_is_read(pictures, draw, make):
    folder = pictures("img/0.png")
    assert make.png(0) in drawn_images(draw(folder, NAMES))
    assert make.png(0) in drawn_images(draw(pictures(str(folder / "img/0.png")), NAMES))


def test_bytes_in_a_cell_are_used_whatever_its_path_is(pictures, draw, make, private):
    assert make.png(1) in drawn_images(draw(pictures(str(private), image=make.png(1)), NAMES))


def test_links_are_followed_inside_of_the_folder_only(pictures, draw, make, private):
    folder = pictures("img/1.png")
    (folder / "img" / "1.png").symlink_to("0.png")
    assert make.png(0) in drawn_images(draw(folder, NAMES))
    (folder / "img" / "1.png").unlink()
    (folder / "img" / "1.png").symlink_to(private)
    assert "which is not in it" in refusal(draw, folder)


def test_a_snapshot_in_the_hubs_cache_links_to_its_blobs(pictures, draw, make, tmp_path):
    folder = pictures("img/0.png")
    blobs, snapshot = tmp_path / "datasets--a--b" / "blobs", tmp_path / "datasets--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blobs / str(number))
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    assert make.png(0) in drawn_images(draw(snapshot, NAMES))


@pytest.mark.parametrize("pattern", ["{elsewhere}/*.parquet", "../elsewhere/*.parquet", "file://{elsewhere}/*.parquet"])
def test_a_card_that_names_data_elsewhere_is_refused(tmp_path, make, draw, pattern):
    for name in ("set", "elsewhere"):
        (tmp_path / name).mkdir()
        make.table([0, 1] * 20, CLASSES).to_parquet(tmp_path / name / "test.parquet")
    files = pattern.format(elsewhere=tmp_path / "elsewhere")
    (tmp_path / "set" / "README.md").write_text(f"---\nconfigs:\n- config_name: a\n  data_files: '{files}'\n---\n")
    assert "can't be read" in refusal(draw, tmp_path / "set", split="train")


def test_saved_tables_are_those_of_their_folder(tmp_path, make, draw):
    rows: dict[Any, datasets.Dataset] = {split: make.table([0, 1] * 30, CLASSES) for split in ("train", "test")}
    for name in ("set", "elsewhere"):
        datasets.DatasetDict(rows).save_to_disk(tmp_path / name)
    state = tmp_path / "set" / "test" / "state.json"
    file = "../../elsewhere/test/data-00000-of-00001.arrow"
    state.write_text(json.dumps({**json.loads(state.read_text()), "_data_files": [{"filename": file}]}))
    assert "which is not in it" in refusal(draw, tmp_path / "set")


def test_metadata_that_names_a_picture_elsewhere_is_refused(tmp_path, make, draw, private):
    (tmp_path / "set" / "test").mkdir(parents=True)
    (tmp_path / "set" / "test" / "0.png").write_bytes(make.png(0))
    lines = [{"file_name": f"../../private/{private.name}", "label": row % 2} for row in range(40)]
    (tmp_path / "set" / "test" / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "can't be read" in refusal(draw, tmp_path / "set", split="test")


def archive(folder, members):
    folder.mkdir()
    with zipfile.ZipFile(folder / "test.zip", "w") as packed:
        for name, data in members.items():
            packed.writestr(name, data)


def test_an_archive_of_pictures_is_read_without_unpacking(tmp_path, make, draw):
    lines = [json.dumps({"file_name": f"img/{row}.png", "label": NAMES[row % 2]}) for row in range(40)]
    images = {f"img/{row}.png": make.png(row) for row in range(40)}
    archive(tmp_path / "set", {"metadata.jsonl": "\n".join(lines), **images})
    drawn = draw(tmp_path / "set", NAMES, split="test")
    assert drawn_images(drawn) <= set(images.values())
    num_search, num_heldout = make.halves(list(images.values()))
    wanted = min(num_search - num_search // 2, num_heldout)
    assert (drawn.search.num_images, drawn.heldout.num_images) == (wanted, min(4 * wanted, num_heldout))
    assert drawn.heldout.num_skipped == drawn.search.num_skipped == 0


def test_a_torn_archive_is_one_line(tmp_path, make, draw):
    archive(tmp_path / "set", {f"{name}/{row}.png": make.png(row) for name in NAMES for row in range(20)})
    whole = (tmp_path / "set" / "test.zip").read_bytes()
    (tmp_path / "set" / "test.zip").write_bytes(whole[:-30])
    assert "can't be read" in refusal(draw, tmp_path / "set", split="test")


def test_a_card_that_is_damaged_is_one_line(tmp_path, make, draw):
    (tmp_path / "set").mkdir()
    make.table([0, 1] * 20, CLASSES).to_parquet(tmp_path / "set" / "test.parquet")
    for text in ("---\n- a list\n---\n", "---\n\tconfigs: x\n---\n", "---\nconfigs: [7]\n---\n"):
        (tmp_path / "set" / "README.md").write_text(text)
        assert "can't be read" in refusal(draw, tmp_path / "set", split="test")


def test_a_folder_whose_path_is_a_pattern_is_refused(tmp_path, make, draw):
    (tmp_path / "a[1]").mkdir()
    make.table([0, 1] * 20, CLASSES).to_parquet(tmp_path / "a[1]" / "test.parquet")
    assert "rename it" in refusal(draw, tmp_path / "a[1]", split="test")


def test_pictures_that_are_no_bytes_are_counted_as_damaged(tmp_path, draw):
    (tmp_path / "set").mkdir()
    for cells in ([{"bytes": None, "path": None}] * 40, [b""] * 40, [None] * 39 + [b"x"]):
        pq.write_table(pa.table({"image": cells, "label": ["cat", "dog"] * 20}), tmp_path / "set/test.parquet")
        assert "can't be decoded" in refusal(draw, tmp_path / "set", split="test")
