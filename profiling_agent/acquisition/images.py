"""Images: decoded, and stored as a split. No torch here."""

import io
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray
from PIL import Image, ImageOps

from profiling_agent.errors import ArtifactError, CorruptImageError
from profiling_agent.files import open_regular
from profiling_agent.foreign import foreign_code

# What pictures are kept in, and nothing that starts another program (EPS) or that few ever decode: Pillow has 43.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
# The largest sensors of phones give fifty megapixels: 150 MB of RGB. A flat PNG of any size has a few kilobytes.
MAX_PIXELS = 50_000_000
# Fifty megapixels of RGB, uncompressed, and their header.
MAX_ENCODED = 3 * MAX_PIXELS + 2**20
SPLIT = pa.schema({"image": pa.binary(), "label": pa.int64()})


def _eight_bit(image: Image.Image) -> Image.Image:
    """Return a 16-bit, 32-bit or float image as 8-bit gray; Pillow's own conversion clips them to white."""
    values = np.asarray(image, dtype=np.float64)
    brightest = values.max(initial=0)
    if image.mode.startswith("I;16") or brightest > 255:
        white = 65535.0
    else:
        white = 1.0 if image.mode == "F" and brightest <= 1 else 255.0
    return Image.fromarray(np.clip(np.rint(values * (255.0 / white)), 0, 255).astype(np.uint8))


def decode_rgb(data: bytes) -> Image.Image:
    """Return the image as 8-bit RGB, upright; a moving image's first frame.

    Raises:
        CorruptImageError: the bytes are damaged, of no format in FORMATS, or of more than MAX_PIXELS pixels.
    """
    if len(data) > MAX_ENCODED:
        raise CorruptImageError(f"it has {len(data):,} bytes, {MAX_ENCODED:,} are read")
    try:
        with warnings.catch_warnings(), foreign_code(CorruptImageError):
            # Pillow warns of large images (ours have a limit of their own) and of odd metadata (which we don't use).
            warnings.simplefilter("ignore")
            return _decoded(data)
    # A header that lies about a size; what an honest one of MAX_PIXELS takes is there.
    except MemoryError as error:
        raise CorruptImageError("it asks for more memory than there is") from error


def _decoded(data: bytes) -> Image.Image:
    with Image.open(io.BytesIO(data), formats=FORMATS) as opened:
        width, height = opened.size
        if width * height > MAX_PIXELS:
            raise CorruptImageError(f"it has {width}x{height} pixels, {MAX_PIXELS:,} are read")
        image = ImageOps.exif_transpose(opened)
        if image.mode.startswith(("I", "F")):
            image = _eight_bit(image)
        if image.mode == "P":
            # Transparency given as bytes survives only this way; going straight to RGB warns.
            image = image.convert("RGBA")
        return image.convert("RGB")


@dataclass(frozen=True, slots=True)
class SplitImages:
    """A drawn split: `labels` are the model's class ids, images are decoded when asked for."""

    labels: NDArray[np.int64]
    encoded: pa.ChunkedArray

    def __len__(self) -> int:
        return len(self.labels)

    def image(self, index: int) -> Image.Image:
        """Return one image as 8-bit RGB."""
        return decode_rgb(self.encoded[index].as_py())


def write_split(path: Path, images: list[bytes], labels: list[int]) -> None:
    """Write encoded images and their class ids, in this order."""
    pq.write_table(pa.table({"image": images, "label": labels}, schema=SPLIT), path, row_group_size=256)


def read_split(path: Path) -> SplitImages:
    """Return the split that was written to `path`.

    Raises:
        ArtifactError: the file is missing, damaged, or no split of ours.
    """
    try:
        # Arrow would wait for a FIFO.
        open_regular(path, max_bytes=None).close()
        table = pq.read_table(path, columns=["image", "label"]).cast(SPLIT)
        table.validate(full=True)
        if any(table[column].null_count for column in SPLIT.names):
            raise pa.ArrowInvalid("a row without an image or a label")
        return SplitImages(labels=np.asarray(table["label"], dtype=np.int64), encoded=table["image"])
    # Arrow says of columns that aren't there that names don't match, in an error without a name of its own.
    except (OSError, pa.ArrowException, ValueError, KeyError) as error:
        raise ArtifactError(f"split {str(path)!r} can't be read ({type(error).__name__}): run again") from error
