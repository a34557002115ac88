"""Full-size models whose predictions mean something: a random body, and a classifier fitted in closed form to its features.

    python benchmarks/fitted.py [--models NAME ...] [--images N] [--folder DIR]

No weights can be had here. Features of a random network still tell CIFAR-10's classes apart a little, and a ridge regression of the classes on them
gives a model of real cost with answers of its own, which pruning and quantization may change. Made once, and kept in a folder.
"""

import argparse
import contextlib
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checks import SHARED
from datasets import load_dataset
from full_size import MODELS, build
from torch import Tensor, nn
from transformers import ViTImageProcessor

from profiling_agent.lib.inference import quick_products

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
    processor = ViTImageProcessor(size={"height": side, "width": side})
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


def main() -> int:
    """Make them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--images", type=int, default=NUM_IMAGES)
    parser.add_argument("--folder", type=Path, default=FOLDER)
    asked = parser.parse_args()
    for name in asked.models:
        started = time.monotonic()
        print(f"{fitted(name, asked.folder, asked.images)} ({time.monotonic() - started:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
