"""Models at full size with random weights: the paper's four, and those that people have; with a classifier fitted to images if answers count.

Pretrained weights aren't needed: features of a random network tell CIFAR-10's classes apart a little, and a ridge regression of the classes on them
gives a model of real cost with answers of its own, which pruning and quantization may change.
"""

import contextlib
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from checks import SHARED
from datasets import load_dataset
from torch import Tensor, nn

from profiling_agent.lib.costs import count_complexity
from profiling_agent.lib.inference import quick_products
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
POPULAR: Mapping[str, Popular] = {
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


def build_popular(name: str) -> nn.Module:
    """Return the model in eval mode, its batch norms as they are after seeing noise: untrained ones let signals die out in so deep a network.

    So do weights as small as some configurations draw them, EfficientNet's of norms among them: beside a norm's epsilon their variance is nothing.
    """
    torch.manual_seed(0)
    model = POPULAR[name].build().eval()
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


FOLDER = Path(__file__).resolve().parents[1] / "runs" / "fitted"
NUM_IMAGES, BATCH = 1000, 16
# Of the features' mean variance: there are about as many of them as images.
RIDGE, RIDGES = 1e-1, (1e-1, 1.0, 1e1, 1e2)
# Logits of a regression on ones and zeros are all but equal: they are stretched so that the answers are as sure as they are right.
SCALES = (1, 2, 4, 8, 16, 32)


class _FeaturesReachedError(Exception):
    pass


def fitted(
    name: str,
    folder: Path = FOLDER,
    num_images: int = NUM_IMAGES,
    *,
    make: Callable[[str], nn.Module] = build,
    side: int = 224,
    num_judged: int = 0,
    data: Path = SHARED / "data" / "cifar10",
    device: str = "cpu",
) -> Path:
    """Return the folder of a model of ten classes, by default a full-size one, made where it isn't there.

    Ridge and scale are those of the best likelihood on `num_judged` of the images, which the regression doesn't see; on none,
    the ridge is as it stands here, and the scale is too sure of itself.
    """
    final = folder / name.replace("/", "-").lower()
    if (final / "config.json").exists():
        return final
    rows = load_dataset("parquet", data_dir=str(data), split="train")
    # The product calibrates on images that are drawn anew, so that a few of these are among them.
    chosen = rows.select(np.random.default_rng(0).choice(len(rows), num_images, replace=False).tolist())
    image, label = rows.column_names[:2]
    processor = transformers.ViTImageProcessor(size={"height": side, "width": side})
    model: Any = make(name).to(device)
    last = [layer for layer in model.classifier.modules() if isinstance(layer, nn.Linear)][-1]
    features = torch.cat(
        [
            _features(
                model,
                last,
                processor(chosen[start : start + BATCH][image], return_tensors="pt")["pixel_values"].to(device),
            )
            for start in range(0, num_images, BATCH)
        ]
    )
    features, model = features.cpu(), model.cpu()
    labels = torch.tensor(chosen[label])
    names = rows.features[label].names
    _fit_(last, features, labels, len(names), num_judged)
    # PVT's config has a number of its own beside the names.
    model.config.num_labels = len(names)
    model.config.id2label = dict(enumerate(names))
    model.config.label2id = {each: number for number, each in enumerate(names)}
    with torch.no_grad():
        right = (last(features).argmax(1) == labels).float().mean()
    print(f"{name}: fitted to {num_images} images, of which {right:.1%} are answered right", flush=True)
    made = folder / f".{final.name}"
    shutil.rmtree(made, ignore_errors=True)
    model.save_pretrained(made)
    processor.save_pretrained(made)
    made.replace(final)
    return final


def _features(model: nn.Module, last: nn.Linear, pixel_values: Tensor) -> Tensor:
    """Return what the classifier's last layer reads of these images."""
    seen: list[Tensor] = []

    def catch(_module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        seen.append(inputs[0].flatten(1))
        raise _FeaturesReachedError

    with torch.inference_mode(), quick_products(), contextlib.suppress(_FeaturesReachedError):
        handle = last.register_forward_pre_hook(catch)
        try:
            model(pixel_values=pixel_values)
        finally:
            handle.remove()
    return seen[0].clone()


def _fit_(last: nn.Linear, features: Tensor, labels: Tensor, num_classes: int, num_judged: int) -> None:
    """Set the layer to the ridge regression of the classes on the features, in float64, stretched by the scale of the best likelihood."""
    x, y = features.double(), nn.functional.one_hot(labels, num_classes).double()
    seen = slice(num_judged, None)
    judged = slice(num_judged) if num_judged else seen
    fits: dict[tuple[float, int], tuple[float, Tensor, Tensor]] = {}
    for ridge in RIDGES if num_judged else (RIDGE,):
        weight, bias = _regression(x[seen], y[seen], ridge)
        logits = x[judged] @ weight.T + bias
        for scale in SCALES:
            loss = float(nn.functional.cross_entropy(scale * logits, labels[judged]))
            fits[ridge, scale] = (loss, scale * weight, scale * bias)
    _, weight, bias = fits[min(fits, key=lambda each: fits[each][0])]
    last.out_features = num_classes
    last.weight = nn.Parameter(weight.float())
    last.bias = nn.Parameter(bias.float())


def _regression(x: Tensor, y: Tensor, ridge: float) -> tuple[Tensor, Tensor]:
    """Return weight and bias of the regression of y on x, damped by a share of the mean variance."""
    mean, share = x.mean(0), y.mean(0)
    centred = x - mean
    gram = centred.T @ centred / len(x)
    gram.diagonal().add_(ridge * gram.diagonal().mean())
    weight = torch.linalg.solve(gram, centred.T @ (y - share) / len(x)).T
    return weight, share - weight @ mean
