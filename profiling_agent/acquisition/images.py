"""Images: decoded, and stored as a split. No torch here."""

import io
import warnings
from bisect import bisect_right
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError

from profiling_agent.acquisition.pixels import upright_rgb
from profiling_agent.errors import ArtifactError, CorruptImageError
from profiling_agent.files import open_regular
from profiling_agent.foreign import foreign_code

# What pictures are kept in, and nothing that starts another program (EPS) or that few ever decode: Pillow has 43.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
# As many as Pillow opens, twice what it warns of: 716 MB as it holds them. A flat PNG of any size has a few kilobytes.
MAX_PIXELS = 178_956_970
# More than 8 bits become 8 by way of several copies as float64.
MAX_DEEP_PIXELS = MAX_PIXELS // 3
# Fifty megapixels of RGB, uncompressed, and their header; larger ones are kept compressed.
MAX_ENCODED = 150_000_000 + 2**20
SPLIT = pa.schema({"image": pa.binary(), "label": pa.int64()})
# Of a split that is written or read so many images are in memory, or of so many bytes, and one at least: a row group.
GROUP_IMAGES, GROUP_BYTES = 64, 2**25


def decode_rgb(data: bytes) -> Image.Image:
    """Return the image as 8-bit RGB, upright; a moving image's first frame.

    Raises:
        CorruptImageError: the bytes are damaged, of no format in FORMATS, or of more than MAX_PIXELS pixels, or of more than
            MAX_DEEP_PIXELS with more than 8 bits.
    """
    if len(data) > MAX_ENCODED:
        raise CorruptImageError(f"it has {len(data):,} bytes, {MAX_ENCODED:,} are read")
    try:
        with warnings.catch_warnings(), foreign_code(CorruptImageError):
            # Pillow warns of images that are half as large as those that it refuses, and of odd metadata (which we don't use).
            warnings.simplefilter("ignore")
            return _decoded(data)
    # A header that lies about a size, or an honest one on a small machine.
    except MemoryError as error:
        raise CorruptImageError("it asks for more memory than there is") from error


def _decoded(data: bytes) -> Image.Image:
    with _opened(data) as opened:
        width, height = opened.size
        most = MAX_DEEP_PIXELS if opened.mode.startswith(("I", "F")) else MAX_PIXELS
        if width * height > most:
            raise CorruptImageError(f"it has {width}x{height} pixels of mode {opened.mode}, {most:,} are read")
        return upright_rgb(opened)


def _opened(data: bytes) -> Image.Image:
    """Return an image of which the header alone was read."""
    try:
        return Image.open(io.BytesIO(data), formats=FORMATS)
    # Pillow's own words name an object in memory.
    except UnidentifiedImageError as error:
        raise CorruptImageError("its beginning is damaged, or of no format that is read") from error
    except Image.DecompressionBombError as error:
        raise CorruptImageError(f"it has more than the {MAX_PIXELS:,} pixels that are read") from error


class SplitImages:
    """A drawn split: `labels` are the model's class ids, images are read and decoded when asked for.

    One row group is in memory, so that images are best asked for in their order.
    """

    def __init__(self, path: Path) -> None:
        """Read all but the images; see `read_split`."""
        with _reading(path):
            # Arrow would wait for a FIFO.
            open_regular(path, max_bytes=None).close()
            self._file = pq.ParquetFile(path)
            _checked(self._file.schema_arrow.empty_table().select(SPLIT.names))
            self.labels: NDArray[np.int64] = np.asarray(_checked(self._file.read(["label"]))["label"], dtype=np.int64)
        described = self._file.metadata
        sizes = (described.row_group(number).num_rows for number in range(described.num_row_groups))
        self._starts = tuple(accumulate(sizes, initial=0))
        self._path = path
        self._held: tuple[int, pa.ChunkedArray] | None = None

    def __len__(self) -> int:
        """Return the number of images."""
        return len(self.labels)

    def encoded(self, row: int) -> bytes:
        """Return one image's bytes; ArtifactError where they can't be read."""
        number = bisect_right(self._starts, row) - 1
        if self._held is None or self._held[0] != number:
            # Two groups at once would be twice the memory.
            self._held = None
            with _reading(self._path):
                self._held = number, _checked(self._file.read_row_group(number, ["image"]))["image"]
        return self._held[1][row - self._starts[number]].as_py()

    def image(self, row: int) -> Image.Image:
        """Return one image as 8-bit RGB; CorruptImageError as `decode_rgb`, ArtifactError where its bytes can't be read."""
        return decode_rgb(self.encoded(row))


def write_split(path: Path, images: Iterable[bytes], labels: Iterable[int]) -> None:
    """Write encoded images and their class ids, in this order."""
    write_rows(path, zip(images, labels, strict=True))


def write_rows(path: Path, rows: Iterable[tuple[bytes, int]]) -> int:
    """Write encoded images, each with its class id, as they come, and return how many; a row group is in memory.

    Where a row group ends follows from the images alone: the same ones make the same file.
    """
    with pq.ParquetWriter(path, SPLIT) as writer:
        number = 0
        for table in _grouped(rows):
            writer.write_table(table)
            number += len(table)
    return number


def _grouped(rows: Iterable[tuple[bytes, int]]) -> Iterator[Any]:
    images: list[bytes] = []
    labels: list[int] = []
    size = 0
    for image, label in rows:
        if images and (len(images) == GROUP_IMAGES or size + len(image) > GROUP_BYTES):
            yield pa.table({"image": images, "label": labels}, schema=SPLIT)
            images, labels, size = [], [], 0
        images.append(image)
        labels.append(label)
        size += len(image)
    if images:
        yield pa.table({"image": images, "label": labels}, schema=SPLIT)


def read_split(path: Path) -> SplitImages:
    """Return the split that was written to `path`.

    Raises:
        ArtifactError: the file is missing, damaged, or no split of ours.
    """
    return SplitImages(path)


@contextmanager
def _reading(path: Path) -> Generator[None]:
    try:
        yield
    # Of columns that aren't there Arrow says that names don't match, in an error without a name of its own.
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise ArtifactError(f"split {str(path)!r} can't be read ({type(error).__name__}): run again") from error


def _checked(table: Any) -> Any:
    """Return some columns of a split, as they have to be; what `_reading` makes an error of where they aren't."""
    table = table.cast(pa.schema([SPLIT.field(name) for name in table.column_names]))
    # A file says itself where in it an image begins; Arrow believes it until it is asked.
    table.validate(full=True)
    if any(table[column].null_count for column in table.column_names):
        raise pa.ArrowInvalid("a row without an image or a label")
    return table
