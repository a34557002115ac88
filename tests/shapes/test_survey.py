"""What is known of a shape, told to somebody who can't look at the model."""

import zoo
from transformers import ViTImageProcessorPil

from profiling_agent.shapes.resolve import survey


def test_agreement_is_certain():
    facts = survey(zoo.vit(), zoo.processor())

    assert facts.is_certain
    assert facts.findings[:2] == (
        "from_processor: 3x32x32, which the model accepts",
        "from_config: 3x32x32, which the model accepts",
    )
    assert "model config: image_size = 32" in facts.settings
    assert not any("id2label" in row for row in facts.settings)


def test_a_disagreement_is_not_even_where_the_model_takes_both():
    facts = survey(zoo.swin(), ViTImageProcessorPil(size={"height": 64, "width": 64}))

    assert not facts.is_certain
    assert facts.findings[0] == "from_processor: 3x64x64, which the model accepts"


def test_an_answer_that_the_model_refuses_is_told_with_its_complaint():
    facts = survey(zoo.vit(), ViTImageProcessorPil(size={"height": 48, "width": 48}))

    assert not facts.is_certain
    assert facts.findings[0].startswith("from_processor: 3x48x48, but the model refuses an image")


def test_a_convolution_alone_is_no_certainty():
    facts = survey(zoo.resnet(), None)

    assert not facts.is_certain
    assert facts.findings[-1] == "from_first_convolution: 3x224x224, which the model accepts"
