"""Images on disk: decoded to RGB, drawn splits in Arrow files, and pixel values prepared once for every process of a run.

`pixels.npy` holds a shard's pixel values, (n, channels, height, width), and is memory-mapped. If the processor maps each byte of a
resized image to one value, bytes are stored, and `labels.safetensors` has the table that maps them, bit for bit; else float32.
pyarrow and torch are imported only on use: the process that a user starts imports this module.
"""

import io
import warnings
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image, UnidentifiedImageError
from safetensors.numpy import load_file, save

from profiling_agent.data.pixels import METADATA_ERRORS, upright_rgb
from profiling_agent.errors import ArtifactError, CorruptImageError
from profiling_agent.lib.io import replacing, write_bytes
from profiling_agent.lib.logs import Progress, silent, third_party_errors

if TYPE_CHECKING:
    from torch import Tensor

# Usual image formats, none of which starts another program as EPS does; Pillow supports 43.
FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF", "PPM")
# The size of a record batch, one of which is in memory while a split is written.
GROUP_IMAGES, GROUP_BYTES = 64, 2**25
PIXELS, LABELS = "pixels.npy", "labels.safetensors"
# The images decoded and processed at once. Four photographs of 12 megapixels take 192 MB, and processors copy.
MAX_BATCH_IMAGES, MAX_BATCH_PIXELS = 32, 50_000_000

Pixels = NDArray[np.float32]
Labels = NDArray[np.int64]
ItemT = TypeVar("ItemT")


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
            problem = "its beginning is damaged, or of no format that is read" if data else "it is empty"
            raise CorruptImageError(problem) from error
        except (*METADATA_ERRORS, Image.DecompressionBombError, RuntimeError, MemoryError, zlib.error) as error:
            raise CorruptImageError(f"{type(error).__name__} ({str(error)!r})") from error


def _grouped(
    items: Iterable[ItemT], size_of: Callable[[ItemT], int], max_items: int, max_size: int
) -> Iterator[list[ItemT]]:
    """Yield lists of consecutive items within both limits, or of one item."""
    group: list[ItemT] = []
    total = 0
    for item in items:
        size = size_of(item)
        if group and (len(group) == max_items or total + size > max_size):
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group


class SplitImages:
    """A drawn split on disk, memory-mapped: `labels` are the model's class ids; images are decoded on request."""

    def __init__(self, path: Path) -> None:
        import pyarrow as pa

        table = pa.ipc.open_file(pa.memory_map(str(path))).read_all()
        self._images: Any = table["image"]
        self.labels: Labels = np.asarray(table["label"], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.labels)

    def encoded(self, row: int) -> bytes:
        """Return one image's bytes."""
        return self._images[row].as_py()

    def image(self, row: int) -> Image.Image:
        """Return one image as 8-bit RGB; CorruptImageError if it can't be decoded."""
        return decode_rgb(self.encoded(row))


def write_rows(path: Path, rows: Iterable[tuple[bytes, int]]) -> int:
    """Write encoded images with their class ids and return their number; the same images give the same bytes."""
    import pyarrow as pa

    schema, count = pa.schema({"image": pa.binary(), "label": pa.int64()}), 0
    with pa.ipc.new_file(path, schema) as writer:
        for group in _grouped(rows, lambda row: len(row[0]), GROUP_IMAGES, GROUP_BYTES):
            images, labels = zip(*group, strict=True)
            writer.write(pa.table({"image": images, "label": labels}, schema=schema))
            count += len(group)
    return count


def relabel_split(path: Path, becomes: Mapping[int, int]) -> None:
    """Rewrite a split with new class ids: `becomes` maps each old id to its new one."""
    split, rewritten = SplitImages(path), path.with_suffix(".new")
    write_rows(rewritten, ((split.encoded(row), becomes[int(label)]) for row, label in enumerate(split.labels)))
    rewritten.replace(path)


def to_processor_channels(image: Image.Image, processor: Any) -> Image.Image:
    """Convert an RGB image to the processor's channels: to gray if its `image_mean` has one channel."""
    mean = getattr(processor, "image_mean", None)
    return image.convert("L") if isinstance(mean, list | tuple) and len(mean) == 1 else image


def process(images: Sequence[Image.Image], processor: Any, **settings: bool) -> NDArray[Any]:
    """Return the processor's output, (n, channels, height, width); ArtifactError if it refuses the images."""
    with third_party_errors(lambda text: ArtifactError(f"the model's image processor can't process images, {text}")):
        values = np.asarray(processor(images=images, return_tensors="np", **settings)["pixel_values"])
    if values.ndim != 4 or len(values) != len(images):
        raise ArtifactError(f"the model's image processor gives the shape {values.shape!r} for {len(images)} images")
    return values


def _decode(codes: NDArray[np.uint8], table: Pixels) -> Pixels:
    """Return the table's values of bytes (channels, height, width)."""
    return np.stack([values.take(channel) for values, channel in zip(table, codes, strict=True)])


def _normalization_table(images: Sequence[Image.Image], processor: Any) -> Pixels | None:
    """Return the processor's value of each byte, (channels, 256); None unless these are its output for `images` to the bit."""
    # Some pad after they normalize, and only small images.
    if getattr(processor, "do_pad", False):
        return None
    ramp = Image.fromarray(np.arange(256, dtype=np.uint8).reshape(16, 16)).convert(images[0].mode)
    try:
        codes = process(images, processor, do_rescale=False, do_normalize=False)
        table = process([ramp], processor, do_resize=False, do_center_crop=False).astype(np.float32)[0]
        values = process(images, processor).astype(np.float32, copy=False)
    except ArtifactError:
        return None
    if codes.dtype != np.uint8 or codes.shape != values.shape or table.shape != (values.shape[1], 16, 16):
        return None
    table = table.reshape(-1, 256)
    decoded = np.stack([_decode(each, table) for each in codes])
    return table if decoded.tobytes() == values.tobytes() else None


def write_prepared(
    folder: Path, split: SplitImages, rows: range, processor: Any, *, progress: Progress = silent
) -> None:
    """Process these images and write them into `folder`, with their labels.

    Raises:
        ArtifactError: the processor refuses an image, or gives images of different shapes.
        CorruptImageError: an image can't be decoded.
        OSError: the file can't be written.
    """
    shape: tuple[int, ...] | None = None
    table, dtype, done = None, np.dtype(np.float32), 0
    # Batch by batch: on a full disk, writing into mapped memory would kill the process.
    with replacing(folder / PIXELS) as stream:
        pictures = (to_processor_channels(split.image(row), processor) for row in rows)
        for images in _grouped(pictures, lambda image: image.width * image.height, MAX_BATCH_IMAGES, MAX_BATCH_PIXELS):
            if shape is None:
                table = _normalization_table(images, processor)
                dtype = np.dtype(np.float32 if table is None else np.uint8)
            settings: dict[str, bool] = {} if table is None else {"do_rescale": False, "do_normalize": False}
            values = np.ascontiguousarray(process(images, processor, **settings), dtype)
            images.clear()
            if shape is None:
                shape = (len(rows), *values.shape[1:])
                header = {"descr": np.lib.format.dtype_to_descr(dtype), "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(stream, header)
            if values.shape[1:] != shape[1:]:
                raise ArtifactError(
                    f"the model's image processor gives images of the shapes {shape[1:]!r} and {values.shape[1:]!r}: "
                    "let it resize or crop them to one"
                )
            stream.write(values.data)
            done += len(values)
            progress("preparing images", done, len(rows))
    labels = np.ascontiguousarray(split.labels[rows.start : rows.stop])
    write_bytes(folder / LABELS, save({"labels": labels} | ({} if table is None else {"table": table})))


class PreparedImages:
    """The images of several shards, one shard after the other; pixels are read from disk on request."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Open folders written by `write_prepared`."""
        self._pixels = [np.load(folder / PIXELS, mmap_mode="r", allow_pickle=False) for folder in folders]
        self._arrays = [load_file(folder / LABELS) for folder in folders]
        self._starts = tuple(accumulate(map(len, self._pixels), initial=0))

    def __len__(self) -> int:
        return self._starts[-1]

    @property
    def labels(self) -> Labels:
        """Return the class id of each image."""
        return np.concatenate([np.empty(0, np.int64), *(arrays["labels"] for arrays in self._arrays)])

    def pixel_values(self, rows: Sequence[int]) -> Pixels:
        """Return the images at `rows`, at least one, as the model takes them: (n, channels, height, width)."""
        values = np.empty((len(rows), *self._pixels[0].shape[1:]), np.float32)
        for index, row in enumerate(rows):
            shard = bisect_right(self._starts, row) - 1
            pixels, table = self._pixels[shard][row - self._starts[shard]], self._arrays[shard].get("table")
            values[index] = pixels if table is None else _decode(pixels, table)
        return values

    def batches(self, batch_size: int, *, limit: int | None = None) -> Iterator[tuple[Pixels, Labels]]:
        """Yield pixel values and labels in order, of at most `limit` images; the last batch may be smaller."""
        labels, end = self.labels, len(self) if limit is None else min(limit, len(self))
        for start in range(0, end, batch_size):
            rows = range(start, min(start + batch_size, end))
            yield self.pixel_values(rows), labels[rows.start : rows.stop]


def iter_batches(
    images: PreparedImages, *, batch_size: int, limit: int | None = None
) -> "Iterator[tuple[Tensor, Tensor]]":
    """Yield pixel_values, float32 (b, c, h, w), and labels, int64 (b,), in order, of at most `limit` images."""
    import torch

    for pixel_values, labels in images.batches(batch_size, limit=limit):
        yield torch.from_numpy(pixel_values), torch.from_numpy(labels.copy())


def shuffled_batches(images: PreparedImages, epoch: int, *, batch_size: int, seed: int) -> "Iterator[Tensor]":
    """Yield pixel_values, float32 (b, c, h, w), of an epoch: every image once, in a seeded order."""
    import torch

    order = np.random.default_rng([seed, epoch]).permutation(len(images)).tolist()
    for start in range(0, len(order), batch_size):
        yield torch.from_numpy(images.pixel_values(order[start : start + batch_size]))
