"""A drawn split, read back and given in batches."""

import io
import os

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
import zoo
from PIL import Image
from tracked import Tracked

from profiling_agent.acquisition.images import GROUP_BYTES, GROUP_IMAGES, SplitImages, write_rows
from profiling_agent.acquisition.prepared import PreparedImages, iter_batches, shuffled_batches, write_prepared
from profiling_agent.errors import ArtifactError


def gray(value):
    stream = io.BytesIO()
    Image.new("L", (8, 8), value).save(stream, "PNG")
    return stream.getvalue()


@pytest.fixture
def path(tmp_path):
    write_rows(tmp_path / "search.parquet", zip([gray(51 * shade) for shade in range(5)], [4, 3, 2, 1, 0], strict=True))
    return tmp_path / "search.parquet"


@pytest.fixture
def images(path, tmp_path):
    """Three images in one shard, two in the next."""
    split, folders = SplitImages(path), [tmp_path / "first", tmp_path / "second"]
    for folder, rows in zip(folders, (range(3), range(3, 5)), strict=True):
        folder.mkdir()
        write_prepared(folder, split, rows, zoo.processor())
    return PreparedImages(folders)


def test_batches_hold_what_the_model_takes_and_the_last_is_short(images):
    batches = list(iter_batches(images, batch_size=2))
    assert [tuple(pixels.shape) for pixels, _ in batches] == [(2, 3, 32, 32), (2, 3, 32, 32), (1, 3, 32, 32)]
    assert {pixels.dtype for pixels, _ in batches} == {torch.float32}
    assert torch.equal(torch.cat([labels for _, labels in batches]), torch.tensor([4, 3, 2, 1, 0]))
    # 51 is a fifth of white: normalised with mean and deviation one half, that is -0.6.
    assert batches[0][0][1].mean().item() == pytest.approx(-0.6, abs=1e-6)


@pytest.mark.parametrize(("limit", "sizes"), [(3, [2, 1]), (2, [2]), (99, [2, 2, 1]), (0, [])])
def test_a_limit_stops_early(images, limit, sizes):
    assert [len(labels) for _, labels in iter_batches(images, batch_size=2, limit=limit)] == sizes


def test_an_epoch_holds_every_image_once_in_an_order_of_its_own(images):
    # Shade k of 5 is k/5 of white: normalised with mean and deviation one half, that is 0.4 k - 1.
    def shades(seed, epoch):
        batches = list(shuffled_batches(images, batch_size=2, seed=seed)(epoch))
        assert [tuple(pixels.shape) for pixels in batches] == [(2, 3, 32, 32), (2, 3, 32, 32), (1, 3, 32, 32)]
        assert {pixels.dtype for pixels in batches} == {torch.float32}
        return tuple(round((image.mean().item() + 1) / 0.4) for pixels in batches for image in pixels)

    orders = {(seed, epoch): shades(seed, epoch) for seed in range(3) for epoch in range(3)}

    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders.values())
    assert len(set(orders.values())) > 5
    assert shades(2, 1) == orders[2, 1]


def test_a_split_is_stored_in_groups_that_fit_into_memory_and_the_same_images_make_the_same_file(tmp_path):
    sizes = [100] * 70 + [GROUP_BYTES // 2, GROUP_BYTES // 2, 1, GROUP_BYTES + 1, 5]
    images = [os.urandom(1) * size for size in sizes]
    for name in ("one", "two"):
        write_rows(tmp_path / name, zip(iter(images), range(len(images)), strict=True))

    described = pq.ParquetFile(tmp_path / "one").metadata
    stored = [described.row_group(number).num_rows for number in range(described.num_row_groups)]
    assert stored == [GROUP_IMAGES, 6 + 1, 1 + 1, 1, 1]
    assert (tmp_path / "one").read_bytes() == (tmp_path / "two").read_bytes()
    split = SplitImages(tmp_path / "one")
    assert [split.encoded(row) == image for row, image in enumerate(images)] == [True] * len(images)
    assert [split.encoded(row) == images[row] for row in (74, 3, 71, 0)] == [True] * 4
    assert split.labels.tolist() == list(range(len(images)))


def test_of_the_images_that_are_written_a_group_is_held(tmp_path):
    Tracked.most = Tracked.alive = 0
    num_images = write_rows(tmp_path / "x.parquet", ((Tracked(b"image"), 0) for _ in range(5 * GROUP_IMAGES)))

    assert num_images == len(SplitImages(tmp_path / "x.parquet")) == 5 * GROUP_IMAGES
    assert Tracked.alive == 0
    assert GROUP_IMAGES <= Tracked.most <= GROUP_IMAGES + 1


def test_of_a_split_only_what_is_asked_for_is_read(tmp_path):
    path = tmp_path / "x.parquet"
    write_rows(
        path, zip([bytes([row]) * 1000 for row in range(2 * GROUP_IMAGES)], range(2 * GROUP_IMAGES), strict=True)
    )
    group = pq.ParquetFile(path).metadata.row_group(1).column(0)
    with path.open("r+b") as stream:
        stream.seek(group.dictionary_page_offset or group.data_page_offset)
        stream.write(bytes(group.total_compressed_size))

    split = SplitImages(path)

    assert split.labels.tolist() == list(range(2 * GROUP_IMAGES))
    assert split.encoded(GROUP_IMAGES - 1) == bytes([GROUP_IMAGES - 1]) * 1000
    with pytest.raises(ArtifactError, match=r"can't be read.*run again"):
        split.encoded(GROUP_IMAGES)


def test_a_split_without_images_is_one(tmp_path):
    write_rows(tmp_path / "x.parquet", zip([], [], strict=True))
    split = SplitImages(tmp_path / "x.parquet")
    assert len(split) == 0
    assert split.labels.dtype == np.int64


@pytest.mark.parametrize("content", [None, b"PAR1", {"image": [b"a"]}, {"image": [b"a"], "label": ["x"]}])
def test_a_file_that_is_missing_damaged_or_another_table_is_no_split(tmp_path, content):
    if isinstance(content, bytes):
        (tmp_path / "x.parquet").write_bytes(content)
    elif content is not None:
        pq.write_table(pa.table(content), tmp_path / "x.parquet")
    with pytest.raises(ArtifactError, match="can't be read"):
        SplitImages(tmp_path / "x.parquet")
