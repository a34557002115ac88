"""Pools hold a few images, however many are drawn and however they are stored."""

import io
import json
import zipfile
from dataclasses import dataclass, field, replace
from hashlib import sha256
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel
from tracked import Tracked

from profiling_agent.acquisition.columns import choose_columns
from profiling_agent.acquisition.data import DataQuery, open_data
from profiling_agent.acquisition.origin import Folder, Images
from profiling_agent.acquisition.pools import Spool, open_pool
from profiling_agent.errors import AcquisitionError
from profiling_agent.progress import silent

NAMES = ["ant", "bee"]
NUM_IMAGES = 400


class Stream(io.BytesIO):
    def read(self, size: int | None = -1, /) -> bytes:
        return Tracked(super().read(size))


@dataclass(frozen=True)
class Counting(Folder):
    """A data set's folder that counts how often its files are opened, and how much of them is held."""

    opened: list[str] = field(default_factory=list)

    def open(self, file):
        self.opened.append(file)
        with super().open(file) as stream:
            held = stream.read()
        return io.BytesIO(held) if file.endswith(".zip") else Stream(held)


@pytest.fixture
def photographs(tmp_path, make):
    """Return a folder of pictures in folders of their classes, and the pictures."""
    pictures = [make.png(row) for row in range(NUM_IMAGES)]
    for row, picture in enumerate(pictures):
        place = tmp_path / "photographs" / "test" / NAMES[row % 2] / f"{row:04}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(picture)
    return tmp_path / "photographs", pictures


@pytest.fixture
def archived(tmp_path, make):
    """Return a folder with an archive of pictures, and the pictures."""
    pictures = [make.png(row) for row in range(NUM_IMAGES)]
    (tmp_path / "archived").mkdir()
    with zipfile.ZipFile(tmp_path / "archived" / "test.zip", "w") as held:
        for row, picture in enumerate(pictures):
            held.writestr(f"{row:04}.png", picture)
        lines = [json.dumps({"file_name": f"{row:04}.png", "label": NAMES[row % 2]}) for row in range(NUM_IMAGES)]
        held.writestr("metadata.jsonl", "\n".join(lines))
    return tmp_path / "archived", pictures


@pytest.fixture
def table(parquet, make):
    """Return a folder with a table that holds pictures, and the pictures."""
    rows = make.table(np.arange(NUM_IMAGES) % 2, ClassLabel(names=NAMES))
    return parquet(test=rows), [make.png(row) for row in range(NUM_IMAGES)]


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens a folder's pool as one of this machine or as a stream, and what counts its files."""
    cache, out = tmp_path / "cache", tmp_path / "out"
    cache.mkdir()
    out.mkdir()
    with Spool(out) as spool:

        def call(folder, *, streamed=False):
            data = open_data(DataQuery(dataset=str(folder), split="test"), cache=cache, progress=silent)
            counting = Counting(str(folder), folder)
            data = replace(data, images=Images(counting), cache=None if streamed else cache)
            columns = choose_columns(data, "test", dict(enumerate(NAMES)))
            pool = open_pool(data, "test", columns, target=NUM_IMAGES, spool=spool, progress=silent)
            return pool, counting

        yield call


def everything(pool) -> list[int]:
    return np.random.default_rng(0).permutation(len(pool.labels)).tolist()


@pytest.mark.parametrize("kind", ["photographs", "archived", "table"])
@pytest.mark.parametrize("streamed", [False, True])
def test_images_come_in_the_order_that_they_are_asked_for_in(opened, request, kind, streamed):
    folder, pictures = request.getfixturevalue(kind)
    pool, _ = opened(folder, streamed=streamed)
    rows = everything(pool)

    fetched = list(pool.fetch(rows, silent))

    assert set(fetched) == set(pictures)
    assert not any(isinstance(image, bytes) for image in getattr(pool, "images", []))
    assert pool.digests(rows, silent) == [sha256(image).digest() for image in fetched]
    assert [next(pool.fetch([row], silent)) for row in rows[:3]] == fetched[:3]
    assert [pictures.index(image) % 2 for image in fetched] == pool.labels[rows].tolist()


def test_photographs_are_opened_one_by_one_as_their_turn_comes(opened, photographs):
    folder, _ = photographs
    pool, counting = opened(folder)
    Tracked.most = Tracked.alive = 0

    fetched = pool.fetch(everything(pool), silent)
    for number, _ in enumerate(fetched, 1):
        assert len(counting.opened) == number
    pool.digests(everything(pool), silent)

    assert len(counting.opened) == 2 * NUM_IMAGES
    assert 1 <= Tracked.most <= 3


def test_photographs_of_a_stream_are_downloaded_once_and_wait_on_disk(opened, photographs):
    Tracked.most = Tracked.alive = 0
    folder, _ = photographs
    pool, counting = opened(folder, streamed=True)
    rows = everything(pool)

    pool.digests(rows, silent)
    list(pool.fetch(rows, silent))

    assert len(counting.opened) == NUM_IMAGES
    assert 1 <= Tracked.most <= 3


@pytest.mark.parametrize(
    ("kind", "form"), [("photographs", "'test/{name}/{number:04}.png'"), ("archived", "'test.zip/{number:04}.png'")]
)
@pytest.mark.parametrize("streamed", [False, True])
def test_a_row_is_found_by_the_file_that_its_image_is_read_from(opened, request, kind, form, streamed):
    folder, pictures = request.getfixturevalue(kind)
    pool, _ = opened(folder, streamed=streamed)
    rows = everything(pool)
    numbers = [pictures.index(image) for image in pool.fetch(rows, silent)]
    assert [pool.where(row) for row in rows] == [form.format(name=NAMES[n % 2], number=n) for n in numbers]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("path", "whole"), [("{row}.png", True), ("", False), pytest.param("x" * 5000, False, id="longer than a path")]
)
def test_an_image_in_a_table_is_found_by_its_row_and_by_what_the_table_calls_it(
    opened, tmp_path, make, streamed, path, whole
):
    pictures = [make.png(row) for row in range(NUM_IMAGES)]
    cells = [{"bytes": image, "path": path.format(row=row)} for row, image in enumerate(pictures)]
    (tmp_path / "named").mkdir()
    labels = [NAMES[row % 2] for row in range(NUM_IMAGES)]
    pq.write_table(pa.table({"image": cells, "label": labels}), tmp_path / "named" / "test.parquet")
    pool, _ = opened(tmp_path / "named", streamed=streamed)
    for row, image in zip(range(5), pool.fetch(range(5), silent), strict=True):
        number = pictures.index(image)
        assert streamed or number == row
        called = f"'{number}.png'" if streamed else f"'{number}.png' in row {row}"
        assert pool.where(row) == (called if whole else f"row {row}")


def test_an_archive_is_opened_once(opened, archived):
    folder, _ = archived
    pool, counting = opened(folder)

    list(pool.fetch(everything(pool), silent))

    assert len(counting.opened) == 1


def test_what_waits_takes_no_name_in_the_folder_and_comes_back_as_it_was(tmp_path):
    cells: list[Any] = [b"one", None, {"bytes": None, "path": "two.png"}, {"bytes": b"", "path": "x"}, b"three"]
    with Spool(tmp_path) as spool:
        kept = [spool.put(cell) for cell in cells]
        assert not any(isinstance(cell, bytes) for cell in kept)
        assert [spool.get(each) for each in reversed(kept)] == [b"three", b"", cells[2], None, b"one"]
        assert list(tmp_path.iterdir()) == []


def test_of_a_stream_of_images_that_are_named_alone_all_labels_are_read(opened, tmp_path, make):
    (tmp_path / "named" / "test").mkdir(parents=True)
    (tmp_path / "named" / "test" / "0.png").write_bytes(make.png(0))
    lines = [json.dumps({"file_name": "0.png", "label": NAMES[row // 2100]}) for row in range(2400)]
    (tmp_path / "named" / "test" / "metadata.jsonl").write_text("\n".join(lines))
    pool, _ = opened(tmp_path / "named", streamed=True)
    assert set(pool.labels) == {0, 1}


def test_a_label_that_the_first_rows_of_a_stream_lack_is_noted_or_refused(tmp_path, make):
    (tmp_path / "set" / "test").mkdir(parents=True)
    labels = [NAMES[row % 1000 == 0] for row in range(2100)] + ["cat"] * 900
    rows = pa.table({"image": [{"bytes": make.png(0), "path": None}] * len(labels), "label": labels})
    with pa.ipc.new_stream(str(tmp_path / "set" / "test" / "0.arrow"), rows.schema) as stream:
        stream.write_table(rows)
    (tmp_path / "cache").mkdir()
    data = open_data(DataQuery(dataset=str(tmp_path / "set")), cache=tmp_path / "cache", progress=silent)
    data = replace(data, cache=None)
    columns = choose_columns(data, "test", dict(enumerate([*NAMES, "cat"])))
    (note,) = columns.notes
    assert "the first 2000 rows of split 'test' have 2: the verdict is about no others" in note
    with (
        Spool(tmp_path) as spool,
        pytest.raises(AcquisitionError, match="'label' holds 'cat', which none of the first 2000 rows"),
    ):
        open_pool(data, "test", columns, target=NUM_IMAGES, spool=spool, progress=silent)
