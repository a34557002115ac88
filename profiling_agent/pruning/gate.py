"""The gate that every prune passes: the pruned model computes what the masked baseline computes, with less."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call

from profiling_agent.errors import PruningError
from profiling_agent.modules.complexity import count_complexity
from profiling_agent.modules.inference import left_as_found, without_weights
from profiling_agent.pruning.following import is_response_norm
from profiling_agent.records import Cut, InputSpec, Unit

# Correct surgery differs by the order of fp32 sums, 1e-7 to 1e-6; one wrong index, head or batch-norm mean by 4e-4 and
# more even in tiny random models, whose logits hardly depend on the image.
MAX_MASK_ERROR = 1e-4


def mask_error(
    baseline: nn.Module, pruned: nn.Module, cuts: Sequence[Cut], keep: Mapping[str, list[int]], images: Tensor
) -> float:
    """Return how far the logits of `pruned` are from those of `baseline` with the cut channels masked.

    Masked: see `masked_parameters`. The result is the largest difference
    of a logit over the norm of the image's logits, the worst of `images` (batch, channels, height, width), nan where
    a logit isn't finite. Both models run in eval mode and are left as they were found.
    """
    masked: dict[str, Tensor] = {}
    for cut in cuts:
        masked |= masked_parameters(baseline, cut.unit, keep[cut.unit.name])
    with left_as_found(baseline), left_as_found(pruned), torch.inference_mode():
        answer: Any = functional_call(baseline.eval(), masked, (), {"pixel_values": images})
        expected = answer.logits.float()
        logits = pruned.eval()(pixel_values=images).logits.float()
    norms = expected.norm(dim=1).clamp_min(torch.finfo(torch.float32).tiny)
    # An infinite logit in both makes nan, and amax lets nan through.
    return float(((logits - expected).abs().amax(dim=1) / norms).amax())


def masked_parameters(model: nn.Module, unit: Unit, kept: Sequence[int]) -> dict[str, Tensor]:
    """Return, by parameter name, new values that make `model` blind to the channels of `unit` that aren't `kept`.

    The columns of the consumer and of every side reader that read a cut channel are zero. A global response norm on
    the way divides by a mean over channels, cut ones too: there the producers' rows are zero as well, so that cut
    channels add nothing to the mean, and the norm's weight is scaled by kept over all, which makes it a mean over the
    kept ones. `model` is not changed.
    """
    readers = (unit.consumer, *unit.side_readers)
    masked = {f"{name}.weight": _blind(_held(model, f"{name}.weight"), unit, kept, dim=1) for name in readers}
    if not unit.mask_exact:
        rows = [f"{name}.{leaf}" for name in unit.producers for leaf, _ in model.get_submodule(name).named_parameters()]
        masked |= {name: _blind(_held(model, name), unit, kept, dim=0) for name in rows}
        norms = [name for name in unit.inner if is_response_norm(model.get_submodule(name))]
        masked |= {f"{name}.weight": _held(model, f"{name}.weight") * (len(kept) / unit.width) for name in norms}
    return masked


def _held(model: nn.Module, name: str) -> Tensor:
    return model.get_parameter(name).detach()


def _blind(tensor: Tensor, unit: Unit, kept: Sequence[int], *, dim: int) -> Tensor:
    """Return a copy of a parameter that is zero at the cut channels of `dim`."""
    mask = torch.zeros(unit.width, dtype=tensor.dtype, device=tensor.device)
    mask[list(kept)] = 1
    # A head has as many consecutive rows or columns as it has channels.
    stacks = unit.stacks if dim == 0 else 1
    spread = mask.repeat_interleave(tensor.shape[dim] // unit.width // stacks).repeat(stacks)
    return tensor * spread.view(-1, *(1 for _ in tensor.shape[dim + 1 :]))


def check_mask_error(error: float) -> None:
    """Refuse a prune whose logits differ from the masked baseline's, or aren't finite.

    Raises:
        PruningError: `error` is above 1e-4, or nan.
    """
    if not math.isfinite(error):
        raise PruningError("the pruned model or the masked baseline gives logits that aren't finite; check the weights")
    if error > MAX_MASK_ERROR:
        raise PruningError(
            f"the pruned model doesn't compute what the masked baseline does: its logits differ by {error!r} of "
            f"their norm, at most {MAX_MASK_ERROR:g} is allowed; leave these units alone"
        )


def check_saving(baseline: nn.Module, pruned: nn.Module, spec: InputSpec) -> None:
    """Refuse a prune that saved nothing.

    Raises:
        PruningError: params or MACs did not go down.
    """
    before, after = (_totals(model, spec) for model in (baseline, pruned))
    for name, old, new in zip(("params", "macs"), before, after, strict=True):
        if new >= old:
            raise PruningError(f"the prune saves no {name}: {new!r} after, {old!r} before; cut more")


def _totals(model: nn.Module, spec: InputSpec) -> tuple[int, int]:
    rows = count_complexity(without_weights(model), spec).values()
    return sum(row.params for row in rows), sum(row.macs for row in rows)
