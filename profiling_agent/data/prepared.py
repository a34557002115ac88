"""Prepared images: decoded and processed once, then read in batches by every process of a run; imports torch only on use.

`pixels.npy` holds a shard's pixel values, (n, channels, height, width), and is memory-mapped. Pixel values of 8-bit images
take at most 256 values a channel: each is stored as one byte, and `labels.safetensors` has the table that decodes it
bit for bit. Every pixel is checked; if one can't be decoded, the file holds float32.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.io import replacing, write_bytes
from profiling_agent.lib.logs import Progress, silent

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

    from profiling_agent.data.images import SplitImages


PIXELS, LABELS = "pixels.npy", "labels.safetensors"
# The images decoded and processed at once, at least one. Four photographs of 12 megapixels take 192 MB, and processors copy.
MAX_BATCH_IMAGES, MAX_BATCH_PIXELS = 32, 50_000_000
NUM_CODES = 256

Pixels = NDArray[np.float32]
Labels = NDArray[np.int64]


class _UncodableError(Exception):
    """Pixel values with more than 256 distinct values in a channel."""


class _ByteCodec:
    """Pixel values as one byte each: the processor's settings suggest the byte, and the decoding table is filled and checked."""

    def __init__(self, processor: Any) -> None:
        self._factor = getattr(processor, "rescale_factor", 1.0) if getattr(processor, "do_rescale", False) else 1.0
        is_normal = getattr(processor, "do_normalize", False)
        self._mean = getattr(processor, "image_mean", 0.0) if is_normal else 0.0
        self._deviation = getattr(processor, "image_std", 1.0) if is_normal else 1.0
        self.table: Pixels | None = None

    def encode(self, values: Pixels) -> NDArray[np.uint8]:
        """Encode each value as one byte; _UncodableError if decoding does not give it back."""
        num_channels = values.shape[1]
        try:
            mean, deviation = (
                np.broadcast_to(np.asarray(setting, np.float32), (num_channels,))[:, None, None]
                for setting in (self._mean, self._deviation)
            )
            with np.errstate(all="ignore"):
                estimates = np.rint((values * deviation + mean) / np.float32(self._factor))
        except (TypeError, ValueError) as error:
            raise _UncodableError from error
        if not np.isfinite(estimates).all():
            raise _UncodableError
        codes = estimates.clip(0, NUM_CODES - 1).astype(np.uint8)
        if self.table is None:
            self.table = np.full((num_channels, NUM_CODES), np.nan, np.float32)
        for channel, known in enumerate(self.table[:num_channels]):
            code, value, extended = codes[:, channel], np.ascontiguousarray(values[:, channel]), known.copy()
            extended[code] = value
            known[:] = np.where(np.isnan(known), extended, known)
            # Compared as bits, since zero has two signs.
            if not np.array_equal(known[code].view(np.uint32), value.view(np.uint32)):
                raise _UncodableError
        return codes


def to_processor_channels(image: "Image", processor: Any) -> "Image":
    """Convert an RGB image to the processor's channels: to gray if its `image_mean` has one channel."""
    mean = getattr(processor, "image_mean", None)
    return image.convert("L") if isinstance(mean, list | tuple) and len(mean) == 1 else image


def write_prepared(
    folder: Path, split: "SplitImages", rows: range, processor: Any, *, progress: Progress = silent
) -> tuple[tuple[int, ...], str]:
    """Process these images and write them into `folder`, with their labels; return the array's shape and dtype.

    Raises:
        ArtifactError: the processor refuses an image, or gives images of different shapes.
        CorruptImageError: an image can't be decoded.
        OSError: the file can't be written.
    """
    codec = _ByteCodec(processor)
    try:
        shape = _write_pixels(folder / PIXELS, split, rows, processor, codec, progress)
        table = codec.table
    except _UncodableError:
        shape, table = _write_pixels(folder / PIXELS, split, rows, processor, None, progress), None
    labels = np.ascontiguousarray(split.labels[rows.start : rows.stop])
    tables = {} if table is None else {"table": np.nan_to_num(table)}
    write_bytes(folder / LABELS, save({"labels": labels} | tables))
    return shape, "float32" if table is None else "uint8"


def _write_pixels(
    path: Path, split: "SplitImages", rows: range, processor: Any, codec: _ByteCodec | None, progress: Progress
) -> tuple[int, ...]:
    """Write the array batch by batch: on a full disk, writing into mapped memory would kill the process."""
    shape: tuple[int, ...] | None = None
    with replacing(path) as stream:
        done = 0
        for values in processed_batches(split, rows, processor):
            encoded = values if codec is None else codec.encode(values)
            if shape is None:
                shape = (len(rows), *values.shape[1:])
                dtype = np.lib.format.dtype_to_descr(encoded.dtype)
                header = {"descr": dtype, "fortran_order": False, "shape": shape}
                np.lib.format.write_array_header_1_0(stream, header)
            if values.shape[1:] != shape[1:]:
                raise ArtifactError(
                    f"the model's image processor gives images of the shapes {shape[1:]!r} and {values.shape[1:]!r}: "
                    "let it resize or crop them to one"
                )
            stream.write(np.ascontiguousarray(encoded).data)
            done += len(values)
            progress("preparing images", done, len(rows))
    assert shape is not None, "a shard has an image at least"
    return shape


def processed_batches(split: "SplitImages", rows: range, processor: Any) -> Iterator[Pixels]:
    """Yield the pixel values of the rows, in order, in batches of as many images as may be decoded at once."""
    images: list[Image] = []
    for row in rows:
        image = to_processor_channels(split.image(row), processor)
        num_pixels = sum(decoded.width * decoded.height for decoded in (*images, image))
        if images and (len(images) == MAX_BATCH_IMAGES or num_pixels > MAX_BATCH_PIXELS):
            values = _process(images, range(row - len(images), row), processor)
            images.clear()
            yield values
        images.append(image)
    yield _process(images, range(rows.stop - len(images), rows.stop), processor)


def _process(images: "Sequence[Image]", rows: range, processor: Any) -> Pixels:
    try:
        values = np.asarray(processor(images=images, return_tensors="np")["pixel_values"], np.float32)
    except (LookupError, RuntimeError, TypeError, ValueError) as error:
        raise ArtifactError(
            f"the model's image processor can't process images {rows.start} to {rows.stop - 1} "
            f"({type(error).__name__}: {error})"
        ) from error
    if values.ndim != 4 or len(values) != len(rows):
        raise ArtifactError(
            f"the model's image processor gives an array of the shape {values.shape!r} for {len(rows)} images"
        )
    return values


class PreparedImages:
    """The images of several shards, one shard after the other; pixels are read from disk on request."""

    def __init__(self, folders: Sequence[Path]) -> None:
        """Open folders written by `write_prepared`; ArtifactError if shapes differ."""
        self._pixels = [np.load(folder / PIXELS, mmap_mode="r", allow_pickle=False) for folder in folders]
        self._arrays = [load_file(folder / LABELS) for folder in folders]
        shapes = {pixels.shape[1:] for pixels in self._pixels}
        if len(shapes) > 1:
            raise ArtifactError(f"the prepared images have the shapes {sorted(shapes)!r}: let the processor give one")
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
            if table is None:
                values[index] = pixels
            else:
                for channel, channel_values in enumerate(table):
                    channel_values.take(pixels[channel], out=values[index, channel], mode="clip")
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


def shuffled_batches(images: PreparedImages, *, batch_size: int, seed: int) -> "Callable[[int], Iterator[Tensor]]":
    """Return a function of the epoch that yields pixel_values, float32 (b, c, h, w): every image once, in a seeded order."""
    import torch

    def epoch_batches(epoch: int) -> "Iterator[Tensor]":
        order = np.random.default_rng([seed, epoch]).permutation(len(images)).tolist()
        for start in range(0, len(order), batch_size):
            yield torch.from_numpy(images.pixel_values(order[start : start + batch_size]))

    return epoch_batches
