"""Models that people have, at full size, as their checkpoints are configured, with random weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn


@dataclass(frozen=True)
class Popular:
    """A full-size model, the tiny one of its family in benchmarks/support.py, and the time budget of its run."""

    kind: str
    family: str
    budget: str
    config: Mapping[str, Any] = field(default_factory=dict[str, Any])

    def build(self) -> nn.Module:
        """Return the model, with random weights."""
        config = getattr(transformers, f"{self.kind}Config")(**self.config)
        return getattr(transformers, f"{self.kind}ForImageClassification")(config)


SMALL: Mapping[str, Any] = {"hidden_size": 384, "num_attention_heads": 6}
REGNET_Y_400MF = {"layer_type": "y", "depths": [1, 3, 6, 6], "hidden_sizes": [48, 104, 208, 440], "groups_width": 8}
EFFICIENTNET_B0 = {"image_size": 224, "width_coefficient": 1.0, "depth_coefficient": 1.0, "hidden_dim": 1280}
MODELS: Mapping[str, Popular] = {
    "DeiT-S": Popular("DeiT", "deit", "10m", {"intermediate_size": 1536, **SMALL}),
    "BEiT-B": Popular("Beit", "beit", "20m", {"use_relative_position_bias": True, "use_mask_token": False}),
    # 14 px patches of 224, as people run it; its positions are for 518 px.
    "DINOv2-S": Popular("Dinov2", "dinov2", "10m", {"patch_size": 14, "image_size": 518, **SMALL}),
    "Swin-T": Popular("Swin", "swin", "10m"),
    # Trained layer scales are about 0.1; at 1e-6, what they start with, every block could go.
    "ConvNeXt-T": Popular("ConvNext", "convnext", "10m", {"layer_scale_init_value": 0.1}),
    "ResNet-50": Popular("ResNet", "resnet_bottleneck", "10m"),
    "RegNetY-400MF": Popular("RegNet", "regnet_y", "6m", {**REGNET_Y_400MF, "embedding_size": 32}),
    # The configuration's own defaults are B7.
    "EfficientNet-B0": Popular("EfficientNet", "efficientnet", "6m", {**EFFICIENTNET_B0, "dropout_rate": 0.2}),
    "MobileNetV2": Popular("MobileNetV2", "mobilenet_v2", "6m"),
    "MobileViT-S": Popular("MobileViT", "mobilevit", "10m", {"image_size": 224}),
    "SegFormer-B0": Popular("Segformer", "segformer", "6m"),
    "PVT-T": Popular("Pvt", "pvt", "10m"),
}


def built(name: str) -> nn.Module:
    """Return the model in eval mode, its batch norms as they are after seeing noise: untrained ones let signals die out in so deep a network.

    So do weights as small as some configurations draw them, EfficientNet's of norms among them: beside a norm's epsilon their variance is nothing.
    """
    torch.manual_seed(0)
    model = MODELS[name].build().eval()
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in model.modules() if norms else ():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_in")
    for norm in norms:
        nn.init.ones_(norm.weight)
        norm.momentum = None
        norm.train()
    if norms:
        with torch.no_grad():
            model(pixel_values=torch.randn(32, 3, 224, 224, generator=torch.Generator().manual_seed(1)))
    return model.eval()
