"""Encoded images: decoded to RGB, and stored as a split with their labels. No torch here."""

import io
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Generator, Iterable, Mapping
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from profiling_agent.data.pixels import BROKEN, upright_rgb
from profiling_agent.errors import ArtifactError, CorruptImageError

# What pictures are kept in, and nothing that starts another program (EPS); Pillow has 43.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
# What Pillow raises for damaged images, besides `BROKEN`.
DAMAGED = (*BROKEN, RuntimeError, MemoryError, zlib.error)
SPLIT = pa.schema({"image": pa.binary(), "label": pa.int64()})
# A row group, of which one is in memory: so many images, or so many bytes, and at least one image.
GROUP_IMAGES, GROUP_BYTES = 64, 2**25


def decode_rgb(data: bytes) -> Image.Image:
    """Return an image's first frame as upright 8-bit RGB; CorruptImageError if it is damaged, too large or of no format."""
    with warnings.catch_warnings():
        # Pillow warns of images half as large as those that it refuses, and of odd metadata.
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
                return upright_rgb(opened)
        # Pillow's own text names an object in memory.
        except UnidentifiedImageError as error:
            raise CorruptImageError("its beginning is damaged, or of no format that is read") from error
        except Image.DecompressionBombError as error:
            raise CorruptImageError("it has more pixels than are read") from error
        except DAMAGED as error:
            raise CorruptImageError(f"{type(error).__name__} ({str(error)!r})") from error


class SplitImages:
    """A drawn split on disk: `labels` are the model's class ids, images are read and decoded on request.

    One row group is in memory: images are best requested in order. ArtifactError if the file is missing or damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with self._reading():
            self._file = pq.ParquetFile(path)
            self.labels: NDArray[np.int64] = np.asarray(self._file.read(["label"])["label"], dtype=np.int64)
        metadata = self._file.metadata
        sizes = (metadata.row_group(number).num_rows for number in range(metadata.num_row_groups))
        self._starts = tuple(accumulate(sizes, initial=0))
        self._group: tuple[int, pa.ChunkedArray] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, row: int) -> bytes:
        """Return one image's bytes; ArtifactError if they can't be read."""
        number = bisect_right(self._starts, row) - 1
        if self._group is None or self._group[0] != number:
            # Two groups at once would be twice the memory.
            self._group = None
            with self._reading():
                self._group = number, self._file.read_row_group(number, ["image"])["image"]
        return self._group[1][row - self._starts[number]].as_py()

    def image(self, row: int) -> Image.Image:
        """Return one image as 8-bit RGB; CorruptImageError as `decode_rgb`, ArtifactError if its bytes can't be read."""
        return decode_rgb(self.encoded(row))

    @contextmanager
    def _reading(self) -> Generator[None]:
        try:
            yield
        except (OSError, pa.ArrowException, ValueError, KeyError, TypeError) as error:
            raise ArtifactError(
                f"split {str(self._path)!r} can't be read ({type(error).__name__}): run again"
            ) from error


def write_rows(path: Path, rows: Iterable[tuple[bytes, int]]) -> int:
    """Write encoded images with their class ids as they come; return how many. Same images make the same file."""
    images: list[bytes] = []
    labels: list[int] = []
    number = size = 0
    with pq.ParquetWriter(path, SPLIT) as writer:

        def write_group() -> None:
            writer.write_table(pa.table({"image": images, "label": labels}, schema=SPLIT))
            images.clear()
            labels.clear()

        for image, label in rows:
            if images and (len(images) == GROUP_IMAGES or size + len(image) > GROUP_BYTES):
                write_group()
                size = 0
            images.append(image)
            labels.append(label)
            size += len(image)
            number += 1
        if images:
            write_group()
    return number


def relabel_split(path: Path, becomes: Mapping[int, int]) -> None:
    """Write a split again with other class ids, `becomes` of each of its own."""
    split, new = SplitImages(path), path.with_suffix(".new")
    write_rows(new, ((split.encoded(row), becomes[int(label)]) for row, label in enumerate(split.labels)))
    new.replace(path)
