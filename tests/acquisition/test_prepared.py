"""Images that were prepared: what comes back is, to the bit, what the processor gives, and nothing else is taken for it."""

import io
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import zoo
from full_disk import at_most
from PIL import Image
from safetensors.numpy import load_file, save_file
from transformers import CLIPImageProcessorPil, ConvNextImageProcessorPil

from profiling_agent.acquisition.images import SplitImages, decode_rgb, write_rows
from profiling_agent.acquisition.prepared import LABELS, PIXELS, PreparedImages, write_prepared
from profiling_agent.errors import ArtifactError, CorruptImageError

NUM_IMAGES = 40
IMAGENET: dict[str, Any] = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}


def encoded(rng: np.random.Generator, width: int = 30, height: int = 20) -> bytes:
    held = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (height, width, 3), dtype=np.uint8)).save(held, "PNG")
    return held.getvalue()


def flat(width: int, height: int, rng: np.random.Generator | None = None) -> bytes:
    """Return a large picture of little detail, which is made and read quickly."""
    tiny = np.zeros((3, 4), np.uint8) if rng is None else rng.integers(0, 256, (3, 4), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(tiny).resize((width, height), Image.Resampling.NEAREST).save(held, "JPEG")
    return held.getvalue()


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> SplitImages:
    path, rng = tmp_path_factory.mktemp("split") / "search.parquet", np.random.default_rng(0)
    write_rows(path, zip([encoded(rng) for _ in range(NUM_IMAGES)], list(range(NUM_IMAGES)), strict=True))
    return SplitImages(path)


class Counted:
    """A split that counts how often each of its images is decoded."""

    def __init__(self, split: SplitImages) -> None:
        self.labels, self._split, self.decoded = split.labels, split, Counter[int]()

    def image(self, row: int) -> Image.Image:
        self.decoded[row] += 1
        return self._split.image(row)


PROCESSORS = {
    "plain": zoo.processor(),
    "imagenet": zoo.processor().__class__(size={"height": 32, "width": 32}, **IMAGENET),
    "bicubic and cropped": CLIPImageProcessorPil(size={"shortest_edge": 36}, crop_size={"height": 32, "width": 32}),
    "convnext": ConvNextImageProcessorPil(size={"shortest_edge": 32}, **IMAGENET),
    "rescaled alone": zoo.processor().__class__(size={"height": 32, "width": 32}, do_normalize=False),
    "bytes": zoo.processor().__class__(size={"height": 32, "width": 32}, do_normalize=False, do_rescale=False),
    "gray": zoo.processor().__class__(size={"height": 32, "width": 32}, image_mean=[0.5], image_std=[0.5]),
}


@pytest.mark.parametrize("name", PROCESSORS)
def test_every_pixel_is_the_processors_to_the_bit_in_a_quarter_of_the_space(
    split: SplitImages, tmp_path: Path, name: str
):
    processor: Any = PROCESSORS[name]
    counted: Any = Counted(split)

    shape, dtype = write_prepared(tmp_path, counted, range(NUM_IMAGES), processor)

    images = PreparedImages([tmp_path])
    taken = [split.image(row).convert("L" if name == "gray" else "RGB") for row in range(NUM_IMAGES)]
    expected = processor(images=taken, return_tensors="pt")["pixel_values"].float().numpy()
    assert (shape, dtype) == (expected.shape, "uint8")
    assert images.pixel_values(range(NUM_IMAGES)).tobytes() == expected.tobytes()
    assert images.labels.tolist() == list(range(NUM_IMAGES))
    assert counted.decoded == dict.fromkeys(range(NUM_IMAGES), 1)
    assert (tmp_path / PIXELS).stat().st_size < expected.nbytes / 4 + 1000


class Standardising:
    """A processor that gives each image mean 0: its values are no function of the image's bytes."""

    do_normalize = do_rescale = False

    def __call__(self, images: Any, return_tensors: str) -> dict[str, Any]:
        values = np.stack([np.asarray(image, np.float32).transpose(2, 0, 1) for image in images])
        return {"pixel_values": values - values.mean(axis=(1, 2, 3), keepdims=True)}


class Noting(Standardising):
    """A processor whose settings are no numbers of a channel each."""

    do_normalize = True
    image_mean, image_std = [0.5, 0.5], None


class Overflowing(Standardising):
    def __call__(self, images: Any, return_tensors: str) -> dict[str, Any]:
        values = super().__call__(images, return_tensors)["pixel_values"]
        values[0, 0, 0, 0] = np.nan
        return {"pixel_values": values}


@pytest.mark.parametrize("processor", [Standardising(), Noting(), Overflowing()])
def test_where_bytes_would_not_do_float32_is_held(split: SplitImages, tmp_path: Path, processor: Any):
    _, dtype = write_prepared(tmp_path, split, range(35), processor)

    found = PreparedImages([tmp_path]).pixel_values(range(35))
    expected = [
        processor([split.image(row) for row in rows], "np")["pixel_values"] for rows in (range(32), range(32, 35))
    ]
    assert dtype == "float32"
    assert found.tobytes() == np.concatenate(expected).tobytes()


def test_a_value_that_only_a_later_batch_gives_another_meaning_is_noticed(split: SplitImages, tmp_path: Path):
    class Drifting:
        calls = 0

        def __call__(self, images: Any, return_tensors: str) -> dict[str, Any]:
            self.calls += 1
            values = np.stack([np.asarray(image, np.float32).transpose(2, 0, 1) for image in images])
            return {"pixel_values": values + (0.25 if len(images) < 32 else 0.0)}

    processor = Drifting()
    _, dtype = write_prepared(tmp_path, split, range(40), processor)

    assert (dtype, processor.calls) == ("float32", 4)
    values = PreparedImages([tmp_path]).pixel_values(range(40))
    assert (values[:32] % 1 == 0).all()
    assert (values[32:] % 1 == 0.25).all()


def test_images_of_two_shards_stand_one_after_the_other(split: SplitImages, tmp_path: Path):
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder, rows in zip(folders, (range(3, 10), range(10, 12)), strict=True):
        folder.mkdir()
        write_prepared(folder, split, rows, zoo.processor())

    images = PreparedImages(folders)

    assert len(images) == 9
    assert images.labels.tolist() == list(range(3, 12))
    assert [labels.tolist() for _, labels in images.batches(4)] == [[3, 4, 5, 6], [7, 8, 9, 10], [11]]
    apart = zoo.processor()(images=[split.image(row) for row in (11, 3, 10)], return_tensors="np")["pixel_values"]
    assert np.array_equal(images.pixel_values([8, 0, 7]), apart)
    assert len(PreparedImages([])) == len(PreparedImages([]).labels) == 0


def test_images_of_several_shapes_are_refused(tmp_path: Path):
    rng, path = np.random.default_rng(0), tmp_path / "split.parquet"
    write_rows(path, zip([encoded(rng) for _ in range(32)] + [encoded(rng, 40, 20)] * 2, [0] * 34, strict=True))

    with pytest.raises(ArtifactError, match=r"\(3, 20, 30\) and \(3, 20, 40\)"):
        write_prepared(tmp_path, SplitImages(path), range(34), Standardising())
    with pytest.raises(ArtifactError, match="can't process images 30 to 33"):
        write_prepared(tmp_path, SplitImages(path), range(30, 34), zoo.processor().__class__(do_resize=False))
    assert not (tmp_path / PIXELS).exists()


class Numbering(Standardising):
    """A processor that scales every image to one shape, and notes how many it is given at once."""

    def __init__(self) -> None:
        self.given: list[list[tuple[int, int]]] = []

    def __call__(self, images: Any, return_tensors: str) -> dict[str, Any]:
        self.given.append([image.size for image in images])
        return super().__call__([image.resize((8, 8)) for image in images], return_tensors)


def test_large_images_are_processed_a_few_at_once(tmp_path: Path):
    rng, path = np.random.default_rng(0), tmp_path / "split.parquet"
    photograph, frame, small = (flat(width, height) for width, height in ((4000, 3000), (8160, 6144), (30, 20)))
    images = [photograph] * 6 + [frame] + [small] * 33 + [encoded(rng)]
    write_rows(path, zip(images, range(len(images)), strict=True))
    processor = Numbering()

    shape, _ = write_prepared(tmp_path, SplitImages(path), range(1, len(images)), processor)

    assert shape == (len(images) - 1, 3, 8, 8)
    assert [len(given) for given in processor.given] == [4, 1, 1, 32, 2] * 2


@pytest.mark.parametrize("name", PROCESSORS)
def test_no_value_depends_on_the_images_that_are_processed_with_it(tmp_path: Path, name: str):
    rng, path, processor = np.random.default_rng(0), tmp_path / "split.parquet", PROCESSORS[name]
    sizes = [(30, 20), (40, 60), (5000, 4500), (33, 33), (5000, 6000), (20, 30)]
    images = [encoded(rng, *size) if max(size) < 100 else flat(*size, rng=rng) for size in sizes]
    write_rows(path, zip(images, range(len(images)), strict=True))
    decoded = [decode_rgb(image).convert("L" if name == "gray" else "RGB") for image in images]

    write_prepared(tmp_path, SplitImages(path), range(len(images)), processor)

    found = PreparedImages([tmp_path]).pixel_values(range(len(images)))
    together = processor(images=decoded, return_tensors="np")["pixel_values"]
    alone = [processor(images=[image], return_tensors="np")["pixel_values"] for image in decoded]
    assert found.tobytes() == np.asarray(together, np.float32).tobytes()
    assert found.tobytes() == np.concatenate(alone).astype(np.float32).tobytes()


def test_an_image_that_can_not_be_decoded_is_refused(tmp_path: Path):
    write_rows(tmp_path / "split.parquet", zip([b"no image"], [0], strict=True))

    with pytest.raises(CorruptImageError):
        write_prepared(tmp_path, SplitImages(tmp_path / "split.parquet"), range(1), zoo.processor())


def test_a_full_disk_leaves_no_array(split: SplitImages, tmp_path: Path):
    # Forty images of 3,072 bytes each.
    with at_most(50_000), pytest.raises(OSError, match="too large"):
        write_prepared(tmp_path, split, range(NUM_IMAGES), zoo.processor())

    assert list(tmp_path.iterdir()) == []


def cut_short(folder: Path) -> None:
    os.truncate(folder / PIXELS, (folder / PIXELS).stat().st_size - 1)


def of_objects(folder: Path) -> None:
    with (folder / PIXELS).open("wb") as stream:
        np.save(stream, np.array([{"a": 1}] * 4), allow_pickle=True)


def without_labels(folder: Path) -> None:
    (folder / LABELS).unlink()


def of_few_labels(folder: Path) -> None:
    held = load_file(folder / LABELS)
    save_file(held | {"labels": held["labels"][:3].copy()}, folder / LABELS)


@pytest.mark.parametrize("damage", [cut_short, of_objects, without_labels, of_few_labels])
def test_what_is_damaged_is_refused_in_one_line(split: SplitImages, tmp_path: Path, damage: Callable[[Path], None]):
    write_prepared(tmp_path, split, range(4), zoo.processor())
    PreparedImages([tmp_path])
    damage(tmp_path)

    with pytest.raises(ArtifactError, match=r"can.t be read.*run again") as refused:
        PreparedImages([tmp_path])

    assert "\n" not in str(refused.value)
