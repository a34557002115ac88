"""Every kind of image becomes 8-bit RGB, and damaged ones are told apart."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image

from profiling_agent.acquisition.images import MAX_DEEP_PIXELS, MAX_ENCODED, MAX_PIXELS, decode_rgb
from profiling_agent.errors import CorruptImageError


def encoded(image, kind="PNG", **options):
    stream = io.BytesIO()
    image.save(stream, kind, **options)
    return stream.getvalue()


def ramp(dtype, top):
    return np.linspace(0, top, 16).reshape(4, 4).astype(dtype)


def test_sixteen_bit_gray_keeps_its_shades():
    decoded = decode_rgb(encoded(Image.fromarray(ramp(np.uint16, 65535))))
    assert decoded.mode == "RGB"
    red = np.asarray(decoded)[..., 0].ravel()
    assert np.abs(red.astype(int) - np.linspace(0, 255, 16)).max() <= 1


def test_float_gray_between_zero_and_one_keeps_its_shades():
    red = np.asarray(decode_rgb(encoded(Image.fromarray(ramp(np.float32, 1.0)), "TIFF")))[..., 0].ravel()
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


def test_an_image_that_was_stored_turned_stands_upright():
    exif = Image.Exif()
    exif[0x0112] = 6
    decoded = decode_rgb(encoded(Image.new("RGB", (10, 4)), "JPEG", exif=exif))
    assert decoded.size == (4, 10)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP", "AVIF", "PPM"])
def test_damaged_images_raise_one_error_whatever_the_decoder_makes_of_them(kind):
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), dtype=np.uint8)
    whole = encoded(Image.fromarray(pixels), kind)
    with pytest.raises(CorruptImageError):
        decode_rgb(whole[: len(whole) // 8])
    rng = np.random.default_rng(1)
    for _ in range(150):
        damaged = bytearray(whole)
        for place in rng.integers(0, len(whole), 8):
            damaged[place] = rng.integers(0, 256)
        try:
            assert decode_rgb(bytes(damaged)).mode == "RGB"
        except CorruptImageError:
            continue


def test_nothing_is_no_image():
    with pytest.raises(CorruptImageError):
        decode_rgb(b"")


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


def test_what_phones_call_fifty_megapixels_is_read():
    frame = Image.new("L", (8160, 6144))
    assert decode_rgb(encoded(frame, "JPEG")).size == frame.size


def test_an_image_that_pillow_warns_of_is_read_without_a_warning():
    side = 9500
    assert Image.MAX_IMAGE_PIXELS is not None
    assert Image.MAX_IMAGE_PIXELS < side**2 < MAX_PIXELS == 2 * Image.MAX_IMAGE_PIXELS
    assert decode_rgb(flat_png(side, side, 1)).size == (side, side)


def test_an_image_of_more_pixels_than_are_read_is_refused_by_its_header():
    side = 13_400
    assert side**2 > MAX_PIXELS
    with pytest.raises(CorruptImageError, match="it has more than the 178,956,970 pixels that are read"):
        decode_rgb(flat_png(side, side, 1))


def test_of_sixteen_bits_a_third_of_the_pixels_are_read():
    width = 7800
    assert width**2 > MAX_DEEP_PIXELS > 8192 * 6144
    with pytest.raises(CorruptImageError, match="it has 7800x7800 pixels of mode I;16, 59,652,323 are read"):
        decode_rgb(flat_png(width, width, 16))


def test_why_an_image_is_refused_names_nothing_that_is_other_the_next_time():
    refusals = []
    for data in (b"no image", b""):
        with pytest.raises(CorruptImageError) as refused:
            decode_rgb(data)
        refusals.append(str(refused.value))
    assert refusals == ["its beginning is damaged, or of no format that is read"] * 2


def test_an_image_of_more_bytes_than_its_pixels_could_take_is_refused_unread():
    with pytest.raises(CorruptImageError, match="bytes"):
        decode_rgb(encoded(Image.new("RGB", (4, 4))) + bytes(MAX_ENCODED))
