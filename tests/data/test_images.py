"""Every kind of image becomes 8-bit RGB, and damaged ones are told apart."""

import io
import struct

import numpy as np
import pytest
from data.image_sets import encoded, noise
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from profiling_agent.data.images import decode_rgb
from profiling_agent.data.pixels import upright_rgb
from profiling_agent.errors import CorruptImageError


@pytest.mark.parametrize(("dtype", "top", "kind"), [(np.uint16, 65535, "PNG"), (np.float32, 1.0, "TIFF")])
def test_gray_of_sixteen_bits_or_floats_keeps_its_shades(dtype, top, kind):
    decoded = decode_rgb(encoded(np.linspace(0, top, 16).reshape(4, 4).astype(dtype), kind))
    assert decoded.mode == "RGB"
    red = np.asarray(decoded)[..., 0].ravel()
    assert np.abs(red.astype(int) - np.linspace(0, 255, 16)).max() <= 1


@pytest.mark.parametrize("mode", ["L", "1", "LA", "RGBA", "P", "CMYK"])
def test_other_modes_become_rgb(mode):
    data = encoded(Image.new("RGB", (4, 6), (255, 0, 0)).convert(mode), "TIFF" if mode == "CMYK" else "PNG")
    decoded = decode_rgb(data)
    assert decoded.mode == "RGB"
    if mode in ("RGBA", "P", "CMYK"):
        assert decoded.getpixel((0, 0)) == (255, 0, 0)


def test_a_palette_keeps_its_colours_and_its_transparency_raises_no_warning():
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30])
    assert decode_rgb(encoded(palette, transparency=b"\xff\x80")).getpixel((0, 0)) == (10, 200, 30)


NOISE = noise(np.random.default_rng(3), 24, 16)


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_of_any_orientation_is_turned_as_pillow_turns_it_and_only_once(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(NOISE, kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    decoded = decode_rgb(data)
    for image in (decoded, upright_rgb(decoded)):
        assert (image.size, image.tobytes()) == (expected.size, expected.tobytes())


def png_text(key, value):
    info = PngInfo()
    info.add_text(key, value)
    return info


# Where a JPEG's header has the resolution, Pillow doesn't look for it in the EXIF, and stumbles when it is asked for that.
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"dpi": (72, 72), "exif": b"Exif\0\0XX*\0" + bytes(20)}),
        ("PNG", {"pnginfo": png_text("Raw profile type exif", "\nexif\n   4\nno digits\n")}),
    ],
)
def test_an_image_with_a_broken_exif_block_is_read_as_it_lies(kind, options):
    data = encoded(NOISE, kind, **options)
    with pytest.raises((SyntaxError, ValueError, struct.error)):
        Image.open(io.BytesIO(data)).getexif()
    assert decode_rgb(data).tobytes() == decode_rgb(encoded(NOISE, kind)).tobytes()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "PPM"])
def test_an_image_that_was_cut_short_is_refused(kind):
    whole = encoded(noise(np.random.default_rng(0), 32, 32), kind)
    with pytest.raises(CorruptImageError):
        decode_rgb(whole[: len(whole) // 8])


@pytest.mark.parametrize("kind", ["DDS", "ICO", "TGA", "EPS"])
def test_a_format_that_pictures_are_not_kept_in_is_no_image(kind):
    with pytest.raises(CorruptImageError):
        decode_rgb(encoded(Image.new("RGB", (32, 32)), kind))


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (encoded(NOISE), "DecompressionBombError .*exceeds limit"),
        # Pillow's message names an object, which is another the next time.
        (b"no image", "^its beginning is damaged, or of no format that is read$"),
        (b"", "^it is empty$"),
    ],
)
def test_an_image_that_is_refused_has_the_reason(data, why, monkeypatch):
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 24 * 16 // 2 - 1)
    with pytest.raises(CorruptImageError, match=why):
        decode_rgb(data)
