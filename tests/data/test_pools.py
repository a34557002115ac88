"""Pools: the images of a split, however they are stored, in the order that they are drawn in."""

import io
import json
import zipfile
from dataclasses import replace
from hashlib import sha256

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import ClassLabel

from profiling_agent.data.columns import choose_columns
from profiling_agent.data.dataset import DataQuery, open_data
from profiling_agent.data.splits import open_pool
from profiling_agent.errors import AcquisitionError
from profiling_agent.lib.progress import silent

NAMES = ["ant", "bee"]
NUM_IMAGES = 200


@pytest.fixture
def photographs(tmp_path, make):
    """Return a folder of pictures in folders of their classes."""
    for row in range(NUM_IMAGES):
        place = tmp_path / "photographs" / "test" / NAMES[row % 2] / f"{row:04}.png"
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(make.png(row))
    return tmp_path / "photographs"


@pytest.fixture
def archived(tmp_path, make):
    """Return a folder with an archive of pictures."""
    (tmp_path / "archived").mkdir()
    with zipfile.ZipFile(tmp_path / "archived" / "test.zip", "w") as packed:
        for row in range(NUM_IMAGES):
            packed.writestr(f"{row:04}.png", make.png(row))
        lines = [json.dumps({"file_name": f"{row:04}.png", "label": NAMES[row % 2]}) for row in range(NUM_IMAGES)]
        packed.writestr("metadata.jsonl", "\n".join(lines))
    return tmp_path / "archived"


@pytest.fixture
def table(parquet, make):
    """Return a folder with a table that holds pictures."""
    return parquet(test=make.table(np.arange(NUM_IMAGES) % 2, ClassLabel(names=NAMES)))


@pytest.fixture
def opened(tmp_path):
    """Return a function that opens a folder and its columns, as one of this machine or as a repository."""
    (tmp_path / "cache").mkdir()

    def call(folder, *, streamed, names=NAMES):
        data = open_data(DataQuery(dataset=str(folder)), cache=tmp_path / "cache", progress=silent)
        if streamed:
            data = replace(data, place=replace(data.place, folder=None))
        return data, choose_columns(data, "test", dict(enumerate(names)))

    return call


@pytest.fixture
def pool(opened):
    """Return a function that opens a folder's pool, its images read."""

    def call(folder, *, streamed):
        data, columns = opened(folder, streamed=streamed)
        made = open_pool(data, "test", columns, target=NUM_IMAGES, spool=io.BytesIO(), progress=silent)
        if not streamed:
            made.read(range(NUM_IMAGES), columns.image, silent)
        return made

    return call


@pytest.mark.parametrize(
    ("kind", "form"),
    [
        ("photographs", "'test/{name}/{number:04}.png'"),
        ("archived", "'test.zip/{number:04}.png'"),
        ("table", "row {row}"),
    ],
)
@pytest.mark.parametrize("streamed", [False, True])
def test_images_come_with_their_labels_their_digests_and_their_files(pool, request, make, kind, form, streamed):
    made = pool(request.getfixturevalue(kind), streamed=streamed)
    pictures = [make.png(row) for row in range(NUM_IMAGES)]
    rows = np.random.default_rng(0).permutation(NUM_IMAGES).tolist()

    images = [made.image(row) for row in rows]

    assert set(images) == set(pictures)
    assert [made.digests[row] for row in rows] == [sha256(image).digest() for image in images]
    numbers = [pictures.index(image) for image in images]
    assert [number % 2 for number in numbers] == made.labels[rows].tolist()
    assert [made.where(row) for row in rows] == [
        form.format(name=NAMES[number % 2], number=number, row=row) for row, number in zip(rows, numbers, strict=True)
    ]


@pytest.mark.parametrize("streamed", [False, True])
def test_an_image_in_a_table_is_found_by_its_row_and_its_name_there(pool, tmp_path, make, streamed):
    cells = [{"bytes": make.png(row), "path": f"{row}.png"} for row in range(NUM_IMAGES)]
    (tmp_path / "named").mkdir()
    labels = [NAMES[row % 2] for row in range(NUM_IMAGES)]
    pq.write_table(pa.table({"image": cells, "label": labels}), tmp_path / "named" / "test.parquet")
    made = pool(tmp_path / "named", streamed=streamed)
    for row in range(5):
        number = next(number for number in range(NUM_IMAGES) if made.image(row) == cells[number]["bytes"])
        assert made.where(row) == (f"'{number}.png'" if streamed else f"'{number}.png' in row {row}")


def test_of_a_stream_whose_labels_are_cheap_all_are_read(opened, tmp_path, make):
    (tmp_path / "named" / "test").mkdir(parents=True)
    (tmp_path / "named" / "test" / "0.png").write_bytes(make.png(0))
    lines = [json.dumps({"file_name": "0.png", "label": NAMES[row // 2100]}) for row in range(2400)]
    (tmp_path / "named" / "test" / "metadata.jsonl").write_text("\n".join(lines))
    _, columns = opened(tmp_path / "named", streamed=True)
    assert columns.class_of == {"ant": 0, "bee": 1}


def test_a_label_that_the_first_rows_of_a_stream_lack_is_noted_or_refused(opened, tmp_path, make):
    (tmp_path / "set" / "test").mkdir(parents=True)
    labels = [NAMES[row % 1000 == 0] for row in range(2100)] + ["cat"] * 900
    rows = pa.table({"image": [{"bytes": make.png(0), "path": None}] * len(labels), "label": labels})
    with pa.ipc.new_stream(str(tmp_path / "set" / "test" / "0.arrow"), rows.schema) as stream:
        stream.write_table(rows)
    data, columns = opened(tmp_path / "set", streamed=True, names=[*NAMES, "cat"])
    (note,) = columns.notes
    assert "the first 2000 rows of split 'test' have 2: the verdict is about no others" in note
    with pytest.raises(AcquisitionError, match="'label' holds 'cat', which none of the first 2000 rows"):
        open_pool(data, "test", columns, target=NUM_IMAGES, spool=io.BytesIO(), progress=silent)
