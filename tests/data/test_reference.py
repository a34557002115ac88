"""The embedded digits and the classifiers trained on them."""

from dataclasses import replace

import pyarrow.parquet as pq
import pytest
import torch
from sklearn.datasets import load_digits

from profiling_agent.data.images import SplitImages, decode_rgb
from profiling_agent.data.models import load_model
from profiling_agent.data.reference import RECIPES, reference_dataset, reference_model, train
from profiling_agent.lib.logs import silent

DIGITS = [str(digit) for digit in range(10)]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("PROFILING_AGENT_CACHE", str(tmp_path / "cache"))


def noise(num_images, size=16):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(num_images, 3, size, size, generator=generator), torch.arange(num_images) % 10


def num_right(model, images, labels):
    with torch.inference_mode():
        return int((model(pixel_values=images).logits.argmax(1) == labels).sum())


def test_the_digits_are_scikit_learns_and_written_once(draw):
    split = SplitImages(draw("reference:digits", DIGITS).search.path)
    digits = load_digits()
    assert not isinstance(digits, tuple)
    darkest = {tuple(image.astype(int).ravel()) for image in digits.images}
    for row in range(20):
        image = split.image(row)
        assert image.size == (8, 8)
        assert tuple(round(pixel * 16 / 255) for pixel in image.convert("L").tobytes()) in darkest
    assert len(list(reference_dataset().rglob("*.parquet"))) == 2


def test_training_is_seeded_and_leaves_the_global_seed_alone():
    recipe = replace(RECIPES["swin"], num_steps=3)
    images, labels = noise(40)
    threads = torch.get_num_threads()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = train(recipe, images, labels, silent)
    assert torch.equal(torch.rand(1), expected)
    again = train(recipe, images, labels, silent)
    assert not first.training
    assert torch.get_num_threads() == threads
    assert all(torch.equal(here, there) for here, there in zip(first.parameters(), again.parameters(), strict=True))


@pytest.mark.parametrize(
    "family",
    [pytest.param(name, marks=pytest.mark.slow if name == "resnet" else pytest.mark.matrix) for name in RECIPES],
)
def test_each_reference_reaches_95_percent_and_loads_like_any_model(family):
    folder = reference_model(f"reference:{family}")
    loaded = load_model(f"reference:{family}")
    rows = pq.read_table(reference_dataset() / "data" / "test-00000-of-00001.parquet").to_pydict()
    pixels = loaded.processor(images=[decode_rgb(cell["bytes"]) for cell in rows["image"]], return_tensors="pt")
    assert num_right(loaded.model, pixels["pixel_values"], torch.tensor(rows["label"])) >= 950
    assert sorted(path.name for path in folder.iterdir()) == [
        "config.json", "model.safetensors", "preprocessor_config.json",
    ]  # fmt: skip
