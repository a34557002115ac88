"""Encoded bytes to what an image processor takes."""

import io
import struct
import warnings
import zlib

import numpy as np
from PIL import Image, ImageOps

# What Pillow's decoders raise on damaged files, found by feeding them cut and overwritten ones.
UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    IndexError,
    struct.error,
    zlib.error,
    Image.DecompressionBombError,
)


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
        One of UNREADABLE: the bytes are damaged, of no known format, or claim an absurd size.
    """
    with warnings.catch_warnings():
        # Pillow warns of large images (we want them; absurd ones raise) and of odd metadata (which we don't use).
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data)) as opened:
            image = ImageOps.exif_transpose(opened)
            if image.mode.startswith(("I", "F")):
                image = _eight_bit(image)
            if image.mode == "P":
                # Transparency given as bytes survives only this way; going straight to RGB warns.
                image = image.convert("RGBA")
            return image.convert("RGB")
