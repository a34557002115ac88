import pytest
import torch
import zoo
from pruning import families
from torch import nn
from torch.nn import functional as F

from profiling_agent.modules.hooks import watching
from profiling_agent.modules.inference import random_batch
from profiling_agent.pruning.compensation import features, gather_moments, matrix_of, outputs_of
from profiling_agent.pruning.units import find_units

IMAGES = random_batch(zoo.SPEC, 6, seed=3)
MODELS = {
    "vit": zoo.vit,
    "swin": zoo.swin,
    "resnet": zoo.resnet,
    "efficientnet": families.FAMILIES["efficientnet"],
}
EVERY = pytest.mark.parametrize("family", MODELS)


def units_of(model):
    return find_units(model, zoo.SPEC, {}).units


def read_by(model, unit, images=IMAGES):
    """What the unit's consumer reads, by an ordinary hook."""
    seen = []
    with torch.no_grad(), watching(model, [unit.consumer], before=lambda _name, inputs: seen.append(inputs)):
        model(pixel_values=images)
    return seen[0]


def rows_of(layer, inputs):
    """Positions by columns, a convolution's taps cut out one by one."""
    if not isinstance(layer, nn.Conv2d):
        return inputs.flatten(0, -2)
    (height, width), (down, right) = layer.kernel_size, layer.stride
    # EfficientNet names its padding; that of a 1x1 convolution is none.
    assert not isinstance(layer.padding, str) or (layer.padding, height) == ("same", 1)
    border = 0 if isinstance(layer.padding, str) else layer.padding[0]
    padded = F.pad(inputs, (border,) * 4)
    return torch.stack(
        [
            padded[:, :, i : i + height, j : j + width].flatten(1)
            for i in range(0, padded.shape[2] - height + 1, down)
            for j in range(0, padded.shape[3] - width + 1, right)
        ],
        dim=1,
    ).flatten(0, 1)


@EVERY
def test_means_and_second_moments_are_those_of_what_the_consumer_reads(family):
    model = MODELS[family]()
    moments = gather_moments(model, units_of(model), IMAGES.split(4))

    for unit in units_of(model):
        rows = rows_of(model.get_submodule(unit.consumer), read_by(model, unit)).double()
        found, gram = moments[unit.name], rows.T @ rows / len(rows)
        assert torch.allclose(found.mean.double(), rows.mean(0), atol=1e-5 * float(rows.abs().max()))
        assert torch.allclose(found.gram.double(), gram, atol=1e-5 * float(gram.max()))
        centred = torch.cov(rows.T, correction=0)
        assert torch.allclose(found.covariance.double(), centred, atol=1e-5 * float(gram.max()))


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 4, (3, 2), padding="same", dilation=(1, 2), bias=False),
        nn.Conv2d(3, 4, 4, padding="same", bias=False),
        nn.Conv2d(3, 4, 3, padding="valid", bias=False),
        nn.Conv2d(3, 4, 3, padding=(2, 1), stride=2, dilation=2, bias=False),
        nn.Conv2d(3, 4, 3, padding=1, padding_mode="reflect", bias=False),
    ],
    ids=["same", "same_even", "valid", "strided", "reflected"],
)
@pytest.mark.filterwarnings("ignore:Using padding=.same. with even kernel lengths")
def test_the_matrix_times_what_a_convolution_reads_is_what_it_gives(layer):
    with torch.no_grad():
        inputs = torch.randn(2, 3, 9, 7)
        given = outputs_of(layer, layer(inputs))

        assert torch.allclose(features(layer, inputs) @ matrix_of(layer).T, given, atol=1e-5)


def test_a_large_picture_is_taken_at_256_pixels_spread_over_it():
    model = zoo.resnet("basic")
    spec = zoo.SPEC.model_copy(update={"height": 96, "width": 96})
    unit, images = units_of(model)[0], random_batch(spec, 2, seed=1)
    moments = gather_moments(model, [unit], [images])[unit.name]
    rows = rows_of(model.get_submodule(unit.consumer), read_by(model, unit, images)).double()
    picked = rows.unflatten(0, (2, -1))[:, torch.linspace(0, len(rows) // 2 - 1, 256).round().long()].flatten(0, 1)

    assert len(rows) == 2 * 24 * 24
    assert torch.allclose(moments.mean.double(), picked.mean(0), atol=1e-5)


def drawn_labels(model, batches, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        answers = [model(pixel_values=images).logits.softmax(1) for images in batches]
    return torch.cat([torch.multinomial(answer, 1, generator=generator)[:, 0] for answer in answers])


@EVERY
def test_the_sensitivity_is_the_outer_product_of_the_gradients_of_each_position(family):
    model = MODELS[family]()
    unit = units_of(model)[-1]
    moments = gather_moments(model, [unit], IMAGES.split(4), seed=5)[unit.name]
    labels, given = drawn_labels(model, IMAGES.split(4), 5), []
    with watching(model, [unit.consumer], after=lambda _name, _inputs, output: given.append(output)):
        logits = model(pixel_values=IMAGES).logits
    (gradient,) = torch.autograd.grad(F.cross_entropy(logits, labels, reduction="sum"), given)
    if gradient.dim() == 4:
        gradient = gradient.movedim(1, -1)
    rows = gradient.flatten(0, -2)
    expected = rows.T @ rows / len(IMAGES)

    assert torch.allclose(moments.sensitivity, expected, atol=1e-4 * float(expected.abs().max()))


def test_windows_of_one_image_are_one_image():
    model = zoo.swin()
    heads = [unit for unit in units_of(model) if unit.kind == "heads"]
    windows = len(read_by(model, heads[0], IMAGES[:1]))
    one, two = (gather_moments(model, heads[:1], [images])[heads[0].name] for images in (IMAGES[:1], IMAGES[:2]))

    # 16 x 16 tokens in windows of 4 x 4; an average over images doesn't grow with their number.
    assert windows == 16
    alone = gather_moments(model, heads[:1], [IMAGES[1:2]])[heads[0].name]
    assert torch.allclose(two.gram, (one.gram + alone.gram) / 2, atol=1e-6)


def test_a_channel_far_from_zero_leaves_the_variance_of_the_others():
    model = zoo.vit()
    unit = next(unit for unit in units_of(model) if unit.kind == "mlp")
    with torch.no_grad():
        model.get_submodule(unit.producers[0]).bias[0] = 3000.0
    found = gather_moments(model, [unit], IMAGES.split(4))[unit.name].covariance
    x = rows_of(model.get_submodule(unit.consumer), read_by(model, unit)).double()
    expected = torch.cov(x.T, correction=0)

    assert torch.allclose(found.double(), expected, atol=1e-4 * float(expected.diagonal()[1:].mean()))


def test_batches_do_not_matter_beyond_the_draw_and_a_seed_repeats_it():
    model = zoo.vit()
    units = units_of(model)
    once, again = (gather_moments(model, units, IMAGES.split(4), seed=2) for _ in range(2))
    whole = gather_moments(model, units, [IMAGES], seed=2)

    for unit in units:
        assert torch.equal(once[unit.name].sensitivity, again[unit.name].sensitivity)
        assert torch.allclose(once[unit.name].gram, whole[unit.name].gram, rtol=1e-4, atol=1e-6)


def test_the_model_is_left_as_it_was_found():
    model = zoo.vit()
    frozen = model.vit.layers[0].mlp.fc1.weight
    frozen.requires_grad = False
    flags = {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    with torch.no_grad():
        gather_moments(model, units_of(model), [IMAGES])

    assert flags == {name: parameter.requires_grad for name, parameter in model.named_parameters()}
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
