"""A world small enough to run the whole product in: five colours, and a zoo ViT that can tell them apart."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import zoo
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Pillow

COLOURS = np.array([[200, 40, 40], [40, 200, 40], [40, 40, 200], [200, 200, 40], [40, 200, 200]])
NUM_TRAIN, NUM_TEST = 300, 400


def pictures(num_images: int, seed: int) -> tuple[list[Pillow.Image], list[int]]:
    random = np.random.default_rng(seed)
    labels = [index % len(COLOURS) for index in range(num_images)]
    noise = random.normal(0, 40, size=(num_images, 32, 32, 3))
    pixels = (COLOURS[labels][:, None, None, :] + noise).clip(0, 255).astype(np.uint8)
    return [Pillow.fromarray(image) for image in pixels], labels


def write_data(folder: Path, num_test: int = NUM_TEST, names: Iterable[str] = zoo.LABELS.values()) -> Path:
    features = Features({"image": Image(), "label": ClassLabel(names=list(names))})
    folder.mkdir(parents=True)
    for name, num_images, seed in (("train", NUM_TRAIN, 1), ("test", num_test, 2)):
        images, labels = pictures(num_images, seed)
        rows = Dataset.from_dict({"image": images, "label": labels}, features=features)
        rows.to_parquet(str(folder / f"{name}.parquet"))
    return folder


def write_model(folder: Path) -> Path:
    """Train for a second or two; every picture of the test split should then be right."""
    torch.manual_seed(0)
    # Wide enough that int8 is faster beyond any noise: what a race decides must not depend on the day.
    return zoo.save(fitted(zoo.vit(hidden_size=128, intermediate_size=1024)), folder)


def fitted(model: Any) -> Any:
    """Train a classifier of five classes on the pictures of the train split, as the zoo's processor prepares them."""
    model.train()
    images, labels = pictures(NUM_TRAIN, 1)
    pixels = zoo.processor()(images, return_tensors="pt")["pixel_values"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(5):
        for start in range(0, NUM_TRAIN, 50):
            part = slice(start, start + 50)
            loss = torch.nn.functional.cross_entropy(
                model(pixel_values=pixels[part]).logits, torch.tensor(labels[part])
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    return model.eval()
