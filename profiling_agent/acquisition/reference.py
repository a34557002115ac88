"""The embedded default: real handwritten digits, and four small classifiers trained on them on first use."""

import io
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import torch
from PIL import Image
from transformers import ViTImageProcessorPil

from profiling_agent.acquisition.images import decode_rgb
from profiling_agent.acquisition.training import CLASSES, RECIPES, TrainingRecipe, accuracy, train
from profiling_agent.cache import cached
from profiling_agent.errors import AcquisitionError
from profiling_agent.progress import Progress, silent
from profiling_agent.quiet import quiet

PREFIX = "reference:"
DIGITS = "reference:digits"
# Of 1797 images, 1000 are kept for testing: half to search on, half for the verdict.
NUM_TRAIN = 797
DIGITS_VERSION = 1
MIN_TOP1 = 0.95
BRIGHTEST = 16


def _png(digit: Any) -> bytes:
    stream = io.BytesIO()
    Image.fromarray(np.rint(digit * (255 / BRIGHTEST)).astype(np.uint8)).save(stream, "PNG")
    return stream.getvalue()


def _write_digits(folder: Path) -> None:
    # It takes seconds to import, and is asked once on a machine.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    bundled: Any = load_digits()
    rows = train_test_split(
        np.arange(len(bundled.target)), train_size=NUM_TRAIN, stratify=bundled.target, random_state=0
    )
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    (folder / "data").mkdir()
    for split, members in zip(("train", "test"), rows, strict=True):
        columns = {
            "image": [{"bytes": _png(bundled.images[row]), "path": None} for row in members],
            "label": [int(bundled.target[row]) for row in members],
        }
        with quiet():
            made = datasets.Dataset.from_dict(columns, features=features)
            made.to_parquet(folder / "data" / f"{split}-00000-of-00001.parquet")


def reference_dataset(progress: Progress = silent) -> Path:
    """Return scikit-learn's 1797 handwritten digits, 8x8 gray, as a local parquet data set: 797 train, 1000 test."""
    progress("preparing reference:digits", 0, 0)
    return cached(f"digits-{DIGITS_VERSION}", _write_digits)


def _pixels(split: str, processor: Any, progress: Progress) -> tuple[torch.Tensor, torch.Tensor]:
    """Return one split as the model takes it: float32 (n, 3, h, w) and int64 (n,)."""
    rows = pq.read_table(reference_dataset(progress) / "data" / f"{split}-00000-of-00001.parquet")
    images = [decode_rgb(cell["bytes"]) for cell in rows["image"].to_pylist()]
    return processor(images=images, return_tensors="pt")["pixel_values"], torch.tensor(rows["label"].to_pylist())


def _train_into(folder: Path, recipe: TrainingRecipe, progress: Progress) -> None:
    side = {"height": recipe.image_size, "width": recipe.image_size}
    processor = ViTImageProcessorPil(size=side, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    model: Any = train(recipe, *_pixels("train", processor, progress), progress)
    top1 = accuracy(model, *_pixels("test", processor, progress))
    if top1 < MIN_TOP1:
        raise AcquisitionError(
            f"reference:{recipe.family} was trained to {top1:.3f} top-1, below {MIN_TOP1}: this installation "
            "computes unlike the tested one; install the versions of constraints.txt"
        )
    with quiet():
        model.save_pretrained(folder)
        processor.save_pretrained(folder)


def reference_model(name: str, progress: Progress = silent) -> Path:
    """Return the local Hugging Face folder of reference:vit, deit, swin or resnet, trained now if it never was.

    Raises:
        AcquisitionError: there is no such reference, or it did not learn.
    """
    recipe = RECIPES.get(name.removeprefix(PREFIX))
    if recipe is None:
        known = ", ".join(f"{PREFIX}{family}" for family in RECIPES)
        raise AcquisitionError(f"there is no reference model {name!r}: use one of {known}")
    return cached(f"{recipe.family}-{recipe.key}", lambda folder: _train_into(folder, recipe, progress))
