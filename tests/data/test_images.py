"""Every kind of image becomes 8-bit RGB, and damaged ones are told apart."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageOps
from PIL.PngImagePlugin import PngInfo

from profiling_agent.data.images import decode_rgb
from profiling_agent.data.pixels import upright_rgb
from profiling_agent.errors import CorruptImageError


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


@pytest.mark.parametrize(("dtype", "top", "kind"), [(np.uint16, 65535, "PNG"), (np.float32, 1.0, "TIFF")])
def test_gray_of_sixteen_bits_or_floats_keeps_its_shades(dtype, top, kind):
    ramp = np.linspace(0, top, 16).reshape(4, 4).astype(dtype)
    decoded = decode_rgb(encoded(Image.fromarray(ramp), kind))
    assert decoded.mode == "RGB"
    red = np.asarray(decoded)[..., 0].ravel()
    assert np.abs(red.astype(int) - np.linspace(0, 255, 16)).max() <= 1


@pytest.mark.parametrize("mode", ["L", "1", "LA", "RGBA", "P"])
def test_other_modes_become_rgb(mode):
    assert decode_rgb(encoded(Image.new("RGB", (4, 6), (200, 200, 200)).convert(mode))).mode == "RGB"


def test_a_palette_keeps_its_colours_and_its_transparency_raises_no_warning():
    palette = Image.new("P", (4, 4), 1)
    palette.putpalette([0, 0, 0, 10, 200, 30])
    decoded = decode_rgb(encoded(palette, transparency=b"\xff\x80"))
    assert decoded.getpixel((0, 0)) == (10, 200, 30)


def test_cmyk_is_turned_to_rgb():
    decoded = decode_rgb(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))
    pixel = decoded.getpixel((4, 4))
    assert isinstance(pixel, tuple)
    red, green, blue = pixel
    assert red > 200
    assert max(green, blue) < 60


def noise():
    return Image.fromarray(np.random.default_rng(3).integers(0, 256, (16, 24, 3), dtype=np.uint8))


@pytest.mark.parametrize("kind", ["JPEG", "PNG", "WEBP", "TIFF"])
@pytest.mark.parametrize("orientation", range(1, 9))
def test_an_image_of_any_orientation_is_turned_as_pillow_turns_it_and_only_once(kind, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encoded(noise(), kind, exif=exif)
    expected = ImageOps.exif_transpose(Image.open(io.BytesIO(data))).convert("RGB")
    decoded = decode_rgb(data)
    for image in (decoded, upright_rgb(decoded)):
        assert (image.size, image.tobytes()) == (expected.size, expected.tobytes())


def test_an_orientation_that_xmp_tells_is_followed_once():
    decoded = decode_rgb(encoded(Image.new("RGB", (10, 4)), "JPEG", xmp=b'<x tiff:Orientation="6"/>'))
    assert decoded.size == upright_rgb(decoded).size == (4, 10)


def test_an_orientation_beside_a_tag_that_can_not_be_written_again_is_followed():
    # A width of letters, and the orientation 6.
    width, turned = struct.pack("<HHL4s", 0x0100, 2, 4, b"abc"), struct.pack("<HHLHH", 0x0112, 3, 1, 6, 0)
    exif = b"Exif\0\0II*\0" + struct.pack("<LH", 8, 2) + width + turned + bytes(4)
    upright = decode_rgb(encoded(noise(), "JPEG")).transpose(Image.Transpose.ROTATE_270)
    assert decode_rgb(encoded(noise(), "JPEG", exif=exif)).tobytes() == upright.tobytes()


def png_text(key, value):
    info = PngInfo()
    info.add_text(key, value)
    return info


# Where a JPEG's header has the resolution, Pillow doesn't look for it in the EXIF, and stumbles when it is asked for that.
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("JPEG", {"dpi": (72, 72), "exif": b"Exif\0\0XX*\0" + bytes(20)}),
        ("JPEG", {"dpi": (72, 72), "exif": b"Exif\0\0II*\0\x08"}),
        ("JPEG", {"dpi": (72, 72), "exif": b"Exif\0\0II+\0" + bytes(4)}),
        ("PNG", {"pnginfo": png_text("Raw profile type exif", "\nexif\n   4\nno digits\n")}),
    ],
)
def test_an_image_with_a_broken_exif_block_is_read_as_it_lies(kind, options):
    data = encoded(noise(), kind, **options)
    with pytest.raises((SyntaxError, ValueError, struct.error)):
        Image.open(io.BytesIO(data)).getexif()
    assert decode_rgb(data).tobytes() == decode_rgb(encoded(noise(), kind)).tobytes()


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "PPM"])
def test_an_image_that_was_cut_short_is_refused(kind):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    whole = encoded(Image.fromarray(pixels), kind)
    with pytest.raises(CorruptImageError):
        decode_rgb(whole[: len(whole) // 8])


@pytest.mark.parametrize("kind", ["DDS", "BLP", "ICO", "TGA", "EPS"])
def test_a_format_that_pictures_are_not_kept_in_is_no_image_damaged_or_whole(kind):
    image = Image.new("P" if kind == "BLP" else "RGB", (32, 32))
    whole = encoded(image, kind)
    for data in (whole, whole[:60], whole[: len(whole) // 2]):
        with pytest.raises(CorruptImageError):
            decode_rgb(data)


def flat_png(width, height, bits):
    """Return a black PNG, gray, of so many bits a pixel: a few kilobytes."""
    packed = zlib.compressobj(9)
    row = bytes(1 + -(-width * bits // 8))
    body = b"".join(packed.compress(row) for _ in range(height)) + packed.flush()
    header = struct.pack(">IIBBBBB", width, height, bits, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", body), (b"IEND", b""))
    chunks = [
        struct.pack(">I", len(held)) + kind + held + struct.pack(">I", zlib.crc32(kind + held)) for kind, held in parts
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(chunks)


def test_an_image_that_pillow_warns_of_is_read_without_a_warning():
    side = 9500
    assert Image.MAX_IMAGE_PIXELS is not None
    assert Image.MAX_IMAGE_PIXELS < side**2 < 2 * Image.MAX_IMAGE_PIXELS
    assert decode_rgb(flat_png(side, side, 1)).size == (side, side)


def test_an_image_of_more_pixels_than_are_read_is_refused_by_its_header():
    side = 13_400
    with pytest.raises(CorruptImageError, match="it has more pixels than are read"):
        decode_rgb(flat_png(side, side, 1))


def test_why_an_image_is_refused_names_nothing_that_is_other_the_next_time():
    refusals = []
    for data in (b"no image", b""):
        with pytest.raises(CorruptImageError) as refused:
            decode_rgb(data)
        refusals.append(str(refused.value))
    assert refusals == ["its beginning is damaged, or of no format that is read"] * 2
