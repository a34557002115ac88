"""Images as a model takes them, by numpy and pillow alone; `profiling-agent export` copies this file next to a model, as `prepare.py`."""

import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

ORIENTATION = 0x0112
# How an image of each orientation but the first comes to stand upright.
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
# Where Pillow keeps what says an image's orientation.
NOTED = ("exif", "Raw profile type exif", "XML:com.adobe.xmp", "xmp")
# What Pillow raises where that is broken, of an image that it decodes all the same.
BROKEN = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    OSError,
    SyntaxError,
    TypeError,
    ValueError,
    struct.error,
)
RESAMPLE = {
    "nearest": Image.Resampling.NEAREST,
    "box": Image.Resampling.BOX,
    "bilinear": Image.Resampling.BILINEAR,
    "hamming": Image.Resampling.HAMMING,
    "bicubic": Image.Resampling.BICUBIC,
    "lanczos": Image.Resampling.LANCZOS,
}


def upright_rgb(image: Image.Image) -> Image.Image:
    """Return an image as 8-bit RGB, turned as its EXIF orientation says; more than 8 bits are scaled, and transparency is left out."""
    image.load()
    # What stands upright is not copied: a photograph may have hundreds of megabytes.
    if (turn := _turn(image)) is not None:
        image = image.transpose(turn)
        # Else whoever looks at it next would turn it once more. Pillow's own way of this writes the whole EXIF anew, and
        # can't where a tag is odd.
        for note in NOTED:
            image.info.pop(note, None)
    if image.mode.startswith(("I", "F")):
        image = _eight_bit(image)
    if image.mode == "P":
        # Transparency given as bytes survives only this way; going straight to RGB warns.
        image = image.convert("RGBA")
    return image if image.mode == "RGB" else image.convert("RGB")


def _turn(image: Image.Image) -> Image.Transpose | None:
    try:
        return TURNS.get(image.getexif().get(ORIENTATION, 1))
    except BROKEN:
        return None


def _eight_bit(image: Image.Image) -> Image.Image:
    """Return a 16-bit, 32-bit or float image as 8-bit gray; Pillow's own conversion clips them to white."""
    values = np.asarray(image, dtype=np.float64)
    brightest = values.max(initial=0)
    if image.mode.startswith("I;16") or brightest > 255:
        white = 65535.0
    else:
        white = 1.0 if image.mode == "F" and brightest <= 1 else 255.0
    return Image.fromarray(np.clip(np.rint(values * (255.0 / white)), 0, 255).astype(np.uint8))


def prepare(images: Sequence[Image.Image], how: Mapping[str, Any]) -> NDArray[np.float32]:
    """Return pixel values, float32 (n, channels, height, width), of images; `how` is what `preprocessing.json` says.

    An image is turned upright, resized (to a height and a width, or its shorter edge to a length), cropped in the middle,
    and of each channel, from 0 to 1, `mean` is taken and `std` divides what is left.
    """
    return np.stack([_prepared(upright_rgb(image), how) for image in images])


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
    if image.width <= image.height:
        return int(shortest * image.height / image.width), shortest
    return shortest, int(shortest * image.width / image.height)
