import copy
import math

import pytest
import torch
import zoo
from torch import nn

from profiling_agent.errors import PruningError
from profiling_agent.modules.inference import mean_kl, random_batch
from profiling_agent.pruning.compensation import Calibration, compensate, reestimate_, regrouped
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.torch_artifact import load_module, save_model
from profiling_agent.schemas import Cut, UnitKind

FAMILIES = {**zoo.FAMILIES, "resnet_basic": lambda: zoo.resnet("basic")}
IMAGES = random_batch(zoo.SPEC, 160, seed=7)


def batches_of(images, size=32):
    return lambda: ((part, torch.zeros(len(part), dtype=torch.int64)) for part in images.split(size))


def calibration_of(images, size=32):
    return Calibration(batches=batches_of(images, size), device=torch.device("cpu"), dtype=torch.float32)


def cuts_of(model, ratio=0.4, kinds=tuple(UnitKind)):
    units = find_units(model, zoo.SPEC, {}).units
    return [Cut(unit=unit, keep=snap(unit, ratio), requested_ratio=ratio) for unit in units if unit.kind in kinds]


def pruned_and_compensated(model, images=IMAGES, **cutting):
    cuts = cuts_of(model, **cutting)
    pruned = prune_model(model, cuts, spec=zoo.SPEC)
    return pruned.model, compensate(model, pruned.model, cuts, pruned.keep, batches_of(images))


def logits(model, images=IMAGES):
    with torch.inference_mode():
        return model(pixel_values=images).logits


@pytest.mark.parametrize("family", FAMILIES)
def test_the_divergence_falls_and_is_what_the_compensated_model_has(family):
    model = FAMILIES[family]()
    pruned, done = pruned_and_compensated(model)
    judged = torch.cat(list(calibration_of(IMAGES).judged()))

    assert "least squares" in done.steps
    assert 0 <= done.kl_after < done.kl_before
    assert done.kl_before == pytest.approx(mean_kl(logits(model, judged), logits(pruned, judged)), rel=1e-3, abs=1e-9)
    after = mean_kl(logits(model, judged), logits(done.model, judged))
    assert done.kl_after == pytest.approx(after, rel=1e-3, abs=1e-9)


@pytest.mark.parametrize("family", FAMILIES)
def test_both_models_are_left_as_they_were(family):
    model = FAMILIES[family]()
    cuts = cuts_of(model)
    pruned = prune_model(model.train(), cuts, spec=zoo.SPEC)
    before = [copy.deepcopy(each.state_dict()) for each in (model, pruned.model)]
    done = compensate(model, pruned.model, cuts, pruned.keep, batches_of(IMAGES))

    assert done.model is not pruned.model
    for each, state in zip((model, pruned.model), before, strict=True):
        assert all(torch.equal(state[name], tensor) for name, tensor in each.state_dict().items())
    for each in (model, pruned.model, done.model):
        assert all(module.training for module in each.modules())
        assert not any(module._forward_pre_hooks for module in each.modules())
    assert {p.dtype for p in done.model.parameters()} == {torch.float32}
    assert all(p.requires_grad for p in done.model.parameters())


@pytest.mark.parametrize("make", [zoo.vit, zoo.swin])
def test_a_cut_of_heads_is_folded_into_the_output_projection_only(make):
    model = make()
    pruned, done = pruned_and_compensated(model, ratio=0.5, kinds=(UnitKind.HEADS,))
    changed = {
        name
        for name, tensor in done.model.named_parameters()
        if not torch.equal(tensor, dict(pruned.named_parameters())[name])
    }

    assert done.steps == ("least squares",)
    assert {name.rsplit(".", 2)[1] for name in changed} == {"o_proj"}


def moved(model, other, leaf):
    names = [name for name, _ in model.named_buffers() if name.endswith(leaf)]
    return [name for name in names if not torch.equal(model.get_buffer(name), other.get_buffer(name))]


def test_batch_norms_that_fitted_their_images_are_fitted_to_them_again():
    # Least squares restores the means; what varies less behind a fold is left to this step.
    model = zoo.resnet()
    with torch.no_grad():
        reestimate_(model, calibration_of(IMAGES).every())
    pruned, done = pruned_and_compensated(model, ratio=0.5)

    assert done.steps == ("least squares", "batch norm")
    assert moved(done.model, pruned, "running_var")


def test_batch_norms_that_never_fitted_the_images_take_the_shift_of_the_fold_alone():
    model = zoo.resnet()
    consumers = {cut.unit.consumer for cut in cuts_of(model, ratio=0.5)}
    pruned, done = pruned_and_compensated(model, ratio=0.5)

    assert done.steps == ("least squares",)
    assert moved(done.model, pruned, "running_var") == []
    expected = {name.replace(".convolution", ".normalization.running_mean") for name in consumers}
    assert set(moved(done.model, pruned, "running_mean")) == expected


def test_batch_norm_statistics_are_those_of_the_images():
    model = zoo.inside(nn.Sequential())
    model.stem = nn.Conv2d(3, 4, 1, bias=False)
    model.norm = nn.BatchNorm2d(4, momentum=0.3)
    model.drop = nn.Dropout(0.5)
    model.forward = lambda pixel_values: model.drop(model.norm(model.stem(pixel_values)))
    assert model.norm.running_mean is not None
    assert model.norm.running_var is not None
    model.norm.running_mean.fill_(9.0)
    with torch.no_grad():
        reestimate_(model.eval(), calibration_of(IMAGES, 50).every())
        seen = model.stem(IMAGES).unflatten(0, (5, 32)).movedim(2, 1).flatten(2)  # (batch, channel, values)

    assert torch.allclose(model.norm.running_mean, seen.mean(2).mean(0), atol=1e-6)
    assert torch.allclose(model.norm.running_var, seen.var(2).mean(0), rtol=1e-5)
    assert (model.norm.momentum, model.norm.training, model.drop.training) == (0.3, False, False)


def test_a_hundred_images_are_too_few_and_it_says_so():
    pruned, done = pruned_and_compensated(zoo.vit(), IMAGES[:100])

    assert done.model is pruned
    assert done.steps == ()
    assert done.note == "not compensated: 100 different calibration images, at least 128 are needed"
    assert done.kl_before == done.kl_after > 0


def test_the_same_image_many_times_over_is_one_image():
    pruned, done = pruned_and_compensated(zoo.resnet(), IMAGES[:1].repeat(160, 1, 1, 1))

    assert done.model is pruned
    assert done.note is not None
    assert "1 different calibration images" in done.note
    assert math.isfinite(done.kl_after)


def test_images_that_hardly_differ_are_no_harm():
    nearly = IMAGES[:1] + 1e-3 * IMAGES
    _, done = pruned_and_compensated(zoo.vit(), nearly)

    assert done.kl_after <= done.kl_before
    assert all(tensor.isfinite().all() for tensor in done.model.state_dict().values())


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


def test_a_compensated_model_is_saved_and_loaded_as_it_is(tmp_path):
    model = zoo.swin()
    _, done = pruned_and_compensated(model)
    save_model(
        done.model, tmp_path / "m", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo", cuts=cuts_of(model)
    )

    assert torch.equal(logits(load_module(tmp_path / "m")), logits(done.model))


def test_the_two_parts_share_no_image_and_miss_none():
    calibration = calibration_of(torch.arange(160.0).view(160, 1, 1, 1), 7)
    fitted, judged = (
        {int(i) for part in parts for i in part.flatten()} for parts in (calibration.fitted(), calibration.judged())
    )

    assert (len(fitted), len(judged)) == (120, 40)
    assert fitted | judged == set(range(160))


def test_regrouped_batches_are_whole():
    sizes = [len(batch) for batch in regrouped([torch.zeros(n, 1) for n in (3, 20, 1, 64, 12)], 32)]

    assert sizes == [32, 32, 32]
