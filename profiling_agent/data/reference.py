"""Reference data set and models: handwritten digits, and four small classifiers trained on first use in half a minute."""

import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pyarrow.parquet as pq
import torch
import torch.nn.functional as F
import transformers
from PIL import Image
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from transformers import ViTImageProcessorPil

from profiling_agent.data.images import decode_rgb
from profiling_agent.errors import AcquisitionError
from profiling_agent.lib.io import cached
from profiling_agent.lib.logs import Progress, silent

PREFIX = "reference:"
DIGITS = "reference:digits"
# Of 1797 images, the other 1000 are for testing: half to search on, half for the verdict.
NUM_TRAIN = 797
BRIGHTEST = 16
SPLIT_FILE = "data/{}-00000-of-00001.parquet"
CLASSES = tuple(str(digit) for digit in range(10))
# Parts of the cache's keys: raise one when what it caches changes.
DIGITS_VERSION, TRAINING_VERSION = 1, 3


@dataclass(frozen=True, slots=True)
class TrainingRecipe:
    """One classifier and its training: `image_size` in pixels, `shift` as a fraction, `rotation` in degrees."""

    architecture: Any
    config: dict[str, Any]
    image_size: int
    num_steps: int
    learning_rate: float
    shift: float = 0.08
    rotation: float = 10.0


# The libraries' default initializer_range of 0.02 suits widths near 768; at these widths it costs hundreds of steps.
TRANSFORMER = {"hidden_size": 128, "num_hidden_layers": 6, "num_attention_heads": 4, "intermediate_size": 512,
               "image_size": 16, "patch_size": 4, "initializer_range": 0.08}  # fmt: skip
SWIN = {"image_size": 16, "patch_size": 2, "embed_dim": 48, "depths": [2, 4], "num_heads": [3, 6],
        "window_size": 4, "drop_path_rate": 0.0, "initializer_range": 0.08}  # fmt: skip
RESNET = {"embedding_size": 32, "hidden_sizes": [64, 128, 256, 512], "depths": [2, 2, 2, 2], "layer_type": "bottleneck"}
RECIPES = {
    "vit": TrainingRecipe(transformers.ViTForImageClassification, TRANSFORMER, 16, 400, 1e-3),
    "deit": TrainingRecipe(transformers.DeiTForImageClassification, TRANSFORMER, 16, 400, 1e-3),
    "swin": TrainingRecipe(transformers.SwinForImageClassification, SWIN, 16, 500, 2e-3, shift=0.06, rotation=8.0),
    "resnet": TrainingRecipe(transformers.ResNetForImageClassification, RESNET, 32, 400, 2e-3),
}

BATCH_SIZE, SCALE = 32, 0.08
# An average over about fifty steps, the last ones of a run of several hundred.
EMA_DECAY = 0.98


def augment(images: Tensor, recipe: TrainingRecipe, generator: torch.Generator) -> Tensor:
    """Shift, scale and rotate each image (b, c, h, w) at random; its border is repeated outwards."""

    def uniform(width: float) -> Tensor:
        return (torch.rand(len(images), generator=generator) * 2 - 1) * width

    angle, size = uniform(math.radians(recipe.rotation)), 1 + uniform(SCALE)
    # The grid spans [-1, 1], so a fraction of the image is twice as large there.
    across, down = uniform(2 * recipe.shift), uniform(2 * recipe.shift)
    cosine, sine = size * angle.cos(), size * angle.sin()
    matrices = torch.stack([torch.stack([cosine, -sine, across], 1), torch.stack([sine, cosine, down], 1)], 1)
    grid = F.affine_grid(matrices, list(images.shape), align_corners=False)
    return F.grid_sample(images, grid, align_corners=False, padding_mode="border")


def train(recipe: TrainingRecipe, images: Tensor, labels: Tensor, progress: Progress) -> nn.Module:
    """Train the classifier and return it in eval mode, with the running average of its weights.

    `images` are pixel values, float32 (n, 3, h, w), `labels` class ids, int64 (n,); `progress` is called after every step.
    """
    generator, num_threads = torch.Generator().manual_seed(0), torch.get_num_threads()
    # Makes sums independent of the number of cores; at these sizes a second thread gains little.
    torch.set_num_threads(1)
    try:
        with torch.random.fork_rng(devices=[]), torch.enable_grad():
            torch.manual_seed(0)
            names = {"id2label": dict(enumerate(CLASSES)), "label2id": {name: i for i, name in enumerate(CLASSES)}}
            config = recipe.architecture.config_class(num_channels=3, **recipe.config, **names)
            model = recipe.architecture(config).train()
            for name, parameter in model.named_parameters():
                # DeiT's start at zero, and would take half of this short training until patches differ by their position.
                if name.endswith(("position_embeddings", "_token")) and not parameter.any():
                    nn.init.trunc_normal_(parameter, std=config.initializer_range)
            # Biases and norms don't decay.
            groups = [
                {
                    "params": [each for each in model.parameters() if (each.dim() > 1) == (decay > 0)],
                    "weight_decay": decay,
                }
                for decay in (0.05, 0.0)
            ]
            # The usual beta2 of 0.999 averages over more steps than these runs have.
            optimizer = torch.optim.AdamW(groups, lr=recipe.learning_rate, betas=(0.9, 0.95))
            schedule = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, recipe.learning_rate, recipe.num_steps, pct_start=0.1, cycle_momentum=False
            )
            average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(EMA_DECAY), use_buffers=True)
            queue = torch.empty(0, dtype=torch.int64)
            for step in range(recipe.num_steps):
                if len(queue) < BATCH_SIZE:
                    queue = torch.cat([queue, torch.randperm(len(images), generator=generator)])
                rows, queue = queue[:BATCH_SIZE], queue[BATCH_SIZE:]
                logits = model(pixel_values=augment(images[rows], recipe, generator)).logits
                loss = F.cross_entropy(logits, labels[rows], label_smoothing=0.1)
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
                optimizer.step()
                schedule.step()
                average.update_parameters(model)
                progress("training the reference model (once)", step + 1, recipe.num_steps)
            return average.module.eval()
    finally:
        torch.set_num_threads(num_threads)


def reference_dataset(progress: Progress = silent) -> Path:
    """Return scikit-learn's 1797 handwritten digits, 8x8 gray, as a local parquet data set: 797 train, 1000 test."""
    progress("preparing reference:digits", 0, 0)
    return cached(f"digits-{DIGITS_VERSION}", _write_digits)


def _write_digits(folder: Path) -> None:
    # Importing sklearn takes seconds, and is needed once on a machine.
    from sklearn.datasets import load_digits
    from sklearn.model_selection import train_test_split

    digits: Any = load_digits()
    shades = np.rint(digits.images * (255 / BRIGHTEST)).astype(np.uint8)
    rows = train_test_split(np.arange(len(digits.target)), train_size=NUM_TRAIN, stratify=digits.target, random_state=0)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=list(CLASSES))})
    (folder / "data").mkdir()
    for split, members in zip(("train", "test"), rows, strict=True):
        columns = {"image": [Image.fromarray(shades[row]) for row in members], "label": digits.target[members].tolist()}
        datasets.Dataset.from_dict(columns, features=features).to_parquet(folder / SPLIT_FILE.format(split))


def reference_model(name: str, progress: Progress = silent) -> Path:
    """Return the folder of a reference model, trained on first use; AcquisitionError if there is none of this name."""
    family = name.removeprefix(PREFIX)
    if family not in RECIPES:
        names = ", ".join(f"{PREFIX}{family}" for family in RECIPES)
        raise AcquisitionError(f"there is no reference model {name!r}: use one of {names}")
    build = partial(_train_and_save, recipe=RECIPES[family], progress=progress)
    return cached(f"{family}-{TRAINING_VERSION}", build)


def _train_and_save(folder: Path, recipe: TrainingRecipe, progress: Progress) -> None:
    size = {"height": recipe.image_size, "width": recipe.image_size}
    processor = ViTImageProcessorPil(size=size, image_mean=[0.5] * 3, image_std=[0.5] * 3)
    rows = pq.read_table(reference_dataset(progress) / SPLIT_FILE.format("train")).to_pydict()
    images = processor(images=[decode_rgb(cell["bytes"]) for cell in rows["image"]], return_tensors="pt")[
        "pixel_values"
    ]
    model: Any = train(recipe, images, torch.tensor(rows["label"]), progress)
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
