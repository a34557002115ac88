"""Where a data set's files may lie: in its folder or its repository, and nowhere else."""

import json
import os
import zipfile
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from profiling_agent.data.images import SplitImages
from profiling_agent.errors import AcquisitionError

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
