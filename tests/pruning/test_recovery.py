import pytest
import torch
import zoo

from profiling_agent.errors import PruningError
from profiling_agent.lib.modules import mean_kl, random_batch
from profiling_agent.pruning.compensation import distillation, recover
from profiling_agent.pruning.prune import prune_model

IMAGES, JUDGED = random_batch(zoo.SPEC, 48, seed=1), random_batch(zoo.SPEC, 16, seed=2)


def batches(epoch):
    order = torch.randperm(len(IMAGES), generator=torch.Generator().manual_seed(epoch))
    return IMAGES[order].split(16)


def judged():
    return JUDGED.split(8)


def made(family="vit"):
    dense = zoo.FAMILIES[family]()
    return dense, zoo.inside(prune_model(dense, zoo.halved(zoo.units_of(dense)), spec=zoo.SPEC).model)


def recovered(dense, pruned, images=batches, *, epochs=3, learning_rate=1e-3):
    return recover(dense, pruned, images, judged, epochs=epochs, learning_rate=learning_rate)


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


def test_images_that_break_training_end_it_with_the_best_so_far():
    dense, pruned = made()

    def breaking(epoch):
        return [torch.full((4, 3, 32, 32), torch.nan)] if epoch == 1 else batches(epoch)

    result = recovered(dense, pruned, breaking)

    assert result.stopped == "in epoch 2 the loss or the logits were not finite"
    assert result.epochs_run == 1
    assert result.kl_after == pytest.approx(kl_of(dense, result.model), rel=1e-4)
    assert result.kl_after < result.kl_before


def test_modes_and_frozen_parameters_are_kept():
    dense, pruned = made()
    frozen = pruned.get_submodule("classifier").weight.requires_grad_(False).clone()
    result = recovered(dense, pruned.train())

    assert result.model.training
    assert pruned.training
    assert not dense.training
    assert torch.equal(zoo.inside(result.model).get_submodule("classifier").weight, frozen)
    assert result.kl_after < result.kl_before


def test_distillation_is_the_kl_divergence_at_a_temperature():
    # Halved, these logits are log 3 and 0: probabilities 3/4 and 1/4 against 1/2 and 1/2, times 2 * 2.
    target = torch.tensor([[2 * torch.log(torch.tensor(3.0)), 0.0]])
    by_hand = 4 * (0.75 * torch.log(torch.tensor(1.5)) + 0.25 * torch.log(torch.tensor(0.5)))

    assert distillation(target, torch.zeros(1, 2), 2.0) == pytest.approx(float(by_hand), rel=1e-6)


def test_without_images_nothing_is_trained():
    with pytest.raises(PruningError, match="0 images to recover with"):
        recovered(*made(), lambda _epoch: [])


def test_a_model_without_finite_logits_is_refused():
    dense, pruned = made()
    with torch.no_grad():
        pruned.get_submodule("classifier").bias.fill_(torch.nan)

    with pytest.raises(PruningError, match="KL of the pruned model"):
        recovered(dense, pruned)
