"""The paper's four models at full size, with random weights: for benchmarks of cost, where accuracy says nothing."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import transformers
from torch import nn

from profiling_agent.lib.costs import count_complexity
from profiling_agent.lib.modules import without_weights
from profiling_agent.pruning.widths import crossings, snap
from profiling_agent.schemas import Cut, InputSpec, Unit

SPEC = InputSpec(channels=3, height=224, width=224, source="benchmark")
OF_IMAGENET: dict[str, Any] = {"num_labels": 1000}
SWIN_B = transformers.SwinConfig(embed_dim=128, depths=[2, 2, 18, 2], num_heads=[4, 8, 16, 32], **OF_IMAGENET)
MODELS: Mapping[str, Callable[[], nn.Module]] = {
    "ViT-B/16": lambda: transformers.ViTForImageClassification(transformers.ViTConfig(**OF_IMAGENET)),
    "DeiT-B/16": lambda: transformers.DeiTForImageClassification(transformers.DeiTConfig(**OF_IMAGENET)),
    "Swin-B": lambda: transformers.SwinForImageClassification(SWIN_B),
    "ResNet-101": lambda: transformers.ResNetForImageClassification(
        transformers.ResNetConfig(depths=[3, 4, 23, 3], **OF_IMAGENET)
    ),
}


def build(name: str) -> nn.Module:
    """Return the model in eval mode, the same weights on each call."""
    torch.manual_seed(0)
    return MODELS[name]().eval()


def num_params(model: nn.Module) -> int:
    """Return the number of params."""
    return sum(parameter.numel() for parameter in model.parameters())


def macs_by_module(model: nn.Module) -> dict[str, int]:
    """Return the MACs of one image by module name."""
    return {name: row.macs for name, row in count_complexity(without_weights(model), SPEC).items()}


def cuts_for_macs(model: nn.Module, units: Sequence[Unit], macs: Mapping[str, int], share: float) -> tuple[Cut, ...]:
    """Return aligned cuts, by the same ratio of each unit, that save as nearly as they can the `share` of MACs."""
    ratios = [step / 400 for step in range(4, 300)]
    plans = {ratio: _uniform(units, ratio) for ratio in ratios}
    total = sum(macs.values())
    nearest = min(ratios, key=lambda ratio: abs(_macs_saved(model, plans[ratio], macs) / total - share))
    return plans[nearest]


def _uniform(units: Sequence[Unit], ratio: float) -> tuple[Cut, ...]:
    cuts = (Cut(unit=unit, keep=snap(unit, ratio), requested_ratio=ratio) for unit in units)
    return tuple(cut for cut in cuts if cut.keep < cut.unit.width)


def _macs_saved(model: nn.Module, cuts: Sequence[Cut], macs: Mapping[str, int]) -> int:
    """Return the MACs that `cuts` save; where columns of one cross the rows of another, they are counted once."""
    saved = sum(cut.macs_saved for cut in cuts)
    for name, gone, _ in crossings(cuts):
        layer = model.get_submodule(name)
        kernel = layer.get_parameter("weight")[0, 0].numel()
        saved -= macs[name] * kernel * gone // num_params(layer)
    return saved
