"""Evidence on units: predicted and measured KL, stored for the next run."""

import math
import os
from functools import partial
from itertools import accumulate
from pathlib import Path

import pytest
import sample_records
import torch
import zoo
from pruning import families
from scipy.stats import spearmanr
from torch.func import functional_call

from profiling_agent.errors import PruningError
from profiling_agent.lib.modules import following_norms, random_batch, watching
from profiling_agent.profiling import evidence
from profiling_agent.profiling.evidence import evidence_path, measure_sensitivity, read_evidence, store_evidence
from profiling_agent.profiling.profile import LatencyTable
from profiling_agent.pruning.compensation import compensate_layers_
from profiling_agent.pruning.criteria import gather_moments, order_channels
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.schemas import Cut, Evidence

IMAGES = random_batch(zoo.SPEC, 160, seed=1)
# Images come in blocks of 8, of which each fourth is judged by.
JUDGED = torch.arange(len(IMAGES)) // 8 % 4 == 3
# Of the judged images the first are measured on.
MEASURED_ON = JUDGED & (JUDGED.cumsum(0) <= 16)

small = partial(zoo.vit, num_hidden_layers=1, intermediate_size=128)
MODELS = {
    "vit": zoo.vit,
    "resnet": families.family("ResNet", **families.STAGED, embedding_size=32, layer_type="basic"),
    **{name: families.FAMILIES[name] for name in ("swin", "efficientnet", "convnextv2")},
}


def studied(model, images=IMAGES, *, size=50, **given):
    """The evidence by `images` in batches; labels are whatever they are."""
    batches = [(part, torch.zeros(len(part))) for part in images.split(size)]
    return measure_sensitivity(model, zoo.units_of(model), lambda: iter(batches), **given)


@pytest.fixture(scope="module")
def evidenced():
    """A small ViT and its evidence."""
    model = small()
    return model, studied(model)


def write_fold_(pruned, unit, kept, laid):
    """Write what a fold lays over an unpruned model into one with the same cut."""
    reader = f"{unit.consumer}.weight"
    for name, tensor in laid.items():
        if name == reader:
            size = tensor.shape[1] // unit.width
            tensor = tensor[:, [channel * size + column for channel in kept for column in range(size)]]
        if name == reader or name.endswith("running_mean") or name == f"{unit.consumer}.bias":
            pruned.state_dict()[name].copy_(tensor)


def folded_logits(model, unit, kept, images=IMAGES[MEASURED_ON]):
    """The logits of `images` before and once a unit keeps the channels `kept`, with the fold written into the layers."""
    norm = following_norms(model, [unit.consumer], IMAGES[:1]).get(unit.consumer)
    moments = gather_moments(model, [unit], [IMAGES[~JUDGED]])[unit.name]
    cut = Cut(unit=unit, keep=len(kept), requested_ratio=0.5)
    pruned = prune_model(model, [cut], spec=zoo.SPEC, keep={unit.name: kept}).model
    with torch.no_grad():
        write_fold_(pruned, unit, kept, evidence.fold(model, unit, moments, kept, norm))
        return [each(pixel_values=images).logits for each in (model, pruned)]


def kl_of(model, unit, kept, images):
    expected, found = (each.double().softmax(1) for each in folded_logits(model, unit, kept, images))
    return float((expected * (expected.log() - found.log())).sum(1).mean())


@pytest.mark.parametrize(
    "family", [pytest.param(name, marks=[pytest.mark.slow] * (name in ("swin", "efficientnet"))) for name in MODELS]
)
def test_a_measured_kl_is_that_of_the_cut_and_folded_model_which_is_left_as_it_was(family):
    model = MODELS[family]().train()
    model.classifier.eval()
    with zoo.left_alone(model):
        found = studied(model)

    model.eval()
    assert [row.unit for row in found.units] == [unit.name for unit in zoo.units_of(model)]
    for unit in {unit.kind: unit for unit in zoo.units_of(model)}.values():
        row = found.of(unit.name)
        assert row is not None
        assert sorted(row.order) == list(range(unit.width))
        measured = [option for option in row.options if option.measured]
        kept = [sorted(row.order[unit.width - option.keep :]) for option in measured]
        by_hand = [kl_of(model, unit, each, IMAGES[MEASURED_ON]) for each in kept]
        # What a wider width was found to cost is the least that a narrower one may.
        assert [option.kl for option in measured] == pytest.approx(list(accumulate(by_hand, max)), rel=1e-3)


@pytest.mark.parametrize("family", ["vit", "resnet_basic"])
def test_a_fold_by_the_moments_is_the_fold_that_a_prune_gets(family):
    # One unit alone: what its consumer reads in the cut model is what it read in the dense one.
    model = zoo.EVERY[family]()
    unit = zoo.units_of(model)[-1]
    norms = following_norms(model, [unit.consumer], IMAGES[:1])
    cut = Cut(unit=unit, keep=aligned_widths(unit.width, unit.step)[0], requested_ratio=0.75)
    kept = list(range(cut.keep))
    moments = gather_moments(model, [unit], [IMAGES])[unit.name]
    pruned = prune_model(model, [cut], spec=zoo.SPEC, keep={unit.name: kept}).model
    with torch.no_grad():
        compensate_layers_(model, pruned, [cut], {unit.name: kept}, lambda: [IMAGES])
        # The classifier is fitted too.
        zoo.inside(pruned).classifier.load_state_dict(model.classifier.state_dict())
        laid = evidence.fold(model, unit, moments, kept, norms.get(unit.consumer))
        found = functional_call(model, laid, (), {"pixel_values": IMAGES}).logits

    expected, dense = zoo.logits(pruned, IMAGES), zoo.logits(model, IMAGES)
    # The ridge is a share of the mean variance: of all columns here, of the kept ones there.
    assert float((found - expected).norm()) < 0.05 * float((expected - dense).norm())


def test_nothing_to_restore_the_mean_with_makes_a_fold_that_is_not_centred():
    model = zoo.resnet("basic")
    unit = zoo.units_of(model)[0]
    moments = gather_moments(model, [unit], [IMAGES])[unit.name]
    norm = following_norms(model, [unit.consumer], IMAGES[:1])[unit.consumer]
    free, shifted = (evidence.fold(model, unit, moments, range(16), each) for each in (None, norm))
    name, mean = f"{unit.consumer}.weight", f"{norm}.running_mean"

    assert free.keys() == {name}
    assert not free[name][:, 16:].any()
    # The shift makes the means equal: W E[x] = W' E[x_K] + shift.
    shift = model.get_buffer(mean) - shifted[mean]
    weight, folded = model.get_parameter(name).detach().flatten(1), shifted[name].flatten(1)
    assert torch.allclose(folded @ moments.mean + shift, weight @ moments.mean, atol=1e-5)


def test_every_aligned_width_is_an_option_and_two_are_measured(evidenced):
    model, found = evidenced
    for unit, row in zip(zoo.units_of(model), found.units, strict=True):
        widths = list(aligned_widths(unit.width, unit.step))[::-1]
        assert [option.keep for option in row.options] == widths
        assert sum(option.measured for option in row.options) == min(2, len(widths))
        assert row.options[-1].measured
        # Without a latency table nothing is known of time.
        assert row.latency_ms is None
        for option in row.options:
            assert option.params_saved == (unit.width - option.keep) * unit.params_per_channel
            assert option.macs_saved == (unit.width - option.keep) * unit.macs_per_channel
            assert option.latency_saved_ms is None
        # A narrower width never costs less.
        kls, predictions = ([getattr(option, name) for option in row.options] for name in ("kl", "predicted_kl"))
        assert (kls, predictions) == (sorted(kls), sorted(predictions))
        assert 0 < kls[0] < kls[-1]

    assert found.num_images == 160
    assert found.seconds > 0
    assert Evidence.model_validate_json(found.model_dump_json()) == found


def test_the_predictions_rank_as_the_measurements_do():
    model = zoo.vit()
    with torch.no_grad():
        for index, share in enumerate((3.0, 0.2)):
            mlp = model.vit.layers[index].mlp
            # Half of the channels repeat the others, and the two layers weigh unlike.
            mlp.fc1.weight[128:], mlp.fc1.bias[128:] = mlp.fc1.weight[:128].clone(), mlp.fc1.bias[:128].clone()
            mlp.fc2.weight.mul_(share)
    options = [option for row in studied(model).units for option in row.options if option.measured]

    assert len(options) == 8
    ranks = spearmanr([o.predicted_kl for o in options], [o.kl for o in options])
    assert ranks.statistic > 0.8  # pyright: ignore[reportAttributeAccessIssue] - scipy has no types for it


def test_channels_are_ordered_by_their_moments_and_a_given_order_stays(evidenced):
    model, found = evidenced
    moments = gather_moments(model, zoo.units_of(model), IMAGES[~JUDGED].split(32))

    for unit in zoo.units_of(model):
        row = found.of(unit.name)
        assert row is not None
        loss = (ordered := order_channels(model, unit, moments[unit.name])).loss
        assert row.order == ordered.order
        assert [o.predicted_kl for o in row.options] == pytest.approx([loss[unit.width - o.keep] for o in row.options])

    backwards = {row.unit: row.order[::-1] for row in found.units}
    assert {row.unit: row.order for row in studied(model, IMAGES[:128], orders=backwards).units} == backwards


def test_too_few_images_are_refused():
    with pytest.raises(PruningError, match=r"^127 calibration images .* at least 128"):
        studied(small(), IMAGES[:127])


def test_a_model_whose_logits_are_not_finite_is_refused():
    model = small()
    with torch.no_grad():
        model.get_parameter("vit.layernorm.bias")[0] = math.inf
    with pytest.raises(PruningError, match=r"logits that aren't finite: check its weights"):
        studied(model)


def test_the_same_seed_gives_the_same_evidence_whatever_the_batches():
    first, again, other = (studied(small(), size=size, seed=seed).units for seed, size in ((0, 50), (0, 7), (1, 50)))
    # Labels are drawn from the model's answers, and they weigh the errors.
    assert first == again != other


def test_a_table_has_what_widths_save(evidenced):
    model, found = evidenced
    times, unsteady = {"vit.layers.0.mlp": {128: 8.0, 96: 6.5, 64: 6.4, 32: 6.4}}, frozenset({"vit.layers.0.mlp"})
    found = evidence.with_latencies(found, zoo.units_of(model), LatencyTable(times=times, unsteady=unsteady))
    mlp, heads = found.of("vit.layers.0.mlp"), found.of("vit.layers.0.attention")

    assert mlp is not None
    assert heads is not None
    assert mlp.latency_ms == 8.0
    # The narrowest loses three quarters of its channels: a quarter of the 6 ms that are their share is 1.5 ms.
    assert [(o.keep, o.latency_saved_ms) for o in mlp.options] == [(96, 1.5), (64, 8.0 - 6.4), (32, 8.0 - 6.4)]
    assert (heads.latency_ms, {option.latency_saved_ms for option in heads.options}) == (None, {None})
    assert (mlp.is_unsteady, heads.is_unsteady) == (True, False)

    # Times of another run replace them; what it didn't time has none.
    table = LatencyTable(times={heads.unit: {4: 2.0, 3: 1.5, 2: 1.0, 1: 0.5}})
    now = {row.unit: row for row in evidence.with_latencies(found, zoo.units_of(model), table).units}
    assert [option.latency_saved_ms for option in now[heads.unit].options] == [0.5, 1.0, 1.5]
    assert (now[mlp.unit].latency_ms, now[mlp.unit].is_unsteady) == (None, False)
    assert [option.kl for option in now[mlp.unit].options] == [option.kl for option in mlp.options]


@pytest.mark.parametrize(
    ("measured", "predicted", "expected"),
    [
        # Between two measured widths as far as the prediction is; above the widest in proportion to it.
        ({6: 0.4, 2: 1.0}, {8: 1.0, 6: 2.0, 4: 3.0, 2: 5.0}, {8: 0.2, 6: 0.4, 4: 0.6, 2: 1.0}),
        # A narrower width that was measured to cost less costs as much, and so does what lies between.
        ({6: 0.5, 2: 0.3}, {8: 1.0, 6: 2.0, 4: 3.0, 2: 4.0}, {8: 0.25, 6: 0.5, 4: 0.5, 2: 0.5}),
        # Below zero is rounding.
        ({6: -1e-9, 2: 0.3}, {6: 1.0, 4: 2.0, 2: 3.0}, {6: 0.0, 4: 0.15, 2: 0.3}),
        # A prediction that falls is taken for one that stays.
        ({6: 0.1, 2: 0.3}, {6: 2.0, 4: 1.0, 2: 1.0}, {6: 0.1, 4: 0.1, 2: 0.3}),
        ({2: 0.3}, {2: 5.0}, {2: 0.3}),
    ],
)
def test_kls_are_drawn_through_the_measured_ones(measured, predicted, expected):
    drawn = evidence.interpolate_kl(measured, predicted)
    assert list(drawn) == list(predicted)
    assert drawn == pytest.approx(expected)


UNITS = sample_records.profile().units
EVIDENCE = sample_records.evidence(UNITS, dict.fromkeys((unit.name for unit in UNITS), sample_records.DOUBLING))


def test_stored_evidence_is_read_back_by_runs_that_depend_on_the_same(tmp_path: Path):
    path = evidence_path(tmp_path / "cache", {"model": "a", "seed": 0})
    assert read_evidence(path) is None
    store_evidence(path, EVIDENCE)

    assert read_evidence(evidence_path(tmp_path / "cache", {"seed": 0, "model": "a"})) == EVIDENCE
    assert read_evidence(evidence_path(tmp_path / "cache", {"model": "a", "seed": 1})) is None
    path.write_text(path.read_text()[:-100])
    assert read_evidence(path) is None


def test_the_oldest_make_way(tmp_path: Path):
    for number in range(evidence.MAX_FILES + 3):
        store_evidence(path := evidence_path(tmp_path, {"number": number}), EVIDENCE)
        os.utime(path, (number, number))
    store_evidence(evidence_path(tmp_path, {"number": "last"}), EVIDENCE)

    assert len(list(tmp_path.glob("*.json"))) == evidence.MAX_FILES
    assert not evidence_path(tmp_path, {"number": 3}).exists()
    assert read_evidence(evidence_path(tmp_path, {"number": "last"})) == EVIDENCE


def test_a_cache_that_can_not_be_written_costs_nothing(tmp_path: Path):
    (tmp_path / "file").write_text("")
    store_evidence(evidence_path(tmp_path / "file" / "evidence", {}), EVIDENCE)
    (path := evidence_path(tmp_path, {})).mkdir()
    store_evidence(path, EVIDENCE)
    assert read_evidence(path) is None


def test_a_multi_label_models_evidence_is_of_each_classs_own_probability():
    model = small(problem_type="multi_label_classification")
    unit = zoo.units_of(model)[-1]
    images = random_batch(zoo.SPEC, 480, seed=3)

    several, one = (
        float(gather_moments(each, [unit], images.split(60))[unit.name].sensitivity.trace())
        for each in (model, small())
    )

    # The Fisher information of independent yes-or-no answers to the logits is diag(p (1 - p)).
    outputs: list[torch.Tensor] = []
    with watching(model, [unit.consumer], after=lambda _name, _inputs, output: outputs.append(output)):
        logits = model(pixel_values=images[:64].requires_grad_()).logits
    expected = 0.0
    for index, share in enumerate(logits.detach().sigmoid().T):
        (gradient,) = torch.autograd.grad(logits[:, index].sum(), outputs[0], retain_graph=True)
        expected += float((share * (1 - share) * gradient.square().flatten(1).sum(1)).mean())
    assert several == pytest.approx(expected, rel=0.2)
    assert one != pytest.approx(expected, rel=0.3)

    row = studied(model).of(unit.name)
    assert row is not None
    kept = sorted(row.order[unit.width - row.options[-1].keep :])
    pair = [torch.stack([each, torch.zeros_like(each)], -1).double() for each in folded_logits(model, unit, kept)]
    by_hand = torch.nn.functional.kl_div(pair[1].log_softmax(-1), pair[0].softmax(-1), reduction="sum") / len(pair[0])
    assert row.options[-1].kl == pytest.approx(float(by_hand), rel=1e-3)
