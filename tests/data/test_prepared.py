"""A drawn split, and its images prepared: what comes back is, to the bit, what the processor gives, and in batches."""

import os
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import zoo
from data.image_sets import encoded, noise, write_split
from full_disk import at_most
from PIL import Image
from transformers import CLIPImageProcessorPil, ConvNextImageProcessorPil

from profiling_agent.data.images import (
    GROUP_BYTES,
    GROUP_IMAGES,
    PIXELS,
    PreparedImages,
    SplitImages,
    iter_batches,
    shuffled_batches,
    write_prepared,
)
from profiling_agent.errors import ArtifactError, CorruptImageError

NUM_IMAGES = 40
IMAGENET: dict[str, Any] = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def pictures(*sizes: tuple[int, int]) -> list[bytes]:
    """Return pictures of noise of these widths and heights; large ones have little detail, and are made and read quickly."""
    rng = np.random.default_rng(0)

    @cache
    def large(width: int, height: int) -> bytes:
        tiny = Image.fromarray(noise(rng, 4, 3)).convert("L")
        return encoded(tiny.resize((width, height), Image.Resampling.NEAREST), "JPEG")

    return [large(*size) if max(size) > 100 else encoded(noise(rng, *size)) for size in sizes]


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> SplitImages:
    return write_split(tmp_path_factory.mktemp("split"), pictures(*[(30, 20)] * NUM_IMAGES))


def square(**settings: Any) -> Any:
    return zoo.processor().__class__(size={"height": 32, "width": 32}, **settings)


PROCESSORS = {
    "plain": zoo.processor(),
    "imagenet": square(**IMAGENET),
    "bicubic and cropped": CLIPImageProcessorPil(size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32}),
    "convnext": ConvNextImageProcessorPil(size={"shortest_edge": 32}, **IMAGENET),
    "rescaled alone": square(do_normalize=False),
    "bytes": square(do_normalize=False, do_rescale=False),
    "gray": square(image_mean=[0.5], image_std=[0.5]),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_pixel_is_the_processors_to_the_bit_in_a_quarter_of_the_space(
    split: SplitImages, tmp_path: Path, name: str
):
    processor: Any = PROCESSORS[name]

    write_prepared(tmp_path, split, range(NUM_IMAGES), processor)

    images = PreparedImages([tmp_path])
    taken = [split.image(row).convert("L" if name == "gray" else "RGB") for row in range(NUM_IMAGES)]
    expected = processor(images=taken, return_tensors="pt")["pixel_values"].float().numpy()
    assert images.pixel_values(range(NUM_IMAGES)).tobytes() == expected.tobytes()
    assert images.labels.tolist() == list(range(NUM_IMAGES))
    assert (tmp_path / PIXELS).stat().st_size < expected.nbytes / 4 + 1000


class Standardising:
    """A processor that gives each image mean 0: its values are no function of the image's bytes."""

    def __call__(self, images: Any, return_tensors: str, **settings: bool) -> dict[str, Any]:
        values = np.stack([np.asarray(image, np.float32).transpose(2, 0, 1) for image in images])
        if settings.get("do_normalize") is False:
            return {"pixel_values": values.astype(np.uint8)}
        return {"pixel_values": values - values.mean(axis=(1, 2, 3), keepdims=True)}


def test_where_bytes_would_not_do_float32_is_held(split: SplitImages, tmp_path: Path):
    write_prepared(tmp_path, split, range(35), Standardising())

    found = PreparedImages([tmp_path]).pixel_values(range(35))
    expected = Standardising()([split.image(row) for row in range(35)], "np")["pixel_values"]
    assert found.tobytes() == expected.tobytes()


def test_images_of_several_shapes_and_damaged_ones_are_refused(tmp_path: Path):
    split = write_split(tmp_path, pictures(*[(30, 20)] * 32, (40, 20), (40, 20)))

    (tmp_path / "damaged").mkdir()
    damaged = write_split(tmp_path / "damaged", [b"no image"])

    with pytest.raises(CorruptImageError):
        write_prepared(tmp_path, damaged, range(1), zoo.processor())
    with pytest.raises(ArtifactError, match=r"\(3, 20, 30\) and \(3, 20, 40\)"):
        write_prepared(tmp_path, split, range(34), Standardising())
    with pytest.raises(ArtifactError, match="can't process images, ValueError"):
        write_prepared(tmp_path, split, range(30, 34), zoo.processor().__class__(do_resize=False))
    assert not (tmp_path / PIXELS).exists()


class Numbering:
    """A processor that scales every image to one shape, and notes how many it is given at once."""

    def __init__(self) -> None:
        self.given: list[int] = []

    def __call__(self, images: Any, return_tensors: str) -> dict[str, Any]:
        self.given.append(len(images))
        return {"pixel_values": np.zeros((len(images), 3, 8, 8), np.float32)}


def test_large_images_are_processed_a_few_at_once(tmp_path: Path):
    images = pictures(*[(4000, 3000)] * 6, (8160, 6144), *[(30, 20)] * 34)
    processor = Numbering()

    write_prepared(tmp_path, write_split(tmp_path, images), range(1, len(images)), processor)

    assert processor.given == [4, 1, 1, 32, 2]


def test_a_full_disk_leaves_no_array(split: SplitImages, tmp_path: Path):
    # Forty images of 3,072 bytes each.
    with at_most(50_000), pytest.raises(OSError, match="too large"):
        write_prepared(tmp_path, split, range(NUM_IMAGES), zoo.processor())

    assert list(tmp_path.iterdir()) == []


@pytest.fixture
def shades(tmp_path):
    """Five images: shade k is k/5 of white, which normalised with mean and deviation one half is 0.4 k - 1."""
    return write_split(tmp_path, [encoded(Image.new("L", (8, 8), 51 * shade)) for shade in range(5)], [4, 3, 2, 1, 0])


@pytest.fixture
def images(shades, tmp_path):
    """Three images in one shard, two in the next."""
    folders = [tmp_path / "first", tmp_path / "second"]
    for folder, rows in zip(folders, (range(3), range(3, 5)), strict=True):
        folder.mkdir()
        write_prepared(folder, shades, rows, zoo.processor())
    return PreparedImages(folders)


def test_images_of_two_shards_stand_one_after_the_other(images, shades):
    assert len(images) == 5
    assert images.labels.tolist() == [4, 3, 2, 1, 0]
    apart = zoo.processor()(images=[shades.image(row) for row in (4, 0, 3)], return_tensors="np")["pixel_values"]
    assert np.array_equal(images.pixel_values([4, 0, 3]), apart)
    assert len(PreparedImages([])) == len(PreparedImages([]).labels) == 0


def test_batches_hold_what_the_model_takes_and_the_last_is_short(images):
    batches = list(iter_batches(images, batch_size=2))
    assert [tuple(pixels.shape) for pixels, _ in batches] == [(2, 3, 32, 32), (2, 3, 32, 32), (1, 3, 32, 32)]
    assert {pixels.dtype for pixels, _ in batches} == {torch.float32}
    assert torch.equal(torch.cat([labels for _, labels in batches]), torch.tensor([4, 3, 2, 1, 0]))
    assert batches[0][0][1].mean().item() == pytest.approx(-0.6, abs=1e-6)
    for limit, sizes in ((3, [2, 1]), (2, [2]), (99, [2, 2, 1]), (0, [])):
        assert [len(labels) for _, labels in iter_batches(images, batch_size=2, limit=limit)] == sizes


def test_an_epoch_holds_every_image_once_in_an_order_of_its_own(images):
    def order(seed, epoch):
        batches = list(shuffled_batches(images, epoch, batch_size=2, seed=seed))
        assert [tuple(pixels.shape) for pixels in batches] == [(2, 3, 32, 32), (2, 3, 32, 32), (1, 3, 32, 32)]
        assert {pixels.dtype for pixels in batches} == {torch.float32}
        return tuple(round((image.mean().item() + 1) / 0.4) for pixels in batches for image in pixels)

    orders = {(seed, epoch): order(seed, epoch) for seed in range(3) for epoch in range(3)}

    assert all(sorted(order) == [0, 1, 2, 3, 4] for order in orders.values())
    assert len(set(orders.values())) > 5
    assert order(2, 1) == orders[2, 1]


def test_a_split_is_stored_in_groups_that_fit_into_memory_and_the_same_images_make_the_same_file(tmp_path):
    images = [os.urandom(1) * size for size in [100] * 70 + [GROUP_BYTES // 2, GROUP_BYTES // 2, 1, GROUP_BYTES + 1, 5]]
    split = write_split(tmp_path, images)
    first = (tmp_path / "split.arrow").read_bytes()

    stored = pa.ipc.open_file(tmp_path / "split.arrow")
    sizes = [stored.get_batch(number).num_rows for number in range(stored.num_record_batches)]
    assert sizes == [GROUP_IMAGES, 6 + 1, 1 + 1, 1, 1]
    assert [split.encoded(row) == images[row] for row in (*range(len(images)), 74, 3)] == [True] * (len(images) + 2)
    assert split.labels.tolist() == list(range(len(images)))
    write_split(tmp_path, images)
    assert (tmp_path / "split.arrow").read_bytes() == first
