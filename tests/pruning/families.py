"""One tiny real model for each family that can be pruned, wide enough that a quarter of every unit can go."""

from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from skips import TIMM
from torch import nn
from zoo import LABELS, PLAIN

from profiling_agent.data.models import make_plain_
from profiling_agent.schemas import InputSpec

STAGED = {"id2label": LABELS, "depths": [1, 1], "hidden_sizes": [64, 128]}
PYRAMID = {
    "id2label": LABELS,
    "num_encoder_blocks": 2,
    "depths": [1, 1],
    "hidden_sizes": [32, 64],
    "patch_sizes": [4, 2],
    "strides": [4, 2],
    "num_attention_heads": [4, 8],
    "mlp_ratios": [4, 4],
}
WINDOWED = {
    "image_size": 32,
    "patch_size": 2,
    "embed_dim": 32,
    "depths": [2, 2],
    "window_size": 4,
    "id2label": LABELS,
}
SHIFTED = {"img_size": 32, "patch_size": 2, "window_size": 4, "embed_dim": 32, "depths": [2, 2], "num_heads": [4, 8]}
LEVIT: dict[str, Any] = {
    "image_size": 64,
    "hidden_sizes": [32, 64, 96],
    "num_attention_heads": [2, 2, 4],
    "depths": [1, 1, 1],
    "id2label": LABELS,
}
FEW_BLOCKS = {"num_block_repeats": [1] * 3, "kernel_sizes": [3, 3, 5], "strides": [1, 2, 1]}
EFFICIENT = {
    "image_size": 32,
    "width_coefficient": 1.0,
    "depth_coefficient": 1.0,
    "in_channels": [32, 16, 24],
    "out_channels": [16, 24, 24],
    "expand_ratios": [1, 4, 4],
    "hidden_dim": 1280,
    "id2label": LABELS,
} | FEW_BLOCKS


def randomised(model: nn.Module, size: int = 32) -> Any:
    """Make every norm, bias, scale and table matter, and keep the signal alive to the last layer of deep models."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for tensor in model.parameters():
            if tensor.dim() == 1:
                tensor.add_(torch.rand(tensor.shape, generator=generator) * 0.3)
            else:
                fan_in = max(tensor[0].numel(), 4)
                tensor.copy_(torch.randn(tensor.shape, generator=generator) * (2 / fan_in) ** 0.5)
        norms = [module for module in model.modules() if isinstance(module, nn.modules.batchnorm._BatchNorm)]
        model.eval()
        for norm in norms:
            norm.train().momentum = 1.0
        model(pixel_values=torch.randn(8, 3, size, size, generator=generator))
        for norm in norms:
            assert norm.running_mean is not None
            assert norm.running_var is not None
            chance = torch.rand(norm.running_var.shape, generator=generator) * 0.3
            norm.running_mean.add_(chance * norm.running_var.sqrt())
            norm.running_var.mul_(1 + chance)
    return model.eval()


def made(name: str, settings: dict[str, Any]) -> Any:
    config = getattr(hf, f"{name}Config")(**settings)
    config._attn_implementation = "sdpa" if name == "Data2VecVision" else None
    return randomised(getattr(hf, f"{name}ForImageClassification")(config), settings.get("image_size", 32))


def contrasted(name: str, settings: dict[str, Any]) -> Any:
    """Make a model of text and images, of which the half that sees is used."""
    words = {"num_hidden_layers": 1, "hidden_size": 16, "intermediate_size": 16, "vocab_size": 20}
    seeing = {key: value for key, value in PLAIN.items() if key != "id2label"} | settings
    config = getattr(hf, f"{name}Config")(
        vision_config=seeing, text_config=words | {"num_attention_heads": 2}, id2label=LABELS
    )
    return randomised(getattr(hf, f"{name}ForImageClassification")(config))


def wrapped(architecture: str, settings: dict[str, Any]) -> Any:
    """Make one of timm's models, of an architecture and its own settings."""
    config = hf.TimmWrapperConfig(architecture=architecture, model_args=settings, id2label=LABELS)
    model = randomised(hf.TimmWrapperForImageClassification(config))
    make_plain_(model)
    return model


def timm(architecture: str, **settings: Any) -> partial[Any]:
    return partial(wrapped, architecture, settings)


def family(name: str, **settings: Any) -> partial[Any]:
    return partial(made, name, settings)


FAMILIES: dict[str, Callable[[], Any]] = {
    "vit": family("ViT", **PLAIN),
    "deit": family("DeiT", **PLAIN),
    "swin": family("Swin", **WINDOWED, num_heads=[4, 8]),
    "swinv2": family("Swinv2", **WINDOWED, num_heads=[4, 8]),
    "resnet_basic": family("ResNet", **STAGED, embedding_size=32, layer_type="basic"),
    "resnet_bottleneck": family("ResNet", **(STAGED | {"hidden_sizes": [256, 512]}), embedding_size=32),
    "convnext": family("ConvNext", **STAGED, num_stages=2),
    "convnextv2": family("ConvNextV2", **STAGED, num_stages=2),
    "beit": family("Beit", **PLAIN, use_relative_position_bias=True, layer_scale_init_value=0.3),
    "dinov2": family("Dinov2", **PLAIN, mlp_ratio=4),
    "dinov2_swiglu": family("Dinov2", **PLAIN, mlp_ratio=4, use_swiglu_ffn=True),
    # Larger than the images that it gets, as those that people have: positions are interpolated.
    "dinov2_registers": family(
        "Dinov2WithRegisters", **(PLAIN | {"image_size": 96}), mlp_ratio=4, num_register_tokens=2
    ),
    "mobilevit": family(
        "MobileViT",
        image_size=64,
        hidden_sizes=[32, 48, 64],
        neck_hidden_sizes=[16, 16, 24, 32, 32, 48, 64],
        num_attention_heads=4,
        id2label=LABELS,
    ),
    "regnet_x": family("RegNet", **(STAGED | {"depths": [2, 1]}), embedding_size=32, groups_width=16, layer_type="x"),
    "regnet_y": family("RegNet", **(STAGED | {"depths": [2, 1]}), embedding_size=32, groups_width=16, layer_type="y"),
    "efficientnet": family("EfficientNet", **EFFICIENT),
    "mobilenet_v1": family("MobileNetV1", depth_multiplier=0.25, min_depth=32, id2label=LABELS),
    "mobilenet_v2": family("MobileNetV2", depth_multiplier=0.35, min_depth=16, id2label=LABELS),
    "clip": partial(contrasted, "CLIP", {"projection_dim": 16}),
    "siglip": partial(contrasted, "Siglip", {}),
    "pvt": family("Pvt", **PYRAMID, image_size=32, sequence_reduction_ratios=[2, 1]),
    "segformer": family("Segformer", **PYRAMID, sr_ratios=[2, 1]),
    "poolformer": family(
        "PoolFormer", **{k: v for k, v in PYRAMID.items() if k != "num_attention_heads"}, padding=[2, 1]
    ),
    "swiftformer": family(
        "SwiftFormer", image_size=32, depths=[1, 2], embed_dims=[32, 64], downsamples=[True, True], id2label=LABELS
    ),
    "data2vec": family("Data2VecVision", **PLAIN, use_relative_position_bias=True, layer_scale_init_value=0.3),
    "vit_msn": family("ViTMSN", **PLAIN),
    "mobilevitv2": family(
        "MobileViTV2",
        image_size=64,
        width_multiplier=0.25,
        n_attn_blocks=[1, 1, 1],
        base_attn_unit_dims=[128, 128, 256],
        id2label=LABELS,
    ),
    "levit": family("Levit", **LEVIT),
    "focalnet": family(
        "FocalNet",
        image_size=32,
        patch_size=4,
        embed_dim=32,
        depths=[1, 1],
        focal_levels=[2, 2],
        focal_windows=[3, 3],
        id2label=LABELS,
    ),
}
FAMILIES["deit_teacher"] = lambda: randomised(hf.DeiTForImageClassificationWithTeacher(hf.DeiTConfig(**PLAIN)))
FAMILIES["levit_teacher"] = lambda: randomised(
    hf.LevitForImageClassificationWithTeacher(hf.LevitConfig(**LEVIT)), LEVIT["image_size"]
)


TOKENS = {"img_size": 32, "patch_size": 8, "embed_dim": 64, "depth": 2, "num_heads": 4}
FOUR_STAGES = {"layers": [1] * 4, "channels": [64, 64, 128, 128]}
# What only `make test-timm` has.
TIMM_FAMILIES: dict[str, Callable[[], Any]] = {
    "timm_vit": timm("vit_tiny_patch16_224", **TOKENS),
    "timm_deit3": timm("deit3_small_patch16_224", **TOKENS),
    "timm_deit_distilled": timm("deit_tiny_distilled_patch16_224", **TOKENS),
    "timm_vit_swiglu": timm("vit_giant_patch14_dinov2", **TOKENS, mlp_ratio=4),
    "timm_eva02": timm("eva02_tiny_patch14_224", **TOKENS),
    "timm_swin": timm("swin_tiny_patch4_window7_224", **SHIFTED),
    "timm_resnet": timm("resnet26", **FOUR_STAGES),
    "timm_seresnet": timm("seresnet50", **FOUR_STAGES),
    "timm_resnetv2": timm("resnetv2_50", layers=[1, 1], channels=[128, 256]),
    "timm_densenet": timm("densenet121", growth_rate=16, block_config=[2, 2]),
    "timm_efficientnet": timm("test_efficientnet"),
    "timm_mobilenetv3": timm("mobilenetv3_small_050"),
    "timm_mobilenetv4": timm("mobilenetv4_conv_small_050"),
    "timm_regnety": timm("regnety_002", depth=4, w0=32, wa=64, wm=1.5, group_size=16),
    "timm_convnext": timm("convnext_atto", depths=[1] * 4, dims=[32, 64, 64, 64]),
    "timm_convnextv2": timm("convnextv2_atto", depths=[1] * 4, dims=[32, 64, 64, 64]),
    "timm_hiera": timm("hiera_tiny_224", img_size=[32, 32], embed_dim=32, stages=[1, 1, 1, 1], num_heads=1),
    "timm_fastvit": timm("fastvit_t8", layers=[1] * 4, embed_dims=[32, 32, 64, 64]),
}
FAMILIES.update(TIMM_FAMILIES)


def spec_of(model: Any) -> InputSpec:
    """Return an input shape for a tiny model; convolutional ones say the size that their weights were trained for, which is slow."""
    stated = getattr(model.config, "image_size", 32)
    size = stated if isinstance(stated, int) and stated <= 64 else 32
    return InputSpec(channels=3, height=size, width=size, source="families")


def processor_of(spec: InputSpec) -> Any:
    size = {"height": spec.height, "width": spec.width}
    return hf.ViTImageProcessorPil(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)


def marked(names: Iterable[str], *, slow: Collection[str] = ()) -> list[Any]:
    """Return the families as parameters of a test: timm's are skipped where it isn't, and some are slow."""
    return [
        pytest.param(
            name,
            marks=[*(TIMM if name in TIMM_FAMILIES else ()), *([pytest.mark.slow] if name in slow else ())],
        )
        for name in names
    ]


# One of each kind of structure: plain and windowed attention, bottlenecks, groups with gates, and depthwise
# convolutions whose forward reads their attributes; of timm's those whose q, k and v are one layer.
TYPICAL = ("vit", "swin", "resnet_bottleneck", "regnet_y", "mobilenet_v1", "mobilenet_v2", "timm_vit", "timm_swin")
EVERY = marked(FAMILIES)
# For facts that take long on all: the others are slow tests.
TYPICAL_FIRST = marked(FAMILIES, slow=FAMILIES.keys() - set(TYPICAL))
