"""Preprocessing as plain numbers: what an image processor does, where resizing, cropping and scaling are all of it.

What a processor does follows from its code as much as from its settings, and some of the code is a model's own. So what it may
do is read from the settings and tried on images: the first guess that prepares all of them as it does is the answer.
"""

from collections.abc import Generator, Iterator
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from pydantic import Field

from profiling_agent.acquisition.pixels import RESAMPLE, prepare
from profiling_agent.errors import ArtifactError
from profiling_agent.records import InputSpec, Record

# In units of the prepared images, where a step of an 8-bit channel is 0.004 to 0.02.
TOLERANCE = 1e-5
# Wide, high, smaller than the model's images, and these as they are: in multiples of the model's own edges.
PROBED = ((1.3, 1.9), (1.7, 1.2), (0.6, 0.5), (1.0, 1.0))
# Of what was measured: float32 has no more.
DIGITS = 7
# LeViT's own, in its code alone: 256 pixels are cropped to 224.
OVER_CROP = 256 / 224

Size = tuple[int, int]


class Preprocessing(Record):
    """What becomes of an RGB image, in this order."""

    resize: Size | int | None = Field(
        description="height and width, or the length of the shorter edge; null: not resized"
    )
    resample: Literal["nearest", "box", "bilinear", "hamming", "bicubic", "lanczos"]
    crop: Size | None = Field(description="height and width of the middle that is kept; null: all of it")
    channels: Literal["RGB", "BGR"] = Field(description="the order in which the model takes them")
    mean: tuple[float, float, float] = Field(description="taken from each channel, which goes from 0 to 1")
    std: tuple[float, float, float] = Field(description="what divides what is left")


def preprocessing_of(processor: Any, spec: InputSpec, *, otherwise: str) -> Preprocessing:
    """Return what `processor` does to the images of a model, found by trying it.

    Raises:
        ArtifactError: it prepares images in a way that resizing, cropping in the middle and scaling can't express, so that what
            `otherwise` says has to be done.
    """
    refused = (
        f"{type(processor).__name__} prepares images in a way that can't be written as a resize, a crop in the middle and a "
        f"scale for each channel: {otherwise}"
    )
    if spec.channels != 3:
        raise ArtifactError(f"the model takes images of {spec.channels} channels, not RGB: {otherwise}")
    probes = list(_probes(spec))
    wanted = [_as_prepared(processor, image) for image in probes]
    scaled = _scale(processor, spec)
    for guess in _guesses(processor, spec):
        if scaled is None:
            break
        found = Preprocessing(**guess, **scaled)
        how = found.model_dump()
        if all(_is_near(prepare([image], how), seen) for image, seen in zip(probes, wanted, strict=True)):
            return found
    raise ArtifactError(refused)


def _probes(spec: InputSpec) -> Iterator[Image.Image]:
    """Yield images on which ways of resizing differ: noise, coarse and fine."""
    generator = np.random.default_rng(0)
    for high, wide in PROBED:
        size = max(2, round(spec.height * high)), max(2, round(spec.width * wide))
        yield Image.fromarray(generator.integers(0, 256, (*size, 3), dtype=np.uint8))


def _as_prepared(processor: Any, image: Image.Image) -> NDArray[Any]:
    return np.asarray(processor(images=[image], return_tensors="pt")["pixel_values"])


def _is_near(found: NDArray[Any], wanted: NDArray[Any]) -> bool:
    return found.shape == wanted.shape and bool(np.abs(found - wanted).max() <= TOLERANCE)


def _scale(processor: Any, spec: InputSpec) -> dict[str, Any] | None:
    """Return order, mean and std of the channels, measured: what becomes of black, of white and of red; None where it isn't that."""

    def colour(*value: int) -> NDArray[Any]:
        plain = Image.new("RGB", (spec.width, spec.height), value)
        return _as_prepared(processor, plain)[0].astype(np.float64)

    black, white, red = colour(0, 0, 0), colour(255, 255, 255), colour(255, 0, 0)
    if black.shape != spec.batch(1)[1:]:
        return None
    low, high = (seen[:, spec.height // 2, spec.width // 2] for seen in (black, white))
    gain = high - low
    if not (np.isfinite(gain).all() and (gain > 0).all()):
        return None
    is_red = (red - black)[:, spec.height // 2, spec.width // 2] > gain / 2
    return {
        "channels": "BGR" if is_red[2] else "RGB",
        "mean": tuple(_rounded(value) for value in -low / gain),
        "std": tuple(_rounded(value) for value in 1 / gain),
    }


def _rounded(value: float) -> float:
    return float(f"{value:.{DIGITS}g}") + 0.0


def _guesses(processor: Any, spec: InputSpec) -> Generator[dict[str, Any]]:
    names = {int(number): name for name, number in RESAMPLE.items()}
    resample = names.get(_integer(getattr(processor, "resample", None)) or 0, "bilinear")
    own = (spec.height, spec.width)
    edge, size = _edge(processor, "shortest_edge"), (_edge(processor, "height"), _edge(processor, "width"))
    cropped: Any = getattr(processor, "crop_size", None)
    high, wide = (_integer(_entry(cropped, name)) for name in ("height", "width"))
    crop = (high, wide) if high and wide else None
    resizes: list[Size | int | None] = [None]
    if all(size):
        resizes.append((size[0] or 0, size[1] or 0))
    if length := edge or min(own):
        share = getattr(processor, "crop_pct", None)
        kept = share if isinstance(share, float) and 0 < share <= 1 else 1.0
        resizes += [length, int(length / kept), int(OVER_CROP * length), (length, length)]
    for resize in dict.fromkeys(resizes):
        for middle in dict.fromkeys((None, crop, own)):
            yield {"resize": resize, "resample": resample, "crop": middle}


def _integer(value: Any) -> int | None:
    return int(value) if isinstance(value, int) else None


def _edge(processor: Any, name: str) -> int | None:
    size: Any = getattr(processor, "size", None)
    return _integer(_entry(size, name))


def _entry(size: Any, name: str) -> Any:
    return size.get(name) if hasattr(size, "get") else getattr(size, name, None)
