"""Compensation: second moments, ridge solutions and least squares make up for what was cut, on images held back."""

import math

import pytest
import torch
import zoo
from pruning import families
from torch import nn
from torch.nn import functional as F
from zoo import cuts_of, logits, units_of

from profiling_agent.errors import PruningError
from profiling_agent.lib.modules import mean_kl, random_batch, watching
from profiling_agent.lib.replay import Walk
from profiling_agent.pruning.compensation import Calibration, compensate, fit_, layers_from, paired_moments, recover
from profiling_agent.pruning.criteria import RIDGE, features, gather_moments, matrix_of, outputs_of
from profiling_agent.pruning.prune import prune_model
from profiling_agent.schemas import UnitKind

IMAGES = random_batch(zoo.SPEC, 160, seed=7)


def batches_of(images, size=32):
    return lambda: ((part, torch.zeros(len(part), dtype=torch.int64)) for part in images.split(size))


def calibration_of(images, size=32):
    return Calibration(nn.Linear(1, 1), batches_of(images, size))


def pruned_and_compensated(model, images=IMAGES, **cutting):
    cuts = cuts_of(model, **cutting)
    pruned = prune_model(model, cuts, spec=zoo.SPEC)
    return pruned.model, compensate(model, pruned.model, cuts, pruned.keep, batches_of(images))


@pytest.mark.slow
@pytest.mark.parametrize("family", zoo.EVERY)
def test_the_divergence_falls_and_is_what_the_compensated_model_has_and_no_other_model_changes(family):
    model = zoo.EVERY[family]().train()
    cuts = cuts_of(model)
    pruned = prune_model(model, cuts, spec=zoo.SPEC)
    with zoo.left_alone(model, pruned.model):
        done = compensate(model, pruned.model, cuts, pruned.keep, batches_of(IMAGES))

    assert done.model is not pruned.model
    assert all(module.training for module in done.model.modules())
    assert not any(module._forward_pre_hooks for module in done.model.modules())
    assert {p.dtype for p in done.model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in done.model.parameters())
    assert "least squares" in done.steps
    assert 0 <= done.kl_after < done.kl_before
    judged = torch.cat(list(calibration_of(IMAGES).judged()))
    expected, *others = (logits(each.eval(), judged) for each in (model, pruned.model, done.model))
    kls = [mean_kl(expected, other) for other in others]
    assert [done.kl_before, done.kl_after] == pytest.approx(kls, rel=1e-3, abs=1e-9)


def test_every_layer_behind_a_cut_is_fitted_and_none_before_it():
    model = zoo.vit()
    cuts = [cut for cut in cuts_of(model, ratio=0.5) if cut.unit.name == "vit.layers.1.attention"]
    pruned = prune_model(model, cuts, spec=zoo.SPEC)
    done = compensate(model, pruned.model, cuts, pruned.keep, batches_of(IMAGES))
    changed = moved(done.model, pruned.model, dict(done.model.named_parameters()))

    assert done.steps == ("least squares",)
    fitted = ("vit.layers.1.attention.o_proj", "vit.layers.1.mlp.fc1", "vit.layers.1.mlp.fc2", "classifier")
    assert changed == {f"{name}.{leaf}" for name in fitted for leaf in ("weight", "bias")}


def test_layers_that_run_twice_or_in_groups_are_left_out():
    layers = nn.Sequential(nn.Conv2d(3, 4, 1), nn.Conv2d(4, 4, 1, groups=2), nn.Conv2d(4, 4, 1), nn.Linear(32, 5))
    model = zoo.inside(layers)
    model.forward = lambda pixel_values: layers[3](layers[2](layers[2](layers[1](layers[0](pixel_values)))))

    assert layers_from(model, ["0"], IMAGES[:1]) == ["0", "3"]
    assert layers_from(model, ["3"], IMAGES[:1]) == ["3"]


def moved(model, other, names):
    before, after = other.state_dict(), model.state_dict()
    return {name for name in names if not torch.equal(after[name], before[name])}


def test_batch_norms_take_the_shift_of_the_means():
    model = zoo.resnet(depths=[1, 1])
    consumers = {cut.unit.consumer for cut in cuts_of(model, ratio=0.5)}
    pruned, done = pruned_and_compensated(model, ratio=0.5)

    convolutions = set(layers_from(model, consumers, IMAGES[:1])) - {"classifier.1"}
    shifted, behind = (
        {name.replace(".convolution", ".normalization.running_mean") for name in names}
        for names in (consumers, convolutions)
    )
    assert shifted <= moved(done.model, pruned, dict(done.model.named_buffers())) <= behind


def test_a_fit_that_helps_nothing_gives_the_pruned_model_back():
    # Images that are nearly one colour say nothing about the others.
    is_judged = torch.arange(len(IMAGES)) // 8 % 4 == 3
    images = torch.where(is_judged[:, None, None, None], 30 * IMAGES, 1e-3 * IMAGES)
    pruned, done = pruned_and_compensated(zoo.vit(), images, ratio=0.9, kinds=(UnitKind.HEADS,))

    assert done.model is pruned
    assert done.steps == ()
    assert done.kl_after == done.kl_before > 0


@pytest.mark.parametrize(("make", "is_mirrored"), [(zoo.vit, False), (zoo.resnet, True)])
def test_convolutions_are_fitted_to_mirror_images_too(make, is_mirrored):
    model = make()
    seen, cuts = list[torch.Tensor](), cuts_of(model)
    pruned = prune_model(model, cuts, spec=zoo.SPEC)
    with watching(model, [""], before=lambda _name, images: seen.append(images)):
        compensate(model, pruned.model, cuts, pruned.keep, batches_of(IMAGES))

    first = next(iter(calibration_of(IMAGES).fitted()))
    assert any(torch.equal(images, first) for images in seen)
    assert any(torch.equal(images, first.flip(-1)) for images in seen) == is_mirrored


def test_too_few_images_compensate_nothing_and_it_says_so():
    pruned, done = pruned_and_compensated(zoo.vit(), IMAGES[:100])

    assert done.model is pruned
    assert done.steps == ()
    assert done.note == "not compensated: 100 calibration images, at least 128 are needed"
    assert done.kl_before == done.kl_after > 0
    assert math.isfinite(done.kl_after)


def test_no_image_and_logits_that_are_not_finite_are_refused():
    model = zoo.vit()
    cuts = cuts_of(model)
    pruned = prune_model(model, cuts, spec=zoo.SPEC)
    with pytest.raises(PruningError, match="0 calibration images"):
        compensate(model, pruned.model, cuts, pruned.keep, lambda: iter(()))
    with torch.no_grad():
        zoo.inside(pruned.model).vit.layers[0].mlp.fc1.weight[0, 0] = math.nan
    with pytest.raises(PruningError, match="is nan on calibration images"):
        compensate(model, pruned.model, cuts, pruned.keep, batches_of(IMAGES))


def test_the_two_parts_share_no_image():
    calibration = calibration_of(torch.arange(160.0).view(160, 1, 1, 1), 7)
    fitted, judged = (
        {int(i) for part in parts for i in part.flatten()} for parts in (calibration.fitted(), calibration.judged())
    )

    assert (len(fitted), len(judged)) == (120, 40)
    assert fitted | judged == set(range(160))


def test_a_part_of_the_positions_has_nearly_the_moments_of_all():
    model, name = zoo.vit(), "vit.layers.1.mlp.fc1"
    layer, batches = model.get_submodule(name), IMAGES.split(32)
    with torch.no_grad():
        walk = Walk(model, [name], IMAGES[:1])
        every, part, more = (
            paired_moments(walk, walk.through(model), layer, name, range(256), batches, most) for most in (1e9, 8, 1e3)
        )

    # 17 tokens of 160 images are 42 for each of 64 columns.
    for whole, other, same in zip(every, part, more, strict=True):
        assert torch.equal(whole, same)
        assert 0 < float((other - whole).norm()) < 0.3 * float(whole.norm())


def moments_of(read, given):
    read, given = read.double(), given.double()
    cross = (given - given.mean(0)).T @ (read - read.mean(0)) / len(read)
    return read.mean(0), given.mean(0), cross, torch.cov(read.T, correction=0)


def test_the_weights_are_the_textbook_regression_of_the_outputs():
    x = torch.randn(500, 5) @ torch.randn(5, 5) + 1
    dense = torch.randn(2, 5)
    kept, cut = [0, 2, 4], [1, 3]
    covariance = torch.cov(x.double().T, correction=0)
    inner = covariance[kept][:, kept]
    ridge = RIDGE * inner.diagonal().mean() * torch.eye(3)
    wide = dense.double()
    expected = wide[:, kept] + wide[:, cut] @ covariance[cut][:, kept] @ torch.linalg.inv(inner + ridge)
    weight, shift = fit_(*moments_of(x[:, kept], x @ dense.T), wide[:, kept], centred=True)

    assert torch.allclose(weight, expected, atol=1e-4)
    assert torch.allclose(shift, wide @ x.double().mean(0) - weight @ x.double().mean(0)[kept], atol=1e-4)


@pytest.mark.parametrize("centred", [True, False])
@pytest.mark.parametrize("value", [0.0, 3.0])
def test_inputs_that_never_vary_or_are_dead_give_finite_weights(centred, value):
    read, given, start = torch.full((50, 2), value), torch.full((50, 3), 5.0), torch.ones(3, 2).double()
    weight, shift = fit_(*moments_of(read, given), start, centred=centred)

    assert weight.isfinite().all()
    assert shift.isfinite().all()
    if centred:
        assert torch.equal(weight, start)
        assert torch.allclose(read[0].double() @ weight.T + shift, given[0].double())


GATHERED = random_batch(zoo.SPEC, 6, seed=3)
MODELS = {
    "vit": zoo.vit,
    "swin": zoo.swin,
    "resnet": zoo.resnet,
    "efficientnet": families.FAMILIES["efficientnet"],
}
EVERY = pytest.mark.parametrize("family", MODELS)


def read_by(model, unit, images=GATHERED):
    """What the unit's consumer reads, by an ordinary hook."""
    seen = []
    with torch.no_grad(), watching(model, [unit.consumer], before=lambda _name, inputs: seen.append(inputs)):
        model(pixel_values=images)
    return seen[0]


@EVERY
def test_moments_are_those_of_what_the_consumer_reads(family):
    model = MODELS[family]()
    moments = gather_moments(model, units_of(model), GATHERED.split(4))

    for unit in units_of(model):
        rows = features(model.get_submodule(unit.consumer), read_by(model, unit)).double()
        found, centred = moments[unit.name], torch.cov(rows.T, correction=0)
        assert torch.allclose(found.mean.double(), rows.mean(0), atol=1e-5 * float(rows.abs().max()))
        assert torch.allclose(found.covariance.double(), centred, atol=1e-5 * float(rows.square().mean(0).max()))


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
    images = torch.randn(2, 3, 40, 30)
    spread = torch.linspace(0, 40 * 30 - 1, 256).round().long()

    expected = images.flatten(2)[..., spread].transpose(1, 2).flatten(0, 1)
    assert torch.equal(features(nn.Conv2d(3, 4, 1), images), expected)
    assert torch.equal(outputs_of(nn.Conv2d(8, 3, 1), images), expected)


@EVERY
def test_the_sensitivity_is_the_outer_product_of_the_gradients_of_each_position(family):
    model = MODELS[family]()
    unit = units_of(model)[-1]
    moments = gather_moments(model, [unit], GATHERED.split(4), seed=5)[unit.name]
    generator, given = torch.Generator().manual_seed(5), []
    answers = [logits(model, images).softmax(1) for images in GATHERED.split(4)]
    labels = torch.cat([torch.multinomial(answer, 1, generator=generator)[:, 0] for answer in answers])
    with watching(model, [unit.consumer], after=lambda _name, _inputs, output: given.append(output)):
        loss = F.cross_entropy(model(pixel_values=GATHERED).logits, labels, reduction="sum")
    (gradient,) = torch.autograd.grad(loss, given)
    if gradient.dim() == 4:
        gradient = gradient.movedim(1, -1)
    rows = gradient.flatten(0, -2)
    expected = rows.T @ rows / len(GATHERED)

    assert torch.allclose(moments.sensitivity, expected, atol=1e-4 * float(expected.abs().max()))


def test_a_channel_far_from_zero_leaves_the_variance_of_the_others():
    model = zoo.vit()
    unit = next(unit for unit in units_of(model) if unit.kind == "mlp")
    with torch.no_grad():
        model.get_submodule(unit.producers[0]).bias[0] = 3000.0
    found = gather_moments(model, [unit], GATHERED.split(4))[unit.name].covariance
    x = read_by(model, unit).flatten(0, -2).double()
    expected = torch.cov(x.T, correction=0)

    assert torch.allclose(found.double(), expected, atol=1e-4 * float(expected.diagonal()[1:].mean()))


TRAINED, JUDGED = random_batch(zoo.SPEC, 48, seed=1), random_batch(zoo.SPEC, 16, seed=2)


def shuffled(epoch):
    order = torch.randperm(len(TRAINED), generator=torch.Generator().manual_seed(epoch))
    return TRAINED[order].split(16)


def made(family="vit"):
    dense = zoo.FAMILIES[family]()
    return dense, zoo.inside(prune_model(dense, zoo.halved(zoo.units_of(dense)), spec=zoo.SPEC).model)


def recovered(dense, pruned, images=shuffled, *, epochs=3, learning_rate=1e-3):
    return recover(dense, pruned, images, lambda: JUDGED.split(8), epochs=epochs, learning_rate=learning_rate)


def kl_of(dense, model):
    return mean_kl(zoo.logits(dense, JUDGED), zoo.logits(model, JUDGED))


@pytest.mark.parametrize("family", ["vit", "resnet"])
def test_the_kl_falls_and_is_that_of_the_model_given_back(family):
    dense, pruned = made(family)
    buffers = {name: buffer.clone() for name, buffer in pruned.named_buffers()}
    with zoo.left_alone(dense, pruned):
        result = recovered(dense, pruned)

    assert result.kl_after < 0.8 * result.kl_before
    assert result.kl_before == pytest.approx(kl_of(dense, pruned), rel=1e-4)
    assert result.kl_after == pytest.approx(kl_of(dense, result.model), rel=1e-4)
    assert (result.epochs_run, result.stopped) == (3, "all of 3 epochs were run")
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in result.model.named_buffers())


def test_a_recovery_that_helps_nothing_gives_the_pruned_model_back():
    dense, pruned = made()
    result = recovered(dense, pruned, epochs=9, learning_rate=3.0)

    assert result.model is pruned
    assert result.kl_after == result.kl_before
    assert result.stopped == "the KL did not fall for 2 epochs"
    assert result.epochs_run == 2


def test_images_that_break_training_end_it_with_the_best_so_far_and_modes_and_frozen_parameters_stay():
    dense, pruned = made()
    frozen = pruned.get_submodule("classifier").weight.requires_grad_(False).clone()

    def breaking(epoch):
        return [torch.full((4, 3, 32, 32), torch.nan)] if epoch == 1 else shuffled(epoch)

    result = recovered(dense, pruned.train(), breaking)

    assert (result.epochs_run, result.stopped) == (1, "in epoch 2 the loss or the logits were not finite")
    assert (result.model.training, pruned.training, dense.training) == (True, True, False)
    assert torch.equal(zoo.inside(result.model).get_submodule("classifier").weight, frozen)
    assert result.kl_after == pytest.approx(kl_of(dense, result.model.eval()), rel=1e-4)
    assert result.kl_after < result.kl_before


def test_without_finite_logits_nothing_is_trained():
    dense, pruned = made()
    with torch.no_grad():
        pruned.get_submodule("classifier").bias.fill_(torch.nan)
    with pytest.raises(PruningError, match="KL of the pruned model"):
        recovered(dense, pruned)
