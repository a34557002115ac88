"""Images as a model takes them, by numpy and pillow alone; `profiling-agent export` puts this very file beside a model."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

RESAMPLE = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def prepare(images: Sequence[Image.Image], how: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return pixel values, float32 (n, channels, height, width), of images; `how` is what `preprocessing.json` says.

    An image is resized (to a height and a width, or its shorter edge to a length), cropped in the middle, and of each
    channel, from 0 to 1, `mean` is taken and `std` divides what is left.
    """
    return np.stack([_prepared(image.convert("RGB"), how) for image in images])


def _prepared(image: Image.Image, how: Mapping[str, Any]) -> NDArray[np.float32]:
    if (resize := how["resize"]) is not None:
        height, width = _edges(image, resize) if isinstance(resize, int) else resize
        image = image.resize((width, height), RESAMPLE[how["resample"]])
    if (crop := how["crop"]) is not None:
        height, width = crop
        left, top = (image.width - width) // 2, (image.height - height) // 2
        # What lies outside of a smaller image is black.
        image = image.crop((left, top, left + width, top + height))
    channels = np.asarray(image, np.float32).transpose(2, 0, 1)[:: -1 if how["channels"] == "BGR" else 1] / 255
    mean, std = (np.asarray(how[name], np.float32).reshape(3, 1, 1) for name in ("mean", "std"))
    return ((channels - mean) / std).astype(np.float32)


def _edges(image: Image.Image, shortest: int) -> tuple[int, int]:
    """Return height and width of an image whose shorter edge is to be so long."""
    if image.width <= image.height:
        return int(shortest * image.height / image.width), shortest
    return shortest, int(shortest * image.width / image.height)
