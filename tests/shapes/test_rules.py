import pytest
import torch
import zoo
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from profiling_agent.shapes.resolve import from_config, from_first_convolution, from_processor


def shape(spec):
    return (spec.channels, spec.height, spec.width)


def gray_vit(**changes):
    config = ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_channels=1, **changes
    )
    return ViTForImageClassification(config).eval()


def test_a_processor_says_the_shape_it_really_gives():
    wide = ViTImageProcessorPil(size={"height": 24, "width": 40})

    assert shape(from_processor(zoo.resnet(), wide)) == (3, 24, 40)


def test_a_processor_of_a_gray_model_is_given_a_gray_image():
    processor = ViTImageProcessorPil(size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.5])

    assert shape(from_processor(gray_vit(image_size=8, patch_size=4), processor)) == (1, 8, 8)


def test_a_processor_that_does_not_resize_fixes_no_shape():
    assert from_processor(zoo.resnet(), ViTImageProcessorPil(do_resize=False)) is None


def test_a_processor_of_something_else_gives_no_answer():
    assert from_processor(zoo.resnet(), dict) is None
    assert from_processor(zoo.resnet(), None) is None


def test_a_config_may_name_one_side_or_two():
    assert shape(from_config(zoo.vit(), None)) == (3, 32, 32)
    assert shape(from_config(gray_vit(image_size=[8, 16], patch_size=4), None)) == (1, 8, 16)


def test_a_config_without_image_size_gives_no_answer():
    assert from_config(zoo.resnet(), None) is None
    assert from_config(torch.nn.Linear(2, 2), None) is None


@pytest.mark.parametrize(("model", "channels"), [(zoo.resnet, 3), (lambda: torch.nn.Conv2d(5, 2, 3), 5)])
def test_the_first_convolution_gives_the_channels(model, channels):
    assert shape(from_first_convolution(model(), None)) == (channels, 224, 224)


def test_a_model_without_convolution_gives_no_answer():
    assert from_first_convolution(torch.nn.Linear(2, 2), None) is None
