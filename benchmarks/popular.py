"""Models that people have, at full size, as their checkpoints are configured, with random weights."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers
from torch import Tensor, nn

# Of noise, which norms of convolutions are estimated on.
NUM_NOISE, SIDE = 32, 224


@dataclass(frozen=True)
class Popular:
    """A full-size model, the tiny one of its family in benchmarks/support.py, and the time budget of its run."""

    build: Callable[[], nn.Module]
    family: str
    budget: str


SMALL_HEADS: Mapping[str, Any] = {"hidden_size": 384, "num_attention_heads": 6}
REGNET_Y_400MF = transformers.RegNetConfig(
    layer_type="y", depths=[1, 3, 6, 6], hidden_sizes=[48, 104, 208, 440], groups_width=8, embedding_size=32
)
MODELS: Mapping[str, Popular] = {
    "DeiT-S": Popular(
        lambda: transformers.DeiTForImageClassification(transformers.DeiTConfig(intermediate_size=1536, **SMALL_HEADS)),
        "deit",
        "10m",
    ),
    "BEiT-B": Popular(
        lambda: transformers.BeitForImageClassification(
            transformers.BeitConfig(use_relative_position_bias=True, use_mask_token=False)
        ),
        "beit",
        "20m",
    ),
    # 14 px patches of 224, as people run it; its positions are for 518 px.
    "DINOv2-S": Popular(
        lambda: transformers.Dinov2ForImageClassification(
            transformers.Dinov2Config(patch_size=14, image_size=518, **SMALL_HEADS)
        ),
        "dinov2",
        "10m",
    ),
    "Swin-T": Popular(lambda: transformers.SwinForImageClassification(transformers.SwinConfig()), "swin", "10m"),
    # Trained layer scales are about 0.1; at 1e-6, what they start with, every block could go.
    "ConvNeXt-T": Popular(
        lambda: transformers.ConvNextForImageClassification(transformers.ConvNextConfig(layer_scale_init_value=0.1)),
        "convnext",
        "10m",
    ),
    "ResNet-50": Popular(
        lambda: transformers.ResNetForImageClassification(transformers.ResNetConfig()), "resnet_bottleneck", "10m"
    ),
    "RegNetY-400MF": Popular(lambda: transformers.RegNetForImageClassification(REGNET_Y_400MF), "regnet_y", "6m"),
    # The configuration's own defaults are B7.
    "EfficientNet-B0": Popular(
        lambda: transformers.EfficientNetForImageClassification(
            transformers.EfficientNetConfig(
                image_size=224, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, dropout_rate=0.2
            )
        ),
        "efficientnet",
        "6m",
    ),
    "MobileNetV2": Popular(
        lambda: transformers.MobileNetV2ForImageClassification(transformers.MobileNetV2Config()), "mobilenet_v2", "6m"
    ),
    "MobileViT-S": Popular(
        lambda: transformers.MobileViTForImageClassification(transformers.MobileViTConfig(image_size=224)),
        "mobilevit",
        "10m",
    ),
    "SegFormer-B0": Popular(
        lambda: transformers.SegformerForImageClassification(transformers.SegformerConfig()), "segformer", "6m"
    ),
    "PVT-T": Popular(lambda: transformers.PvtForImageClassification(transformers.PvtConfig()), "pvt", "10m"),
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
            model(pixel_values=_noise())
    return model.eval()


def _noise() -> Tensor:
    return torch.randn(NUM_NOISE, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))
