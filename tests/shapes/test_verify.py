import pytest
import torch
import zoo

from profiling_agent.errors import ShapeUnresolvedError
from profiling_agent.modules.inference import left_as_found
from profiling_agent.records import InputSpec
from profiling_agent.shapes.resolve import verify


def spec(channels, height, width):
    return InputSpec(channels=channels, height=height, width=width, source="test")


@pytest.mark.parametrize("family", zoo.FAMILIES)
def test_every_family_accepts_the_shape_it_was_built_for(family):
    verify(zoo.FAMILIES[family](), zoo.SPEC)


@pytest.mark.parametrize(
    ("family", "shape", "complaint"),
    [
        ("vit", (3, 48, 48), "doesn't match model"),
        ("deit", (1, 32, 32), "Expected 3 but got 1"),
        ("resnet", (4, 32, 32), "channel dimension"),
        ("swin", (5, 32, 32), "channels"),
    ],
)
def test_a_wrong_shape_is_refused_in_the_models_own_words(family, shape, complaint):
    with pytest.raises(ShapeUnresolvedError, match=complaint) as refusal:
        verify(zoo.FAMILIES[family](), spec(*shape))

    assert "x".join(str(side) for side in shape) in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_a_model_that_gives_no_logits_is_refused():
    with pytest.raises(ShapeUnresolvedError, match="not one row of logits"):
        verify(zoo.vit().vit, zoo.SPEC)


def test_verifying_leaves_modes_and_statistics_alone():
    model = zoo.resnet().train()
    model.resnet.embedder.eval()
    modes = [module.training for module in model.modules()]
    statistics = {name: buffer.clone() for name, buffer in model.named_buffers()}

    verify(model, zoo.SPEC)

    assert [module.training for module in model.modules()] == modes
    assert all(torch.equal(buffer, statistics[name]) for name, buffer in model.named_buffers())


def test_a_refused_small_image_does_not_shrink_swins_windows():
    model = zoo.swin()
    pixels = torch.ones(zoo.SPEC.batch(1))
    with torch.inference_mode(), left_as_found(model):
        before = model(pixel_values=pixels).logits

    with pytest.raises(ShapeUnresolvedError):
        verify(model, spec(3, 4, 4))

    assert {block.window_size for stage in model.swin.encoder.layers for block in stage.blocks} == {4}
    with torch.inference_mode():
        assert torch.equal(model(pixel_values=pixels).logits, before)


def test_attributes_that_appear_meanwhile_are_gone_afterwards():
    model = zoo.vit()
    with left_as_found(model):
        model.vit.note = "here for a moment"
        model.eval_count = 1

    assert not hasattr(model.vit, "note")
    assert not hasattr(model, "eval_count")
