"""The Hub's answers, from a server on the loopback that speaks enough of its protocol; and what lies outside of a data set."""

import json
import os
import subprocess
import sys
from typing import Any

import datasets
import fake_hub
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import zoo
from data.image_sets import expected_sizes, images_of, png, pngs, table, train_and_test

NAMES = ["cat", "dog"]
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
        drawn = draw_splits(DataQuery(dataset=dataset, **options), id2label={0: "cat", 1: "dog"}, folder=Path(folder))
    sizes = [part.num_images for part in (drawn.calibration, drawn.search, drawn.heldout)]
    return {"sizes": sizes, "notes": drawn.notes}

answers = {}
for name, (kind, repository, options, *_) in json.loads(sys.argv[1]).items():
    try:
        answers[name] = {"model": model, "data": data}[kind]("acme/" + repository, **options)
    except AcquisitionError as error:
        answers[name] = str(error)
print(json.dumps(answers))
"""


def ask(endpoint, home, questions, **settings):
    """Return the answer to each question, by its name: kind, repository and options."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "HUGGING"))}
    environment |= {"HF_ENDPOINT": endpoint, "HF_HOME": str(home), "HF_HUB_DISABLE_TELEMETRY": "1", **settings}
    done = subprocess.run(
        [sys.executable, "-c", ASK, json.dumps(questions)],
        env=environment, capture_output=True, text=True, timeout=240, check=True,
    )  # fmt: skip
    assert done.stderr == ""
    return json.loads(done.stdout)


# Rows of each size that the Hub's copy of acme/photos has photographs in, and the number of the first.
SIZES = {"160px": (40, 2000), "320px": (60, 3000)}
READ = {
    "model": ("model", "vit", {}),
    "stream": ("data", "insects", {"num_samples": 30}),
    "pictures": ("data", "pictures", {"split": "test"}),
    "named": ("data", "photos", {"dataset_config": "320px"}),
}
NOWHERE = ("is no local folder, and http://127.0.0.1", "RepositoryNotFoundError", "check the name", "hf auth login")
REFUSED = {
    "gated model": ("model", "gated-vit", {}, ("(GatedRepoError)", "HF_TOKEN", "hf auth login")),
    "gated data": ("data", "gated-imagenet", {}, ("'acme/gated-imagenet'", "gated")),
    "no model": ("model", "nothing", {}, NOWHERE),
    "no data": ("data", "nothing", {}, NOWHERE),
    "no revision": ("model", "vit", {"revision": "v9"}, ("has none for you at revision 'v9' (RevisionNotFoundError)",)),
    "pickle": (
        "model",
        "pickle",
        {},
        ("'model.safetensors' is not there", "save it as safetensors, as pickles are never loaded"),
    ),
    "script": ("data", "scripted", {}, ("'refs/convert/parquet (its scripted.py is never run)'",)),
    "card": ("data", "card", {"split": "test"}, ("Data files don't belong to acme/card",)),
    "cells": ("data", "cells", {"split": "test"}, ("/pictures@main/test/cat/0.png', which is not in it",)),
    "no such": ("data", "photos", {"dataset_config": "32px"}, ("BuilderConfig '32px' not found",)),
    "none named": ("data", "photos", {}, ("holds several data sets, 160px, 320px: name one with dataset_config",)),
}
UNREACHABLE = ("is no local folder, and http://127.0.0.1", "check the name and the network")
REFUSED_OFFLINE = {
    "unreachable model": ("model", "other", {}, UNREACHABLE),
    "unreachable data": ("data", "insects", {}, UNREACHABLE),
}


def write_tables(folder, files):
    """Write tables by their paths below a folder, each of these many cats and dogs from this number on."""
    for path, (num_rows, first) in files.items():
        (folder / path).parent.mkdir(parents=True, exist_ok=True)
        table(np.arange(num_rows) % 2, NAMES, first=first).to_parquet(folder / path)


def write_repositories(root):
    for name in ("vit", "gated-vit", "pickle"):
        zoo.save(zoo.vit(), root / "models/acme" / name)
    (root / "models/acme/pickle/model.safetensors").rename(root / "models/acme/pickle/pytorch_model.bin")
    data = root / "datasets/acme"
    for name in ("insects", "gated-imagenet"):
        file = f"{name}/data/{{}}-00000-of-00001.parquet"
        write_tables(data, {file.format("train"): (400, 0), file.format("test"): (400, 1000)})
    for row, image in enumerate(pngs(40)):
        place = data / "pictures/test" / NAMES[row % 2] / f"{row}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(image)
    # Data sets that name another: in the card, in the cells.
    write_tables(data, {"card/test.parquet": (40, 0)})
    there = "hf://datasets/acme/insects/data/*.parquet"
    (data / "card/README.md").write_text(f"---\nconfigs:\n- config_name: a\n  data_files: '{there}'\n---\n")
    cells = [{"bytes": None, "path": "hf://datasets/acme/pictures@main/test/cat/0.png"}] * 40
    (data / "cells").mkdir()
    table([0, 1] * 20, NAMES).remove_columns("image").add_column("image", cells).to_parquet(data / "cells/test.parquet")
    # Data sets with a script, of one of which the Hub has a parquet copy: CONFIG/SPLIT/0000.parquet.
    for name in ("scripted", "photos"):
        (data / name).mkdir()
        (data / name / f"{name}.py").write_text("raise SystemExit('ran')")
    for config, (num_rows, first) in SIZES.items():
        files = {"train/0000.parquet": (num_rows, first), "validation/0000.parquet": (num_rows, first + 500)}
        write_tables(root / "copies/acme/photos" / config, files)


@pytest.fixture(scope="module")
def answers(tmp_path_factory):
    """Return what a few questions were answered by a Hub that is there, and then by one that is gone."""
    root, home = tmp_path_factory.mktemp("hub"), tmp_path_factory.mktemp("home")
    write_repositories(root)
    with fake_hub.serve(root) as hub:
        there = ask(hub.address, home, READ | REFUSED)
    return there | ask(hub.address, home, {"cached model": ("model", "vit", {})} | REFUSED_OFFLINE)


@pytest.mark.slow
@pytest.mark.parametrize("what", ["model", "cached model"])
def test_a_model_comes_with_the_commit_that_was_read_and_the_next_time_without_the_network(answers, what):
    assert answers[what] == fake_hub.COMMIT


@pytest.mark.slow
@pytest.mark.parametrize(("what", "question"), (REFUSED | REFUSED_OFFLINE).items())
def test_what_can_not_be_had_is_told_with_what_to_do(answers, what, question):
    assert all(part in answers[what] for part in question[-1])


@pytest.mark.slow
@pytest.mark.parametrize(
    ("what", "expected"),
    [
        ("named", list(expected_sizes(pngs(60, 3500), 60))),
        ("stream", [256, 30, 120]),
        ("pictures", list(expected_sizes(pngs(40)))),
    ],
)
def test_a_repository_is_read_alone_and_a_script_makes_way_for_the_hubs_parquet_copy(answers, what, expected):
    assert answers[what]["sizes"] == expected
    assert "images were streamed and drawn in equal numbers per class" in answers[what]["notes"]


@pytest.fixture
def private(tmp_path):
    """Return a picture outside of the data set."""
    path = tmp_path / "private" / "secret.png"
    path.parent.mkdir()
    path.write_bytes(png(999))
    return path


@pytest.fixture
def pictures(tmp_path):
    """Return a function that writes tables of images next to img/0.png; the first cell of the test split names a path."""
    folder = tmp_path / "set"
    (folder / "img").mkdir(parents=True)
    (folder / "img" / "0.png").write_bytes(png(0))

    def write(path, *, image=None):
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        for split, first in (("train", 100), ("test", 200)):
            named = {"bytes": image, "path": path} if split == "test" else {"bytes": png(first), "path": None}
            others = [{"bytes": each, "path": None} for each in pngs(39, first + 1)]
            cells = pa.array([named, *others], kind)
            pq.write_table(pa.table({"image": cells, "label": [0, 1] * 20}), folder / f"{split}.parquet")
        card = "dataset_info:\n  features:\n  - name: image\n    dtype: image\n  - name: label\n    dtype:\n      class_label:\n        names: [cat, dog]\n"
        split = "".join(f"  - split: {name}\n    path: {name}.parquet\n" for name in ("train", "test"))
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{split}{card}---\n")
        return folder

    return write


def measured(drawn):
    """Return the bytes of all images that are measured on."""
    return set(images_of(drawn.search, drawn.heldout))


@pytest.mark.parametrize(
    "location", ["{secret}", "../private/secret.png", "img/../../private/secret.png", "zip://a.png::{secret}"]
)
def test_a_cell_that_names_a_file_elsewhere_is_refused(pictures, refusal, private, location):
    assert "which is not in it" in refusal(pictures(location.format(secret=private)))


def test_a_cell_that_names_a_file_of_the_folder_is_read_and_one_with_bytes_names_none(pictures, draw, private):
    folder = pictures("img/0.png")
    assert png(0) in measured(draw(folder))
    assert png(0) in measured(draw(pictures(str(folder / "img/0.png"))))
    assert png(1) in measured(draw(pictures(str(private), image=png(1))))


def test_links_are_followed_inside_of_the_folder_only(pictures, draw, refusal, private):
    folder = pictures("img/1.png")
    link = folder / "img" / "1.png"
    link.symlink_to("0.png")
    assert png(0) in measured(draw(folder))
    link.unlink()
    link.symlink_to(private)
    assert "which is not in it" in refusal(folder)


def test_a_snapshot_in_the_hubs_cache_links_to_its_blobs(pictures, draw, tmp_path):
    folder = pictures("img/0.png")
    blobs, snapshot = tmp_path / "datasets--a--b" / "blobs", tmp_path / "datasets--a--b" / "snapshots" / "0123"
    blobs.mkdir(parents=True)
    (snapshot / "img").mkdir(parents=True)
    for number, file in enumerate(sorted(path for path in folder.rglob("*") if path.is_file())):
        file.rename(blobs / str(number))
        link = snapshot / file.relative_to(folder)
        link.symlink_to(os.path.relpath(blobs / str(number), link.parent))
    assert png(0) in measured(draw(snapshot))


@pytest.mark.parametrize("pattern", ["{elsewhere}/*.parquet", "../elsewhere/*.parquet", "file://{elsewhere}/*.parquet"])
def test_a_card_that_names_data_elsewhere_is_refused(parquet, refusal, pattern):
    folder, elsewhere = (parquet(name, test=table([0, 1] * 20, NAMES)) for name in ("set", "elsewhere"))
    files = pattern.format(elsewhere=elsewhere)
    (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: a\n  data_files: '{files}'\n---\n")
    assert "can't be read" in refusal(folder, split="train")


def test_saved_tables_are_those_of_their_folder(tmp_path, refusal):
    rows: dict[Any, datasets.Dataset] = train_and_test([0, 1] * 30, NAMES)
    for name in ("set", "elsewhere"):
        datasets.DatasetDict(rows).save_to_disk(tmp_path / name)
    state = tmp_path / "set" / "test" / "state.json"
    file = "../../elsewhere/test/data-00000-of-00001.arrow"
    state.write_text(json.dumps({**json.loads(state.read_text()), "_data_files": [{"filename": file}]}))
    assert "which is not in it" in refusal(tmp_path / "set")


def test_metadata_that_names_a_picture_elsewhere_is_refused(photographs, refusal, private):
    lines = [{"file_name": f"../../private/{private.name}", "label": row % 2} for row in range(40)]
    folder = photographs({"test/0.png": png(0), "test/metadata.jsonl": "\n".join(map(json.dumps, lines)).encode()})
    assert "can't be read" in refusal(folder, split="test")


def test_a_damaged_card_is_one_line(parquet, refusal):
    folder = parquet(test=table([0, 1] * 20, NAMES))
    (folder / "README.md").write_text("---\nconfigs: [7]\n---\n")
    assert "can't be read" in refusal(folder, split="test")


def test_pictures_that_are_no_bytes_are_counted_as_damaged(tmp_path, refusal):
    for cells in ([{"bytes": None, "path": None}] * 40, [b""] * 40, [None] * 39 + [b"x"]):
        pq.write_table(pa.table({"image": cells, "label": NAMES * 20}), tmp_path / "test.parquet")
        assert "can't be decoded" in refusal(tmp_path, split="test")
