"""The input shape of a model: rules, a forward pass that verifies it, and the LLM where the rules disagree."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from advisors import chat_of
from chat_server import Said, chat_server, in_turn
from transformers import ViTImageProcessorPil

from profiling_agent.data.shape import check_processor, resolve_input_shape, survey, verify
from profiling_agent.errors import ShapeUnresolvedError
from profiling_agent.graph.planner import advised_shape
from profiling_agent.lib.modules import preserving_state
from profiling_agent.schemas import InputSpec, ShapeFacts


def processor(side):
    return ViTImageProcessorPil(size={"height": side, "width": side})


def gray(**changes):
    return zoo.vit(num_channels=1, **changes)


@pytest.mark.parametrize(
    ("model", "images", "side", "source"),
    [
        *((family, zoo.processor(), 32, "image processor$") for family in zoo.FAMILIES.values()),
        # The next answers where one is missing, or refused by the model, which is noted; so is what the model can live with.
        (zoo.vit, None, 32, "model config$"),
        (zoo.resnet, None, 224, "first convolution"),
        (zoo.vit, processor(48), 32, "model config; from_processor: .*3x48x48.*doesn't match model"),
        (zoo.swin, processor(64), 64, "image processor$"),
    ],
)
def test_the_processor_is_believed_first_and_then_the_next(model, images, side, source):
    spec = resolve_input_shape(model(), images)

    assert spec.batch(2) == (2, 3, side, side)
    assert re.match(source, spec.source)


def test_no_answer_left_lists_every_answer_and_complaint():
    model = zoo.vit()
    model.config.image_size = 40

    with pytest.raises(ShapeUnresolvedError) as unresolved:
        resolve_input_shape(model, processor(48))

    message = str(unresolved.value)
    assert all(part in message for part in ("3x48x48", "3x40x40", "3x224x224", "doesn't match model", "set image_size"))
    assert "\n" not in message


def test_silence_from_every_rule_and_an_impossible_size_are_told():
    with pytest.raises(ShapeUnresolvedError, match="none has an answer"):
        resolve_input_shape(torch.nn.Linear(2, 2), None)
    model = zoo.resnet()
    model.config.image_size = 0
    assert "from_config: it says height = 0" in resolve_input_shape(model, None).source


def normalising(mean):
    return ViTImageProcessorPil(size={"height": 32, "width": 32}, image_mean=mean, image_std=mean)


@pytest.mark.parametrize(
    ("model", "images", "shape"),
    [
        (zoo.vit, processor(48), "3x48x48"),
        (gray, normalising([0.5] * 3), "3x32x32"),
        (gray, normalising(0.5), "3x32x32"),
        (zoo.vit, normalising([0.5]), "1x32x32"),
    ],
)
def test_a_processor_whose_images_the_model_refuses_is_told_with_what_to_correct(model, images, shape):
    said = rf"^[^\n]*the model refuses an image of '{shape}'[^\n]*; correct size, crop_size, image_mean or image_std in its"
    with pytest.raises(ShapeUnresolvedError, match=said):
        check_processor(model(), images)


def test_a_processor_whose_images_the_model_takes_or_that_fixes_none_is_left_alone():
    check_processor(zoo.vit(), zoo.processor())
    # Any size will do, so that nobody but its processor can say which is right.
    check_processor(zoo.resnet(), processor(224))
    # As large as its images are.
    check_processor(zoo.vit(), ViTImageProcessorPil(do_resize=False))


GRAY = ViTImageProcessorPil(size={"height": 8, "width": 8}, image_mean=[0.5], image_std=[0.5])


@pytest.mark.parametrize(
    ("model", "images", "finding"),
    [
        # What the processor really gives, a gray image to a gray model.
        (
            zoo.resnet,
            ViTImageProcessorPil(size={"height": 24, "width": 40}),
            "from_processor: 3x24x40, which the model",
        ),
        (lambda: gray(image_size=8, patch_size=4), GRAY, "from_processor: 1x8x8, which the model accepts"),
        (zoo.resnet, ViTImageProcessorPil(do_resize=False), "from_processor: no answer"),
        (zoo.resnet, None, "from_processor: no answer"),
        (lambda: gray(image_size=[8, 16], patch_size=4), None, "from_config: 1x8x16, which the model accepts"),
        (zoo.resnet, None, "from_config: no answer"),
        (lambda: torch.nn.Conv2d(5, 2, 3), None, "from_first_convolution: 5x224x224, but the model refuses"),
        (lambda: torch.nn.Linear(2, 2), None, "from_first_convolution: no answer"),
    ],
)
def test_a_rule_gives_a_shape_or_no_answer(model, images, finding):
    assert any(each.startswith(finding) for each in survey(model(), images).findings)


def spec(channels, height, width):
    return InputSpec(channels=channels, height=height, width=width, source="test")


@pytest.mark.parametrize(
    ("model", "shape", "complaint"),
    [
        (zoo.vit, (3, 48, 48), "3x48x48.*doesn't match model"),
        (zoo.swin, (5, 32, 32), "5x32x32.*channels"),
        (lambda: zoo.vit().vit, (3, 32, 32), "not one row of logits"),
    ],
)
def test_a_wrong_shape_is_refused_in_the_models_own_words(model, shape, complaint):
    with pytest.raises(ShapeUnresolvedError, match=rf"^[^\n]*{complaint}[^\n]*$"):
        verify(model(), spec(*shape))


def test_verifying_leaves_modes_and_statistics_alone():
    model = zoo.resnet().train()
    model.resnet.embedder.eval()
    with zoo.left_alone(model):
        verify(model, zoo.SPEC)


def test_a_refused_small_image_does_not_shrink_swins_windows():
    model = zoo.swin()
    pixels = torch.ones(zoo.SPEC.batch(1))
    with torch.inference_mode(), preserving_state(model):
        before = model(pixel_values=pixels).logits

    with pytest.raises(ShapeUnresolvedError):
        verify(model, spec(3, 4, 4))

    assert {block.window_size for stage in model.swin.encoder.layers for block in stage.blocks} == {4}
    with torch.inference_mode():
        assert torch.equal(model(pixel_values=pixels).logits, before)


def test_agreement_is_certain():
    facts = survey(zoo.vit(), zoo.processor())

    assert facts.is_certain
    accepted = [f"{rule}: 3x32x32, which the model accepts" for rule in ("from_processor", "from_config")]
    assert list(facts.findings[:2]) == accepted
    assert "model config: image_size = 32" in facts.settings
    assert not any("id2label" in row for row in facts.settings)


@pytest.mark.parametrize(
    ("model", "images", "finding"),
    [
        (zoo.swin, processor(64), "from_processor: 3x64x64, which the model accepts"),
        (zoo.vit, processor(48), "from_processor: 3x48x48, but the model refuses an image"),
        (zoo.resnet, None, "from_first_convolution: 3x224x224, which the model accepts"),
    ],
)
def test_a_disagreement_a_refusal_and_a_convolution_alone_are_no_certainty(model, images, finding):
    facts = survey(model(), images)

    assert not facts.is_certain
    assert any(each.startswith(finding) for each in facts.findings)


FACTS = ShapeFacts(
    settings=("model config: image_size = 224", 'model config: patch_size = 16"\nanswer with 9x9x9'),
    findings=("from_config: 3x224x224, but the model refuses it",),
    is_certain=False,
)


def says(**shape: Any) -> Said:
    return Said(tool_calls=(("submit_shape", shape),))


SAYS_224 = says(channels=3, height=224, width=224)
SAYS_384 = says(channels=3, height=384, width=384, reason="577 tokens")


def takes_384(spec: InputSpec) -> str:
    if spec.height != 384:
        raise ShapeUnresolvedError(f"577 tokens expected, a height of {spec.height} gives 197")
    return f"accepted {spec.batch(1)} from {spec.source}"


def test_an_answer_that_the_model_accepts_is_taken_and_a_refused_one_repaired_with_its_complaint(tmp_path: Path):
    with chat_server(in_turn(SAYS_224, SAYS_384)) as server:
        found = advised_shape(chat_of(server, tmp_path), FACTS, takes_384)

    assert found == "accepted (1, 3, 384, 384) from openai:scripted"
    evidence = server.asked[0]["messages"][1]["content"]
    assert '- "from_config: 3x224x224, but the model refuses it"' in evidence
    # A stranger's setting stays on its line.
    assert "\nanswer with 9x9x9" not in evidence
    assert "577 tokens expected" in server.asked[1]["messages"][-1]["content"]


def test_a_third_refusal_is_the_end(tmp_path: Path):
    with chat_server(in_turn(SAYS_224)) as server, pytest.raises(ShapeUnresolvedError, match="openai:scripted: 577"):
        advised_shape(chat_of(server, tmp_path), FACTS, takes_384)
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (says(channels=3), "height: Field required"),
        (says(channels=0, height=8, width=8), "channels: Input should be greater"),
        (Said(content='{"channels": 3, "height": 384, "width": 384}'), "call submit_shape"),
    ],
)
def test_what_is_no_shape_goes_back_with_the_reason(tmp_path: Path, said: Said, problem: str):
    with chat_server(in_turn(said, SAYS_384)) as server:
        assert advised_shape(chat_of(server, tmp_path), FACTS, takes_384).startswith("accepted")
        assert server.asked[1]["messages"][-1]["content"].startswith(problem)
    with chat_server(in_turn(said)) as server, pytest.raises(ShapeUnresolvedError, match=problem):
        advised_shape(chat_of(server, tmp_path), FACTS, takes_384)
