import pytest
import zoo
from transformers import ViTImageProcessorPil

from profiling_agent.errors import ShapeUnresolvedError
from profiling_agent.records import InputSpec
from profiling_agent.shapes.resolve import check_processor, from_config, from_processor, resolve_input_shape


def processor(side):
    return ViTImageProcessorPil(size={"height": side, "width": side})


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_the_processor_is_believed_first(family):
    spec = resolve_input_shape(zoo.FAMILIES[family](), zoo.processor())

    assert (spec.channels, spec.height, spec.width) == (3, 32, 32)
    assert spec.source == "image processor"


def test_the_config_answers_where_there_is_no_processor():
    spec = resolve_input_shape(zoo.vit(), None)

    assert (spec.batch(2), spec.source) == ((2, 3, 32, 32), "model config")


def test_a_resnet_alone_is_given_the_usual_size():
    spec = resolve_input_shape(zoo.resnet(), None)

    assert spec.batch(1) == (1, 3, 224, 224)
    assert spec.source.startswith("first convolution")


def test_an_answer_that_the_model_refuses_gives_way_to_the_next_and_is_noted():
    spec = resolve_input_shape(zoo.vit(), processor(48))

    assert spec.batch(1) == (1, 3, 32, 32)
    assert spec.source.startswith("model config; from_processor: ")
    assert "3x48x48" in spec.source
    assert "doesn't match model" in spec.source


def test_a_disagreement_that_the_model_can_live_with_is_noted():
    spec = resolve_input_shape(zoo.swin(), processor(64))

    assert spec.batch(1) == (1, 3, 64, 64)
    assert spec.source == "image processor; model config says 3x32x32"


def test_no_answer_left_lists_every_answer_and_complaint():
    model = zoo.vit()
    model.config.image_size = 40

    with pytest.raises(ShapeUnresolvedError) as unresolved:
        resolve_input_shape(model, processor(48))

    message = str(unresolved.value)
    assert all(part in message for part in ("3x48x48", "3x40x40", "3x224x224", "doesn't match model", "set image_size"))
    assert "\n" not in message


def test_silence_from_every_rule_names_the_rules():
    with pytest.raises(ShapeUnresolvedError, match="no answer from 'from_processor, from_config'"):
        resolve_input_shape(zoo.resnet(), None, rules=(from_processor, from_config))


def test_an_impossible_size_in_the_config_is_a_refused_answer():
    model = zoo.resnet()
    model.config.image_size = 0

    spec = resolve_input_shape(model, None)

    assert "from_config: it says height = 0" in spec.source
    assert resolve_input_shape(model, zoo.processor()).source == "image processor; from_config: it says height = 0"


def test_a_rule_of_ones_own_is_asked_only_when_the_others_fail():
    asked = []

    def ask_someone(model, processor):
        asked.append(model)
        return InputSpec(channels=3, height=32, width=32, source="someone")

    assert resolve_input_shape(zoo.vit(), None, rules=(from_config, ask_someone)).source == "model config"
    assert not asked
    assert resolve_input_shape(zoo.resnet(), None, rules=(from_config, ask_someone)).source == "someone"
    assert len(asked) == 1


@pytest.mark.parametrize("side", [48, 16])
def test_a_processor_whose_images_the_model_refuses_is_told_with_what_the_config_says(side):
    with pytest.raises(ShapeUnresolvedError) as unresolved:
        check_processor(zoo.vit(), processor(side))

    message = str(unresolved.value)
    assert f"the model refuses an image of '3x{side}x{side}'" in message
    assert "its config.json says 3x32x32; correct size and crop_size in preprocessor_config.json" in message
    assert "\n" not in message


@pytest.mark.parametrize(
    ("num_channels", "mean", "said"),
    [(1, [0.5] * 3, "'3x32x32'"), (1, 0.5, "'3x32x32'"), (3, [0.5], "'1x32x32'")],
)
def test_a_processor_of_other_channels_than_the_models_is_told_before_images_are_drawn(num_channels, mean, said):
    images = ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=mean, image_std=mean)

    with pytest.raises(
        ShapeUnresolvedError, match=f"image_mean and image_std of as many values, {num_channels},"
    ) as told:
        check_processor(zoo.vit(num_channels=num_channels), images)

    assert said in str(told.value)


@pytest.mark.parametrize(
    ("model", "images"),
    [
        (zoo.vit, zoo.processor()),
        # Any size will do, so that nobody but its processor can say which is right.
        (zoo.resnet, processor(224)),
        # As large as its images are.
        (zoo.vit, ViTImageProcessorPil(do_resize=False)),
    ],
)
def test_a_processor_whose_images_the_model_takes_or_that_fixes_none_is_left_alone(model, images):
    check_processor(model(), images)
