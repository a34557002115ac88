import pytest
import torch
import zoo
from pruning import families
from torch.func import functional_call
from zoo import logits, units_of, write_fold_

from profiling_agent.lib.modules import following_norms, random_batch
from profiling_agent.profiling.evidence import fold
from profiling_agent.pruning.compensation import compensate_units_
from profiling_agent.pruning.criteria import gather_moments
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.schemas import Cut

IMAGES = random_batch(zoo.SPEC, 48, seed=7)
MODELS = {
    **{name: zoo.EVERY[name] for name in ("vit", "swin", "resnet", "resnet_basic")},
    **{name: families.FAMILIES[name] for name in ("efficientnet", "mobilenet_v2", "convnextv2", "segformer")},
}


def narrowest(unit):
    return Cut(unit=unit, keep=aligned_widths(unit.width, unit.step)[0], requested_ratio=0.75)


def folded_and_cut(model, unit, norms):
    """The unpruned model with the fold laid over it, and the cut model with the same fold written into its layers."""
    cut = narrowest(unit)
    kept = sorted(torch.randperm(unit.width, generator=torch.Generator().manual_seed(0))[: cut.keep].tolist())
    moments = gather_moments(model, [unit], [IMAGES])[unit.name]
    laid = fold(model, unit, moments, kept, norms.get(unit.consumer))
    pruned = prune_model(model, [cut], spec=zoo.SPEC, keep={unit.name: kept}).model
    with torch.no_grad():
        write_fold_(pruned, unit, kept, laid)
        return functional_call(model, laid, (), {"pixel_values": IMAGES}).logits, logits(pruned, IMAGES)


@pytest.mark.slow
@pytest.mark.parametrize("family", MODELS)
def test_the_overlay_computes_what_the_cut_and_folded_model_computes(family):
    model = MODELS[family]()
    units = units_of(model)
    norms = following_norms(model, [unit.consumer for unit in units], IMAGES[:1])
    before = logits(model, IMAGES)
    scale = float(before.norm(dim=1).max())
    with zoo.left_alone(model):
        for unit in {unit.kind: unit for unit in units}.values():
            overlaid, cut = folded_and_cut(model, unit, norms)
            assert torch.allclose(overlaid, cut, atol=1e-5 * scale)
            assert not torch.allclose(overlaid, before, atol=1e-5 * scale)


@pytest.mark.parametrize("family", ["vit", "resnet_basic"])
def test_a_fold_by_the_moments_is_the_fold_that_a_prune_gets(family):
    # One unit alone: what its consumer reads in the cut model is what it read in the dense one.
    model = MODELS[family]()
    unit = units_of(model)[-1]
    norms = following_norms(model, [unit.consumer], IMAGES[:1])
    cut = narrowest(unit)
    kept = list(range(cut.keep))
    moments = gather_moments(model, [unit], [IMAGES])[unit.name]
    pruned = prune_model(model, [cut], spec=zoo.SPEC, keep={unit.name: kept}).model
    with torch.no_grad():
        compensate_units_(model, pruned, [cut], {unit.name: kept}, lambda: [IMAGES])
        laid = fold(model, unit, moments, kept, norms.get(unit.consumer))
        found = functional_call(model, laid, (), {"pixel_values": IMAGES}).logits

    expected, dense = logits(pruned, IMAGES), logits(model, IMAGES)
    # The ridge is a share of the mean variance: of all columns here, of the kept ones there.
    assert float((found - expected).norm()) < 0.05 * float((expected - dense).norm())


def test_nothing_to_restore_the_mean_with_makes_a_fold_that_is_not_centred():
    model = zoo.resnet("basic")
    unit = units_of(model)[0]
    moments = gather_moments(model, [unit], [IMAGES])[unit.name]
    norm = following_norms(model, [unit.consumer], IMAGES[:1])[unit.consumer]
    free, shifted = (fold(model, unit, moments, range(16), each) for each in (None, norm))
    name, mean = f"{unit.consumer}.weight", f"{norm}.running_mean"

    assert free.keys() == {name}
    assert not free[name][:, 16:].any()
    # The shift makes the means equal: W E[x] = W' E[x_K] + shift.
    shift = model.get_buffer(mean) - shifted[mean]
    weight, folded = model.get_parameter(name).detach().flatten(1), shifted[name].flatten(1)
    assert torch.allclose(folded @ moments.mean + shift, weight @ moments.mean, atol=1e-5)
