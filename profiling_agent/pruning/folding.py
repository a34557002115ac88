"""The unpruned model made to behave as if one unit were cut and compensated: weights to lay over its own."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from profiling_agent.modules.norms import has_bias
from profiling_agent.pruning.moments import UnitMoments, columns_of, damp_, divide_, matrix_of
from profiling_agent.pruning.verify import masked_parameters
from profiling_agent.records import Unit


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What a unit's readers hold once it keeps `columns` of its consumer's matrix; `shift` is a new bias' addition."""

    columns: list[int]
    weight: Tensor
    shift: Tensor
    masks: Mapping[str, Tensor]


def fold(model: nn.Module, unit: Unit, moments: UnitMoments, kept: Sequence[int], *, shifts: bool) -> Folded:
    """Return the ridge regression of what the consumer read on what is kept: W' = W_K + W_P C_PK (C_KK + ridge m I)^-1.

    `shifts` says that the outputs' means can be restored; C isn't centred otherwise (ThiNet, 2017; He et al., 2017).
    """
    layer = model.get_submodule(unit.consumer)
    weight = matrix_of(layer).double()
    second = moments.covariance.double() if shifts else moments.gram
    columns = columns_of(unit, layer, kept)
    lost = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
    lost[columns] = False
    mean_square = second.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    taken = divide_(second[lost][:, columns], damp_(second[columns][:, columns], mean_square))
    folded = weight[:, columns] + weight[:, lost] @ taken
    mean = moments.mean.double()
    shift = weight @ mean - folded @ mean[columns]
    masked = masked_parameters(model, unit, kept)
    return Folded(
        columns=columns,
        weight=folded.float(),
        shift=(shift if shifts else torch.zeros_like(shift)).float(),
        masks={name: tensor for name, tensor in masked.items() if name != f"{unit.consumer}.weight"},
    )


def overlay(model: nn.Module, unit: Unit, folded: Folded, norm: str | None) -> dict[str, Tensor]:
    """Return, by name, the parameters and buffers that make `model` compute what the cut and folded one does.

    `norm` is the batch norm that reads the consumer's outputs: it takes the shift where the consumer has no bias.
    """
    layer = model.get_submodule(unit.consumer)
    weight = layer.get_parameter("weight")
    matrix = torch.zeros_like(matrix_of(layer))
    matrix[:, folded.columns] = folded.weight
    laid = {**folded.masks, f"{unit.consumer}.weight": matrix.reshape(weight.shape).to(weight.dtype)}
    if has_bias(layer):
        bias = layer.get_parameter("bias").detach()
        laid[f"{unit.consumer}.bias"] = bias + folded.shift.to(bias.dtype)
    elif norm is not None:
        mean = model.get_submodule(norm).get_buffer("running_mean")
        laid[f"{norm}.running_mean"] = mean - folded.shift.to(mean.dtype)
    return laid
