"""Small data sets on disk in the shapes that data sets come in."""

import hashlib
import io
from types import SimpleNamespace

import datasets
import numpy as np
import pytest
from PIL import Image

from profiling_agent.data.dataset import DataQuery
from profiling_agent.data.splits import draw_splits


def png(seed, side=8):
    """Return a small image that no other seed makes."""
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, 3), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def table(labels, kind, *, image="image", label="label", first=0, broken=()):
    """Return a data set whose image number i is made from the seed `first` + i."""
    cells = [
        {"bytes": f"damaged {row}".encode() if row in broken else png(first + row), "path": None}
        for row in range(len(labels))
    ]
    features = datasets.Features({image: datasets.Image(), label: kind})
    return datasets.Dataset.from_dict({image: cells, label: list(labels)}, features=features)


def is_heldout(image):
    """Say what the last bit of an image's SHA-256 says."""
    return bool(int(hashlib.sha256(image).hexdigest()[-1], 16) % 2)


def halves(images):
    """Return how many of the images are to search on, and how many to be held out."""
    held = sum(is_heldout(image) for image in images)
    return len(images) - held, held


@pytest.fixture
def make():
    """Return the makers of images and tables, and what their content says they are for."""
    return SimpleNamespace(png=png, table=table, is_heldout=is_heldout, halves=halves)


@pytest.fixture
def parquet(tmp_path):
    """Return a function that writes splits as a local parquet data set and returns its folder."""

    def write(name="set", config="data", **splits):
        folder = tmp_path / name
        (folder / config).mkdir(parents=True)
        for split, rows in splits.items():
            rows.to_parquet(folder / config / f"{split}-00000-of-00001.parquet")
        return folder

    return write


@pytest.fixture
def photographs(tmp_path):
    """Return a function that writes pictures, by their paths, as a folder of images and returns it."""

    def write(pictures):
        for path, held in pictures.items():
            place = tmp_path / "photographs" / path
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(held)
        return tmp_path / "photographs"

    return write


@pytest.fixture
def cats_and_dogs():
    """Return 80 pictures of a train split and 80 of a test split, by their paths, in folders of their classes."""
    return {
        f"{split}/{name}/{row}.png": png(1000 * first + 100 * index + row)
        for first, split in enumerate(("train", "test"))
        for index, name in enumerate(("cat", "dog"))
        for row in range(40)
    }


@pytest.fixture
def draw(tmp_path):
    """Return a function that draws from a folder into an empty one, for a model with these class names."""
    taken = iter(range(100))

    def call(folder, names, **query):
        out = tmp_path / f"drawn-{next(taken)}"
        out.mkdir()
        return draw_splits(DataQuery(dataset=str(folder), **query), id2label=dict(enumerate(names)), folder=out)

    return call


@pytest.fixture
def imagenet():
    """Return names of a thousand classes of which the first and the last are ImageNet's."""
    return ["tench, Tinca tinca", *(f"kind {index}" for index in range(1, 999)), "toilet tissue, toilet paper"]


@pytest.fixture(autouse=True)
def _no_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
