"""The four reference classifiers: what they look like and how they are trained."""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import Any

from torch import nn
from transformers import (
    DeiTConfig,
    DeiTForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

# Part of the cache's key: raise it when training.py changes, so that everyone trains anew.
TRAINING_VERSION = 2
CLASSES = tuple(str(digit) for digit in range(10))
ARCHITECTURES: dict[str, tuple[Any, Any]] = {
    "vit": (ViTConfig, ViTForImageClassification),
    "deit": (DeiTConfig, DeiTForImageClassification),
    "swin": (SwinConfig, SwinForImageClassification),
    "resnet": (ResNetConfig, ResNetForImageClassification),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRecipe:
    """One classifier's configuration and its training, all that the weights depend on besides the images.

    `image_size` is in pixels; shifts and scales are fractions of the image, rotations in degrees.
    """

    family: str
    config: dict[str, Any] = field(default_factory=dict)
    image_size: int
    num_steps: int
    batch_size: int = 32
    learning_rate: float
    weight_decay: float = 0.05
    label_smoothing: float = 0.1
    warmup: float = 0.1
    shift: float = 0.08
    scale: float = 0.08
    rotation: float = 10.0
    seed: int = 0

    @property
    def key(self) -> str:
        """Return a short hash that changes with the recipe."""
        text = json.dumps({**asdict(self), "version": TRAINING_VERSION}, sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def build(self) -> Any:
        """Return the untrained classifier."""
        config_type, model_type = ARCHITECTURES[self.family]
        names = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: i for i, name in enumerate(CLASSES)}}
        model = model_type(config_type(num_channels=3, **self.config, **names))
        for name, parameter in model.named_parameters():
            # DeiT's start at zero, and it takes half of so short a training until patches differ by their place.
            if name.endswith(("position_embeddings", "_token")) and not parameter.any():
                nn.init.trunc_normal_(parameter, std=model.config.initializer_range)
        return model


# The libraries' default of 0.02 suits widths near 768; at these widths it costs hundreds of steps to grow out of.
TRANSFORMER = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512,
               "image_size": 16, "patch_size": 4, "initializer_range": 0.08}  # fmt: skip
RECIPES = {
    "vit": TrainingRecipe(family="vit", config=TRANSFORMER, image_size=16, num_steps=400, learning_rate=1e-3),
    "deit": TrainingRecipe(family="deit", config=TRANSFORMER, image_size=16, num_steps=400, learning_rate=1e-3),
    "swin": TrainingRecipe(
        family="swin",
        config={"image_size": 16, "patch_size": 2, "embed_dim": 48, "depths": [2, 4], "num_heads": [3, 6],
                "window_size": 4, "drop_path_rate": 0.0, "initializer_range": 0.08},
        image_size=16,
        num_steps=500,
        learning_rate=2e-3,
        shift=0.06,
        rotation=8.0,
    ),
    "resnet": TrainingRecipe(
        family="resnet",
        config={"embedding_size": 32, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2],
                "layer_type": "bottleneck"},
        image_size=32,
        num_steps=400,
        learning_rate=2e-3,
    ),
}  # fmt: skip
