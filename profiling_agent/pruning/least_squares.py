"""Fold what the cut channels carried into the consumer's weights for the kept ones: ridge regression, no training."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from profiling_agent.pruning.statistics import Moments, in_order, paired_moments
from profiling_agent.records import Cut

# Share of the kept channels' mean second moment, so that few images aren't fitted by heart (facts/pruning.md, 3.2).
RIDGE = 1e-2
# Below this share of the second moment a variance is the rounding of float32 products.
ROUNDING = 1e-6


@dataclass(frozen=True, slots=True, kw_only=True)
class Fold:
    """x is about `mixing` z + `shift`: (width, kept) and (width,), float64."""

    mixing: Tensor
    shift: Tensor


def fit(moments: Moments, kept: Sequence[int], *, centred: bool, ridge: float = RIDGE) -> Fold:
    """Return the dense inputs x of a consumer as the ridge regression predicts them from the pruned ones z.

    With S the selection of the kept channels: mixing = S + (E[x z'] - S E[z z']) (E[z z'] + ridge m I)^-1, m the mean of
    E[z z']'s diagonal, all of them `centred` where the consumer has a bias that can take the shift. Where z is x_K, rows
    K are the identity and rows P are A = C_PK (C_KK + ridge m I)^-1 (ThiNet, 2017; He et al., 2017). Channels that
    don't vary predict nothing: then the mixing is S.
    """
    cross, gram, scale = moments.cross, moments.gram, moments.gram.diagonal().mean()
    if centred:
        cross = cross - torch.outer(moments.dense_mean, moments.pruned_mean)
        gram = gram - torch.outer(moments.pruned_mean, moments.pruned_mean)
    mixing = torch.zeros_like(cross)
    mixing[list(kept), range(len(kept))] = 1
    varied = gram.diagonal().mean()
    if varied > ROUNDING * scale:
        missing = cross - mixing @ gram
        factor, failed = torch.linalg.cholesky_ex(gram + ridge * varied * torch.eye(len(kept)).to(gram))
        if not failed:
            mixing = mixing + torch.cholesky_solve(missing.T, factor).T
    shift = moments.dense_mean - mixing @ moments.pruned_mean
    return Fold(mixing=mixing, shift=shift if centred else torch.zeros_like(shift))


def has_bias(layer: nn.Module) -> bool:
    """Say whether `layer` adds a bias, which a fold can shift."""
    return dict(layer.named_parameters(recurse=False)).get("bias") is not None


def fold_(layer: nn.Module, dense: nn.Module, fold: Fold, rows: Sequence[int]) -> None:
    """Make `layer` compute of z what `rows` of `dense`'s outputs are of the x that `fold` predicts: W' = W mixing.

    A convolution mixes channels alike in every tap; its bias takes the shift as if there were no padding.
    """
    weight = dense.get_parameter("weight").double()[list(rows)]
    layer.get_parameter("weight").copy_(torch.einsum("oc...,ck->ok...", weight, fold.mixing))
    if has_bias(layer):
        taps_summed = weight.reshape(*weight.shape[:2], -1).sum(2)
        bias = dense.get_parameter("bias").double()[list(rows)] + taps_summed @ fold.shift
        layer.get_parameter("bias").copy_(bias)


def compensate_units_(
    original: nn.Module,
    pruned: nn.Module,
    cuts: Sequence[Cut],
    keep: Mapping[str, list[int]],
    images: Callable[[], Iterable[Tensor]],
) -> None:
    """Fold every cut unit into its consumer in `pruned`, one after the other as the network comes to them.

    Each is fitted to what the units before it, already folded, leave of the activations, so errors don't add up. That
    takes a pass of both models, up to the consumer, for every unit. Fitted to the dense model's activations alone, in
    one pass for all, the shared ResNet cut by a quarter keeps 69.7% top-1 (three draws of 256 images) instead of 75.2.
    """
    consumers = {cut.unit.consumer: cut.unit for cut in cuts}
    cut_rows = {producer: keep[cut.unit.name] for cut in cuts for producer in cut.unit.producers}
    for name in in_order(original, consumers, next(iter(images()))[:1]):
        dense, layer, unit = original.get_submodule(name), pruned.get_submodule(name), consumers[name]
        size = dense.get_parameter("weight").shape[1] // unit.width
        kept = [index * size + column for index in keep[unit.name] for column in range(size)]
        rows = cut_rows.get(name, range(len(dense.get_parameter("weight"))))
        moments = paired_moments(original, pruned, name, images())
        fold = fit(moments, kept, centred=has_bias(layer))
        fold_(layer, dense, fold, rows)
