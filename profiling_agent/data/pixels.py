"""Image preprocessing with numpy and Pillow only; `profiling-agent export` copies this file next to a model, as `prepare.py`."""

import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

# Errors that Pillow raises for broken metadata of images that it can still decode.
METADATA_ERRORS = (ArithmeticError, LookupError, OSError, SyntaxError, TypeError, ValueError, struct.error)
RESAMPLE = {name.lower(): filter_ for name, filter_ in Image.Resampling.__members__.items()}


def upright_rgb(image: Image.Image) -> Image.Image:
    """Convert an image to 8-bit RGB, turned by its EXIF orientation; scale deeper pixels, and drop transparency."""
    image.load()
    # In place, as a photograph may have hundreds of megabytes. Pillow turns it before it writes its EXIF again, which may fail.
    with suppress(*METADATA_ERRORS):
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith(("I", "F")):
        image = _to_eight_bit(image)
    if image.mode == "P":
        # Keeps transparency that is given as bytes; converting straight to RGB warns.
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _to_eight_bit(image: Image.Image) -> Image.Image:
    """Convert a 16-bit, 32-bit or float image to 8-bit gray by scaling; Pillow's own conversion clips to white."""
    values = np.asarray(image, dtype=np.float64)
    brightest = values.max(initial=0)
    if image.mode.startswith("I;16") or brightest > 255:
        white = 65535.0
    else:
        white = 1.0 if image.mode == "F" and brightest <= 1 else 255.0
    return Image.fromarray(np.clip(np.rint(values * (255.0 / white)), 0, 255).astype(np.uint8))


def prepare(images: Sequence[Image.Image], how: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return pixel values, float32 (n, channels, height, width), of images; `how` holds the fields of `preprocessing.json`.

    An image is turned upright, resized (to a height and a width, or its shorter edge to a length), and cropped in the middle.
    Each channel is scaled to 0 to 1; then `mean` is subtracted, and the result divided by `std`.
    """
    return np.stack([_prepare_image(upright_rgb(image), how) for image in images])


def _prepare_image(image: Image.Image, how: Mapping[str, Any]) -> NDArray[np.float32]:
    if (resize := how["resize"]) is not None:
        height, width = _resized_edges(image, resize) if isinstance(resize, int) else resize
        image = image.resize((width, height), RESAMPLE[how["resample"]])
    if (crop := how["crop"]) is not None:
        height, width = crop
        left, top = (image.width - width) // 2, (image.height - height) // 2
        # The area outside a smaller image is black.
        image = image.crop((left, top, left + width, top + height))
    channels = np.asarray(image, np.float32).transpose(2, 0, 1)[:: -1 if how["channels"] == "BGR" else 1] / 255
    mean, std = (np.asarray(how[name], np.float32).reshape(3, 1, 1) for name in ("mean", "std"))
    return ((channels - mean) / std).astype(np.float32)


def _resized_edges(image: Image.Image, shortest: int) -> tuple[int, int]:
    if image.width <= image.height:
        return int(shortest * image.height / image.width), shortest
    return shortest, int(shortest * image.width / image.height)
