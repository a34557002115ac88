"""Which of several matches between labels and classes is taken, by what a real model answers."""

import itertools
import shutil
from pathlib import Path

import in_process
import numpy as np
import pytest
import torch
import zoo
from PIL import Image

from profiling_agent.data.images import SplitImages
from profiling_agent.errors import AcquisitionError
from profiling_agent.jobs.tasks import AcquireTask
from profiling_agent.schemas import Acquired

NUM_CLASSES = 12
FOLDERS = sorted(str(number) for number in range(NUM_CLASSES))
CORNERS = np.array([[x, y, z] for x in (40, 200) for y in (40, 120, 200) for z in (40, 200)])


def picture(number: int, random: np.random.Generator) -> Image.Image:
    noise = random.normal(0, 15, (32, 32, 3))
    return Image.fromarray((CORNERS[number] + noise).clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write class folders called 0 to 11, each of one colour."""
    root, random = tmp_path_factory.mktemp("numbers"), np.random.default_rng(0)
    for split, num_images in (("train", 5), ("test", 12)):
        for number in range(NUM_CLASSES):
            folder = root / split / str(number)
            folder.mkdir(parents=True)
            for index in range(num_images):
                picture(number, random).save(folder / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def trained() -> zoo.ViTForImageClassification:
    """Train a model without names whose class is the number of the folder."""
    random, model = np.random.default_rng(1), zoo.vit(id2label=None, num_labels=NUM_CLASSES)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(60):
        numbers = random.integers(0, NUM_CLASSES, 48)
        pixels = zoo.processor()([picture(number, random) for number in numbers], return_tensors="pt")["pixel_values"]
        loss = torch.nn.functional.cross_entropy(model(pixel_values=pixels).logits, torch.tensor(numbers))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def acquire(model: Path, data: Path, root: Path, name: str = "acquire", **options) -> Acquired:
    return in_process.run(AcquireTask(model=str(model), dataset=str(data), device="cpu", **options), root, name)


@pytest.mark.parametrize("order", ["number", "place"])
def test_folders_with_numbers_are_the_classes_that_the_model_was_trained_with(data, trained, tmp_path, order):
    """Trained by folder order, as torchvision and `datasets` read folders, class 2 is folder 10."""
    model = tmp_path / "model"
    zoo.save(trained, model)
    turned = zoo.ViTForImageClassification.from_pretrained(model).eval()
    if order == "place":
        with torch.no_grad():
            for tensor in zoo.inside(turned).classifier.parameters():
                tensor.copy_(tensor[[int(name) for name in FOLDERS]].clone())
        zoo.save(turned, model)

    acquired = acquire(model, data, tmp_path / "run")

    expected = [int(name) for name in FOLDERS] if order == "number" else list(range(NUM_CLASSES))
    assert [match.dataset_label for match in acquired.labels] == FOLDERS
    assert [match.model_id for match in acquired.labels] == expected
    assert {match.rule for match in acquired.labels} == {order}
    assert f"calibration images decide: by {order} (" in acquired.notes[0]
    for split in (acquired.calibration, acquired.search, acquired.heldout):
        images = SplitImages(tmp_path / "run" / split.file.path)
        pixels = zoo.processor()([images.image(row) for row in range(len(images))], return_tensors="pt")
        with torch.inference_mode():
            predicted = zoo.inside(turned)(**pixels).logits.argmax(-1).numpy()
        assert np.mean(predicted == images.labels) > 0.9


def test_where_the_answers_do_not_decide_the_user_does(data, tmp_path):
    model = zoo.save(zoo.vit(id2label=None, num_labels=NUM_CLASSES), tmp_path / "model")
    with pytest.raises(
        AcquisitionError, match=r"don't decide: .*; set label_match to (number or place|place or number)$"
    ):
        acquire(model, data, tmp_path / "run")
    for order in ("number", "place"):
        acquired = acquire(model, data, tmp_path / "run", order, label_match=order)
        assert {match.rule for match in acquired.labels} == {order}


def test_images_of_one_class_are_refused(data, tmp_path):
    model = zoo.save(zoo.vit(), tmp_path / "model")
    # `datasets` takes folders for labels if there are two.
    for split, (number, name) in itertools.product(("train", "test"), (("3", "class 3"), ("4", "other"))):
        shutil.copytree(data / split / number, tmp_path / "data" / split / name)
    with pytest.raises(AcquisitionError, match=r"are of one class \('class 3'\)"):
        acquire(model, tmp_path / "data", tmp_path / "run")
