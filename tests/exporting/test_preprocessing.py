"""What an image processor does is found by trying it, and what can't be written as plain numbers is refused."""

import numpy as np
import pytest
import transformers as hf
from PIL import Image

from profiling_agent.data.pixels import prepare
from profiling_agent.exporting.export import preprocessing_of
from profiling_agent.schemas import InputSpec

# Each with the edge that its model takes, and what it does to an image, read from its documentation.
CASES = {
    "ViT": (224, {}, {"resize": (224, 224), "resample": "bilinear", "crop": None, "mean": (0.5,) * 3}),
    "DeiT": (224, {}, {"resize": (256, 256), "resample": "bicubic", "crop": (224, 224)}),
    # The shorter edge becomes 256 so that a crop has seven eighths of it; from 384 on images are squeezed.
    "ConvNext": (224, {"size": {"shortest_edge": 224}}, {"resize": 256, "crop": (224, 224)}),
    "ConvNextLarge": (384, {"size": {"shortest_edge": 384}}, {"resize": (384, 384), "crop": None}),
    "MobileNetV2": (224, {}, {"resize": 256, "crop": (224, 224), "std": (0.5,) * 3}),
    "Levit": (224, {}, {"resize": 256, "crop": (224, 224), "mean": (0.485, 0.456, 0.406)}),
    # It scales from 0 to 1 alone, and takes blue first.
    "MobileViT": (256, {}, {"channels": "BGR", "mean": (0.0,) * 3, "std": (1.0,) * 3}),
    # It normalizes twice: (x - 0.5) / 0.5 / 0.5.
    "EfficientNet": (346, {}, {"resize": (346, 346), "mean": (0.5,) * 3, "std": (0.25,) * 3}),
}


def square(edge: int) -> InputSpec:
    return InputSpec(channels=3, height=edge, width=edge, source="test")


@pytest.mark.parametrize("name", CASES)
def test_a_processor_is_read_as_it_prepares(name: str):
    edge, settings, wanted = CASES[name]
    processor = getattr(hf, f"{name.removesuffix('Large')}ImageProcessorPil")(**settings)

    read = preprocessing_of(processor, square(edge))

    assert read is not None
    found = read.model_dump()
    assert {key: found[key] for key in wanted} == wanted
    image = Image.fromarray(np.random.default_rng(3).integers(0, 256, (301, 420, 3), dtype=np.uint8))
    expected = processor(images=[image], return_tensors="np")["pixel_values"]
    assert np.abs(prepare([image], found) - expected).max() < 1e-5


def test_what_is_no_resize_crop_and_scale_has_no_numbers():
    assert preprocessing_of(hf.PerceiverImageProcessorPil(), square(224)) is None


def test_a_model_of_grey_images_has_no_numbers():
    grey = InputSpec(channels=1, height=28, width=28, source="test")

    assert preprocessing_of(hf.ViTImageProcessorPil(), grey) is None
