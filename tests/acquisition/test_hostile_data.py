"""Data sets that name files and addresses outside of themselves: refused in one line, and nothing outside is touched."""

import io
import json
import os
import socket
import zipfile
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from profiling_agent.acquisition.images import read_split
from profiling_agent.errors import AcquisitionError

NAMES = ["cat", "dog"]
CLASSES = datasets.ClassLabel(names=NAMES)


@pytest.fixture
def trap():
    """Listen on the loopback; whoever connected is there at the end."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        yield f"127.0.0.1:{listener.getsockname()[1]}"
        with pytest.raises(BlockingIOError):
            listener.accept()


@pytest.fixture
def private(tmp_path, make):
    """Return a picture that is nobody's business."""
    path = tmp_path / "private" / "secret.png"
    path.parent.mkdir()
    path.write_bytes(make.png(999))
    return path


@pytest.fixture
def pictures(tmp_path, make):
    """Return a folder with a picture at img/0.png and a function that writes tables beside it, one cell of which is odd."""
    folder = tmp_path / "set"
    (folder / "img").mkdir(parents=True)
    (folder / "img" / "0.png").write_bytes(make.png(0))

    def write(path, *, held=None):
        kind = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        for split, first in (("train", 100), ("test", 200)):
            odd = {"bytes": held, "path": path} if split == "test" else {"bytes": make.png(first), "path": None}
            others = [{"bytes": make.png(first + row), "path": None} for row in range(1, 40)]
            cells = pa.array([odd, *others], kind)
            pq.write_table(pa.table({"image": cells, "label": [0, 1] * 20}), folder / f"{split}.parquet")
        card = "dataset_info:\n  features:\n  - name: image\n    dtype: image\n  - name: label\n    dtype:\n      class_label:\n        names: [cat, dog]\n"
        split = "".join(f"  - split: {name}\n    path: {name}.parquet\n" for name in ("train", "test"))
        (folder / "README.md").write_text(f"---\nconfigs:\n- config_name: default\n  data_files:\n{split}{card}---\n")
        return folder

    return write


def drawn_images(drawn):
    """Return the bytes of all images that are measured on."""
    splits = [read_split(part.path) for part in (drawn.search, drawn.heldout)]
    return {split.encoded(row) for split in splits for row in range(len(split))}


def refusal(draw, folder, **query):
    with pytest.raises(AcquisitionError) as caught:
        draw(folder, NAMES, **query)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def one_line_at_most(draw, folder):
    """Draw, or be refused: which of both is the reader's choice."""
    try:
        draw(folder, NAMES, split="test")
    except AcquisitionError as error:
        said = str(error)
    else:
        said = ""
    assert "\n" not in said


@pytest.mark.parametrize(
    "location",
    [
        "{secret}",
        "../private/secret.png",
        "img/../../private/secret.png",
        "file://{secret}",
        "local://{secret}",
        "http://{trap}/a.png",
        "ftp://{trap}/a.png",
        "https://{trap}/a.png",
        "s3://bucket/a.png",
        "hf://datasets/other/set@main/a.png",
        "data:image/png;base64,AAAA::x",
        "simplecache::http://{trap}/a.png",
        "zip://a.png::http://{trap}/a.zip",
        "zip://a.png::{secret}",
        "img/0.png::http://{trap}/a.png",
        "github://owner:repo@/a.png",
        "a\0b.png",
    ],
)
def test_a_cell_that_names_a_file_elsewhere_is_refused_and_nothing_is_opened(pictures, draw, private, trap, location):
    named = location.format(secret=private, trap=trap)
    assert "is not in it" in refusal(draw, pictures(named))


def test_a_cell_that_names_a_file_of_the_folder_is_read(pictures, draw, make):
    folder = pictures("img/0.png")
    assert make.png(0) in drawn_images(draw(folder, NAMES))
    assert make.png(0) in drawn_images(draw(pictures(str(folder / "img/0.png")), NAMES))


def test_bytes_in_a_cell_are_used_whatever_its_path_says(pictures, draw, make, private):
    assert make.png(1) in drawn_images(draw(pictures(str(private), held=make.png(1)), NAMES))


@pytest.mark.parametrize("kind", ["fifo", "device", "link", "folder link"])
def test_a_folder_with_what_is_no_file_of_its_own_is_refused(pictures, draw, private, kind):
    folder = pictures("img/1.png")
    place = folder / "img" / "1.png"
    if kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to({"device": "/dev/zero", "link": private, "folder link": private.parent}[kind])
    said = refusal(draw, folder)
    assert "a FIFO" in said if kind == "fifo" else "leads out of" in said


def test_links_that_stay_in_the_folder_are_followed(pictures, draw, make):
    folder = pictures("img/1.png")
    (folder / "img" / "1.png").symlink_to("0.png")
    assert make.png(0) in drawn_images(draw(folder, NAMES))


def test_links_that_go_round_are_no_endless_folders(pictures, draw, make):
    folder = pictures("img/0.png")
    for name in ("a", "b"):
        (folder / name).symlink_to(".")
    assert make.png(0) in drawn_images(draw(folder, NAMES))


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


@pytest.fixture
def beside(tmp_path, make):
    """Return the folder of a data set, beside another, `elsewhere`."""
    for name in ("set", "elsewhere"):
        (tmp_path / name).mkdir()
        make.table([0, 1] * 20, CLASSES).to_parquet(tmp_path / name / "test.parquet")
    return tmp_path / "set"


@pytest.mark.parametrize("card", ["README.md", ".huggingface.yaml"])
@pytest.mark.parametrize(
    "pattern",
    [
        "{elsewhere}/*.parquet",
        "../elsewhere/*.parquet",
        "img/../../elsewhere/test.parquet",
        "http://{trap}/test.parquet",
        "file:{elsewhere}/test.parquet",
        "file://{elsewhere}/test.parquet",
        "zip://*.parquet::http://{trap}/a.zip",
        "simplecache::http://{trap}/test.parquet",
        "hf://datasets/other/set/test.parquet",
        ".git/*.parquet",
    ],
)
@pytest.mark.parametrize(
    "form",
    [
        "  data_files: '{named}'\n",
        "  data_files:\n  - split: test\n    path: ['test.parquet', '{named}']\n",
        "  data_dir: '{named}'\n",
    ],
)
def test_a_card_that_names_data_elsewhere_is_refused_before_it_is_looked_for(beside, draw, trap, card, pattern, form):
    named = pattern.format(elsewhere=beside.with_name("elsewhere"), trap=trap)
    text = "configs:\n- config_name: default\n" + form.format(named=named)
    (beside / card).write_text(f"---\n{text}---\n" if card == "README.md" else text)
    assert f"its {card} names" in refusal(draw, beside, split="test")


BOMB = "a: &a [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join(['*' + before] * 10)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        (f"---\n{BOMB}---\n", "says more than"),
        ("---\n" + "x: 1\n" * 100_000 + "---\n", "says more than"),
        ("---\nx: [" + "1," * 200_000 + "]\n---\n", "says more than"),
        ("---\nloop: &a [*a]\n---\n", "says more than"),
        ("---\n" + "[" * 1500 + "\n---\n", "is no card"),
        ("---\n- a list\n---\n", "is no card"),
        ("---\n\tconfigs: x\n---\n", "is no card"),
        ("x" * (4 * 2**20 + 1), "larger than"),
        (b"\xff\xfe\x00", "can't be read"),
        (
            "---\ndataset_info: {features: [{name: label, dtype: {class_label: {num_classes: 1000000000}}}]}\n---\n",
            "classes",
        ),
        ("---\nconfigs: 7\n---\n", "can't be read"),
        ("---\nconfigs: [7]\n---\n", "can't be read"),
        ("---\nconfigs: [{config_name: {a: b}, data_files: x}]\n---\n", "can't be read"),
        ("---\nconfigs: [{config_name: a, data_files: {b: {c: d}}}]\n---\n", "can't be read"),
        ("---\nconfigs: [{config_name: a, data_files: '*.parquet', create_config_id: 7}]\n---\n", "can't be read"),
        ("---\ndataset_info: {features: [{name: image, dtype: no such kind}]}\n---\n", "can't be read"),
        ("---\ndataset_info: {features: 7}\n---\n", "can't be read"),
    ],
)
def test_a_card_that_is_none_is_one_line(tmp_path, make, draw, text, seen):
    (tmp_path / "set").mkdir()
    make.table([0, 1] * 20, CLASSES).to_parquet(tmp_path / "set" / "test.parquet")
    (tmp_path / "set" / "README.md").write_bytes(text if isinstance(text, bytes) else text.encode())
    assert seen in refusal(draw, tmp_path / "set", split="test")


@pytest.mark.parametrize("file", ["README.md", ".huggingface.yaml", "dataset_infos.json", "metadata.csv"])
@pytest.mark.parametrize("kind", ["fifo", "device", "link"])
def test_what_describes_a_data_set_is_a_file_in_it(tmp_path, make, draw, private, file, kind):
    (tmp_path / "set").mkdir()
    make.table([0, 1] * 20, CLASSES).to_parquet(tmp_path / "set" / "test.parquet")
    place = tmp_path / "set" / file
    if kind == "fifo":
        os.mkfifo(place)
    else:
        place.symlink_to("/dev/zero" if kind == "device" else private)
    assert file in refusal(draw, tmp_path / "set", split="test")


def archive(folder, members):
    with zipfile.ZipFile(folder / "test.zip", "w") as held:
        for name, data in members.items():
            held.writestr(name, data)


def test_an_archive_of_pictures_is_read_where_it_lies(tmp_path, make, draw):
    (tmp_path / "set").mkdir()
    lines = [json.dumps({"file_name": f"img/{row}.png", "label": NAMES[row % 2]}) for row in range(40)]
    pictures = {f"img/{row}.png": make.png(row) for row in range(40)}
    archive(tmp_path / "set", {"metadata.jsonl": "\n".join(lines), **pictures})
    drawn = draw(tmp_path / "set", NAMES, split="test")
    assert drawn_images(drawn) <= set(pictures.values())
    num_search, num_heldout = make.halves([make.png(row) for row in range(40)])
    wanted = min(num_search - num_search // 2, num_heldout)
    assert (drawn.search.num_images, drawn.heldout.num_images) == (wanted, min(4 * wanted, num_heldout))
    assert drawn.heldout.num_skipped == drawn.search.num_skipped == 0


@pytest.mark.parametrize("member", ["x::http://{trap}/metadata.csv", "x::file://{secret}/metadata.csv"])
def test_an_archive_whose_members_are_addresses_is_refused(tmp_path, make, draw, private, trap, member):
    (tmp_path / "set").mkdir()
    pictures = {f"{name}/{row}.png": make.png(row) for name in NAMES for row in range(20)}
    archive(tmp_path / "set", {member.format(trap=trap, secret=private): "file_name,label\n", **pictures})
    assert "whose name is an address" in refusal(draw, tmp_path / "set", split="test")


def test_a_torn_archive_is_one_line(tmp_path, make, draw):
    (tmp_path / "set").mkdir()
    archive(tmp_path / "set", {f"{name}/{row}.png": make.png(row) for name in NAMES for row in range(20)})
    whole = (tmp_path / "set" / "test.zip").read_bytes()
    (tmp_path / "set" / "test.zip").write_bytes(whole[:-30])
    assert "can't be read" in refusal(draw, tmp_path / "set", split="test")


@pytest.mark.parametrize("name", ["../private/secret.png", "{secret}", "http://{trap}/a.png", "a::http://{trap}/a.png"])
def test_metadata_that_names_a_picture_elsewhere_is_refused(tmp_path, make, draw, private, trap, name):
    (tmp_path / "set" / "test").mkdir(parents=True)
    (tmp_path / "set" / "test" / "0.png").write_bytes(make.png(0))
    lines = [{"file_name": name.format(secret=private, trap=trap), "label": row % 2} for row in range(40)]
    (tmp_path / "set" / "test" / "metadata.jsonl").write_text("\n".join(map(json.dumps, lines)))
    assert "dataset" in refusal(draw, tmp_path / "set", split="test")


@pytest.fixture
def saved(tmp_path, make):
    rows: dict[Any, datasets.Dataset] = {
        split: make.table([0, 1] * 30, CLASSES, first=first) for split, first in (("train", 0), ("test", 500))
    }
    for name in ("set", "elsewhere"):
        datasets.DatasetDict(rows).save_to_disk(tmp_path / name)
    return tmp_path / "set"


@pytest.mark.parametrize(
    "file", ["../../elsewhere/test/data-00000-of-00001.arrow", "{elsewhere}/test/x.arrow", "http://{trap}/x.arrow"]
)
def test_saved_tables_are_those_beside_their_state(saved, draw, trap, tmp_path, file):
    path = saved / "test" / "state.json"
    named = file.format(trap=trap, elsewhere=tmp_path / "elsewhere")
    path.write_text(json.dumps({**json.loads(path.read_text()), "_data_files": [{"filename": named}]}))
    assert "which is none beside its state.json" in refusal(draw, saved)


@pytest.mark.parametrize("split", ["../elsewhere/test", "{elsewhere}/test", "http://{trap}/test"])
def test_saved_splits_are_folders_of_the_data_set(saved, draw, trap, tmp_path, split):
    named = split.format(trap=trap, elsewhere=tmp_path / "elsewhere")
    (saved / "dataset_dict.json").write_text(json.dumps({"splits": ["train", named]}))
    assert "which is no name of a folder in it" in refusal(draw, saved)


@pytest.mark.parametrize("file", ["dataset_dict.json", "test/state.json", "test/dataset_info.json"])
@pytest.mark.parametrize("text", ["{", "[" * 9000, "7", "{}", '{"splits": 7, "_data_files": 7}', b"\xff"])
def test_what_save_to_disk_did_not_write_so_is_one_line(saved, make, draw, file, text):
    (saved / file).write_bytes(text if isinstance(text, bytes) else text.encode())
    if (file, text) == ("test/dataset_info.json", "{}"):
        # What it doesn't say, the tables do.
        num_search, num_heldout = make.halves([make.png(500 + row) for row in range(60)])
        drawn = draw(saved, NAMES)
        assert (drawn.search.num_images, drawn.heldout.num_images) == (min(num_search, num_heldout), num_heldout)
    else:
        refusal(draw, saved)


@pytest.mark.parametrize("kind", ["cut", "zeros", "flipped"])
def test_a_torn_saved_table_is_one_line(saved, draw, kind):
    path = next((saved / "test").glob("*.arrow"))
    whole = path.read_bytes()
    half = len(whole) // 2
    torn = {"cut": whole[:half], "zeros": whole[:half] + bytes(len(whole) - half), "flipped": bytes(200) + whole[200:]}
    path.write_bytes(torn[kind])
    refusal(draw, saved)


@pytest.mark.parametrize("kind", ["h5", "txt", "xml", "lance", "eval", "pdb"])
def test_kinds_of_files_that_hold_no_labelled_images_are_refused_unread(tmp_path, draw, kind):
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / f"test.{kind}").write_bytes(b"\x89HDF\r\n\x1a\n")
    said = refusal(draw, tmp_path / "set", split="test")
    assert "hold no labelled images" in said or "can't be read" in said


@pytest.mark.parametrize("name", ["a[1]", "a*", "a::b"])
def test_a_folder_whose_path_is_a_pattern_is_refused(tmp_path, make, draw, name):
    (tmp_path / name).mkdir()
    make.table([0, 1] * 20, CLASSES).to_parquet(tmp_path / name / "test.parquet")
    assert "rename it" in refusal(draw, tmp_path / name, split="test")


@pytest.mark.parametrize("name", ["/a\0b", "~nosuchuser/x", "/" + "a" * 5000, "a" * 5000, "a\0b", "./" + "a/" * 3000])
def test_odd_paths_are_one_short_line(draw, name):
    assert len(refusal(draw, name)) < 1000


@pytest.mark.parametrize("offset", [0, 4, 100, -12, -200])
def test_a_parquet_file_with_a_flipped_byte_is_read_or_one_line(parquet, make, draw, offset):
    folder = parquet(test=make.table([0, 1] * 20, CLASSES))
    path = next(folder.rglob("*.parquet"))
    damaged = bytearray(path.read_bytes())
    damaged[offset] ^= 0xFF
    path.write_bytes(damaged)
    one_line_at_most(draw, folder)


def test_a_schema_that_promises_another_kind_than_the_file_holds_is_one_line(tmp_path, make, draw):
    (tmp_path / "set").mkdir()
    cells = [{"bytes": make.png(0), "path": None}] * 40
    promised = datasets.Features({"image": datasets.Image(), "label": CLASSES}).arrow_schema.metadata
    for label in (["cat", "dog"] * 20, [0.5] * 40, [[0]] * 40, [{"a": 1}] * 40):
        table = pa.table({"image": cells, "label": label}).replace_schema_metadata(promised)
        pq.write_table(table, tmp_path / "set/test.parquet")
        one_line_at_most(draw, tmp_path / "set")


def test_names_of_classes_that_are_no_texts_are_one_line(tmp_path, make, draw):
    (tmp_path / "set").mkdir()
    cells = [{"bytes": make.png(row), "path": None} for row in range(40)]
    for names in ([0, "dog"], ["cat", None], [["cat"], "dog"], ["cat", "d" * 1001]):
        told = {"image": {"_type": "Image"}, "label": {"names": names, "_type": "ClassLabel"}}
        notes = {"huggingface": json.dumps({"info": {"features": told}})}
        table = pa.table({"image": cells, "label": [0, 1] * 20}).replace_schema_metadata(notes)
        pq.write_table(table, tmp_path / "set/test.parquet")
        assert "\n" not in refusal(draw, tmp_path / "set")


def test_pictures_that_are_no_bytes_are_counted_as_damaged(tmp_path, draw):
    (tmp_path / "set").mkdir()
    for cells in ([{"bytes": "text"}] * 40, [{"bytes": None, "path": None}] * 40, [b""] * 40, [None] * 39 + [b"x"]):
        pq.write_table(pa.table({"image": cells, "label": ["cat", "dog"] * 20}), tmp_path / "set/test.parquet")
        assert "can't be decoded" in refusal(draw, tmp_path / "set", split="test")


def test_an_arrow_stream_that_lies_about_where_its_images_begin_is_one_line(tmp_path, make, draw):
    (tmp_path / "set").mkdir()
    held = io.BytesIO()
    image = pa.Array.from_buffers(
        pa.binary(), 2, [None, pa.py_buffer(b"\0\0\0\0\xff\xff\xff\x7f\0\0\0\0"), pa.py_buffer(make.png(0))]
    )
    table = pa.table({"image": image, "label": ["cat", "dog"]})
    with pa.ipc.new_stream(held, table.schema) as writer:
        writer.write_table(table)
    (tmp_path / "set" / "test.arrow").write_bytes(held.getvalue())
    assert "can't be read" in refusal(draw, tmp_path / "set", split="test")
