"""Small data sets on disk in the shapes that data sets come in."""

import io
from collections.abc import Callable, Sequence
from pathlib import Path

import datasets
import numpy as np
import pytest
from PIL import Image


def png(seed: int, mode: str = "RGB", side: int = 8) -> bytes:
    """Return a small image that no other seed makes."""
    channels = () if mode == "L" else (len(mode),)
    pixels = np.random.default_rng(seed).integers(0, 256, (side, side, *channels), dtype=np.uint8)
    stream = io.BytesIO()
    Image.fromarray(pixels, mode).save(stream, "PNG") if mode == "L" else Image.fromarray(pixels).save(stream, "PNG")
    return stream.getvalue()


def table(
    labels: Sequence[object],
    kind: object,
    *,
    image: str = "image",
    label: str = "label",
    first: int = 0,
    broken: Sequence[int] = (),
) -> datasets.Dataset:
    """Return a data set whose image number i is made from the seed `first` + i."""
    cells = [
        {"bytes": b"no image" if row in broken else png(first + row), "path": None} for row in range(len(labels))
    ]
    features = datasets.Features({image: datasets.Image(), label: kind})
    return datasets.Dataset.from_dict({image: cells, label: list(labels)}, features=features)


@pytest.fixture
def parquet(tmp_path: Path) -> Callable[..., Path]:
    """Return a function that writes splits as a local parquet data set and returns its folder."""

    def write(name: str = "set", config: str = "data", **splits: datasets.Dataset) -> Path:
        folder = tmp_path / name
        (folder / config).mkdir(parents=True)
        for split, rows in splits.items():
            rows.to_parquet(folder / config / f"{split}-00000-of-00001.parquet")
        return folder

    return write


@pytest.fixture(autouse=True)
def _no_bars():
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()
