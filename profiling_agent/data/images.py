"""Encoded images: decoding to RGB, and parquet files of images with labels. This module does not import torch."""

import io
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Iterable, Mapping
from itertools import accumulate
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from profiling_agent.data.pixels import METADATA_ERRORS, upright_rgb
from profiling_agent.errors import CorruptImageError

# Usual image formats, none of which starts another program as EPS does; Pillow supports 43.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
# Errors that Pillow raises for damaged images.
DECODE_ERRORS = (*METADATA_ERRORS, RuntimeError, MemoryError, zlib.error)
SCHEMA = pa.schema({"image": pa.binary(), "label": pa.int64()})
# The size of a row group: at most 64 images or 32 MiB, but at least one image. One group is in memory at a time.
GROUP_IMAGES, GROUP_BYTES = 64, 2**25


def decode_rgb(data: bytes) -> Image.Image:
    """Decode an image's first frame as upright 8-bit RGB; CorruptImageError if it is damaged, too large or of an unknown format."""
    with warnings.catch_warnings():
        # Pillow warns about images over half of its size limit, and about odd metadata.
        warnings.simplefilter("ignore")
        try:
            with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
                return upright_rgb(opened)
        # Pillow's message names an object in memory.
        except UnidentifiedImageError as error:
            raise CorruptImageError("its beginning is damaged, or of no format that is read") from error
        except Image.DecompressionBombError as error:
            raise CorruptImageError("it has more pixels than are read") from error
        except DECODE_ERRORS as error:
            raise CorruptImageError(f"{type(error).__name__} ({str(error)!r})") from error


class SplitImages:
    """A drawn split on disk: `labels` are the model's class ids; images are read and decoded on request.

    One row group is in memory, so request images in order.
    """

    def __init__(self, path: Path) -> None:
        self._file = pq.ParquetFile(path)
        self.labels: NDArray[np.int64] = np.asarray(self._file.read(["label"])["label"], dtype=np.int64)
        metadata = self._file.metadata
        sizes = (metadata.row_group(group).num_rows for group in range(metadata.num_row_groups))
        self._starts = tuple(accumulate(sizes, initial=0))
        self._group: tuple[int, pa.ChunkedArray] | None = None

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, row: int) -> bytes:
        """Return one image's bytes."""
        group = bisect_right(self._starts, row) - 1
        if self._group is None or self._group[0] != group:
            # Two groups at once would be twice the memory.
            self._group = None
            self._group = group, self._file.read_row_group(group, ["image"])["image"]
        return self._group[1][row - self._starts[group]].as_py()

    def image(self, row: int) -> Image.Image:
        """Return one image as 8-bit RGB; CorruptImageError if it can't be decoded."""
        return decode_rgb(self.encoded(row))


def write_rows(path: Path, rows: Iterable[tuple[bytes, int]]) -> int:
    """Write encoded images with their class ids and return their number; the same images give the same bytes."""
    images: list[bytes] = []
    labels: list[int] = []
    count = size = 0
    with pq.ParquetWriter(path, SCHEMA) as writer:

        def write_group() -> None:
            writer.write_table(pa.table({"image": images, "label": labels}, schema=SCHEMA))
            images.clear()
            labels.clear()

        for image, label in rows:
            if images and (len(images) == GROUP_IMAGES or size + len(image) > GROUP_BYTES):
                write_group()
                size = 0
            images.append(image)
            labels.append(label)
            size += len(image)
            count += 1
        if images:
            write_group()
    return count


def relabel_split(path: Path, becomes: Mapping[int, int]) -> None:
    """Rewrite a split with new class ids: `becomes` maps each old id to its new one."""
    split, rewritten = SplitImages(path), path.with_suffix(".new")
    write_rows(rewritten, ((split.encoded(row), becomes[int(label)]) for row, label in enumerate(split.labels)))
    rewritten.replace(path)
