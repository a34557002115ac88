"""An opened model: images in, labels out; shared by threads, loaded by several at once; damage is one line."""

import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import deployments
import numpy as np
import pytest
import torch
import zoo
from deployments import resign
from full_disk import at_most
from photographs import PHOTOGRAPHS, lying_on_its_side, of_a_telephone
from PIL import Image
from torch import nn
from transformers import PreTrainedModel

from profiling_agent import load
from profiling_agent.data.images import decode_rgb
from profiling_agent.errors import ArtifactError, CorruptImageError, RequestError, StorageError
from profiling_agent.exporting.export import export
from profiling_agent.lib.io import FileRefusedError
from profiling_agent.runtimes.artifact import CardRow, write_card
from profiling_agent.runtimes.registry import noise_batch
from profiling_agent.runtimes.torch_artifact import load_module, save_deployed, save_model

IMAGES = noise_batch(zoo.SPEC, 3, seed=2)
NAMES = ("eager float32", "eager dynamic", "onnxruntime float32", "openvino float32")
SIMPLE = NAMES[2]
NUM_THREADS = 4
Saved = Callable[..., Path]


@pytest.fixture
def copy(saved: Saved, tmp_path: Path) -> Path:
    return shutil.copytree(saved(SIMPLE), tmp_path / "copy")


def picture(seed: int) -> Image.Image:
    return Image.fromarray(np.random.default_rng(seed).integers(0, 256, (48, 40, 3), dtype=np.uint8))


def prepared(*images: Image.Image) -> np.ndarray:
    return zoo.processor()(images=[*images], return_tensors="np")["pixel_values"]


@pytest.mark.parametrize("name", NAMES)
def test_every_runtime_is_called_alike_and_pictures_become_labels_with_their_probability(saved: Saved, name: str):
    model, pictures = load(saved(name)), [picture(0), picture(1)]
    pixel_values = prepared(*pictures)

    assert model.runtime == name.split()[0]
    assert torch.equal(model(pixel_values=torch.from_numpy(pixel_values)).logits, model(pixel_values).logits)
    both = model.predict(pictures)

    expected = model(pixel_values).logits.softmax(-1)
    assert [found.class_id for found in both] == expected.argmax(-1).tolist()
    assert [found.probability for found in both] == pytest.approx(expected.amax(-1).tolist())
    assert [found.label for found in both] == [f"class {found.class_id}" for found in both]
    assert model.predict([picture(1).convert("L")])[0].label.startswith("class ")


@pytest.fixture
def several(tmp_path: Path) -> Path:
    """Return the folder of a multi-label model for ONNX Runtime."""
    model = zoo.vit(num_hidden_layers=1, problem_type="multi_label_classification")
    save_model(model, tmp_path / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    source = deployments.saved_source(tmp_path)
    save_deployed(source, deployments.deployment(SIMPLE), tmp_path / "several", num_threads=1)
    return tmp_path / "several"


def test_each_class_of_a_multi_label_model_has_a_probability_of_its_own(several: Path):
    model, pictures = load(several), [picture(0), picture(1)]

    probabilities = model.probabilities(pictures)

    logits = model(prepared(*pictures)).logits
    assert torch.equal(probabilities, logits.sigmoid())
    assert (probabilities.sum(1) - 1).abs().min() > 0.1
    assert [each.probability for each in model.predict(pictures)] == pytest.approx(logits.sigmoid().amax(1).tolist())
    assert [each.class_id for each in model.predict(pictures)] == logits.argmax(1).tolist()


def test_the_card_of_a_multi_label_model_prints_all_likely_labels(several: Path):
    picture(3).save(several / "image.png")
    card = (several / "README.md").read_text()
    assert "the sigmoid of its logit" in card
    code = card.split("## Run it without\n")[1].split("```python\n")[1].split("```")[0]

    ended = subprocess.run([sys.executable, "-c", code], cwd=several, capture_output=True, text=True, check=False)

    (probabilities,) = load(several).probabilities([picture(3)]).tolist()
    assert ended.stdout.strip() == str([f"class {index}" for index, each in enumerate(probabilities) if each >= 0.5])


@pytest.mark.parametrize("taken", PHOTOGRAPHS)
def test_a_photograph_is_predicted_from_the_pixel_values_that_accuracy_is_measured_on(
    saved: Saved, tmp_path: Path, taken
):
    model, path = load(saved(SIMPLE)), taken(tmp_path)

    (found,) = model.predict([Image.open(path)])

    measured, stored = (
        float(model(prepared(image)).logits.softmax(-1)[0, found.class_id])
        for image in (decode_rgb(path.read_bytes()), Image.open(path).convert("RGB"))
    )
    assert found.probability == pytest.approx(measured, rel=1e-6)
    # The model tells an image from one that lies on its side, or is all white.
    assert abs(stored - measured) > 1e-3 * measured


def test_a_model_of_gray_images_is_given_gray_ones(tmp_path: Path):
    spec = zoo.SPEC.model_copy(update={"channels": 1})
    processor = zoo.processor().__class__(size={"height": 32, "width": 32}, image_mean=[0.5], image_std=[0.5])
    gray = zoo.vit(num_channels=1, num_hidden_layers=1)
    save_model(gray, tmp_path / "model", spec=spec, processor=processor, base_model="zoo")
    model, pictures = load(tmp_path / "model"), [picture(0), picture(1).convert("L")]

    found = model.predict(pictures)

    pixel_values = processor(images=[each.convert("L") for each in pictures], return_tensors="np")["pixel_values"]
    likelihoods = model(pixel_values).logits.softmax(-1)
    assert [each.probability for each in found] == pytest.approx(likelihoods.amax(-1).tolist())


def test_what_is_wrong_with_images_or_threads_is_one_line(saved: Saved, tmp_path: Path):
    model, path = load(saved(SIMPLE)), of_a_telephone(tmp_path)
    path.write_bytes(path.read_bytes()[:-600])

    with Image.open(path) as opened, pytest.raises(CorruptImageError, match="an image can't be read: OSError"):
        model.predict([opened])
    for wrong in (IMAGES[0], IMAGES[:, :, :16], IMAGES[:0]):
        with pytest.raises(ArtifactError, match=r"takes pixel_values of shape \(n, 3, 32, 32\)"):
            model(wrong)
    with pytest.raises(RequestError, match="num_threads is 0: give 1 or more"):
        load(saved(SIMPLE), num_threads=0)


def test_the_card_may_be_rewritten(copy: Path):
    write_card(copy, [CardRow(name="accuracy | here", before="88%", after="87%")], ["on <one> machine"])

    assert "| accuracy \\| here | 88% | 87% |" in (copy / "README.md").read_text()
    load(copy)


def test_an_export_does_not_follow_a_run_out_of_its_folder(saved: Saved, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "request.json").write_text("{}")
    (run / "best").symlink_to(saved(SIMPLE))

    with pytest.raises(FileRefusedError, match="leads out of"):
        export(run, "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_artifact_of_another_cpu_loads_with_a_warning(copy: Path):
    resign(copy, cpu="Z80")

    with pytest.warns(UserWarning, match=r"made on Z80.*profiling-agent benchmark"):
        model = load(copy)

    assert model(IMAGES).logits.shape == (3, 5)


def test_a_disk_that_fills_leaves_nothing_and_is_one_line(tmp_path: Path):
    with at_most(100_000), pytest.raises(StorageError, match=r"^there is no space for [^\n]+$"):
        save_model(zoo.vit(), tmp_path / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")

    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if not name.startswith("eager")])
def test_the_cards_way_to_run_it_without_us_works(saved: Saved, tmp_path: Path, name: str):
    folder = shutil.copytree(saved(name), tmp_path / "model")
    picture(3).save(folder / "image.png", exif=lying_on_its_side())
    _, without_us = (folder / "README.md").read_text().split("## Run it without\n")
    code = without_us.split("```python\n")[1].split("```")[0]

    ended = subprocess.run([sys.executable, "-c", code], cwd=folder, capture_output=True, text=True, check=False)

    assert "profiling_agent" not in code
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.strip() == load(saved(name)).predict([Image.open(folder / "image.png")])[0].label


def test_threads_that_load_at_once_leave_torchs_initialisers_to_others(folder: Path, monkeypatch: pytest.MonkeyPatch):
    places = ((nn.init, "kaiming_uniform_"), (nn.init, "normal_"), (PreTrainedModel, "init_weights"))
    before = [getattr(place, name) for place, name in places]
    for (place, name), held in zip(places, before, strict=True):
        # Put back by pytest, so that no other test suffers where this one fails.
        monkeypatch.setattr(place, name, held)

    often, seldom = 1e-5, sys.getswitchinterval()
    sys.setswitchinterval(often)
    with ThreadPoolExecutor(NUM_THREADS) as pool:
        weights, *others = (model.state_dict() for model in pool.map(load_module, [folder] * 6 * NUM_THREADS))
    sys.setswitchinterval(seldom)

    assert all(torch.equal(tensor, other[name]) for other in others for name, tensor in weights.items())
    assert [getattr(place, name) for place, name in places] == before


NUM_CALLS = 50
# Two of each size, as those share what is compiled for it: the other one's place is `number ^ 1`.
BATCHES = [noise_batch(zoo.SPEC, size, seed=10 * size + number) for size in (1, 2, 3) for number in (1, 2)]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eager float32", "onnxruntime float32", "openvino float32", "openvino static"])
def test_each_thread_gets_the_answers_to_its_own_images(saved: Saved, name: str):
    model, together = load(saved(name)), threading.Barrier(NUM_THREADS)
    alone = [model(batch).logits.numpy() for batch in BATCHES]

    def apart(number: int) -> float:
        """Return how far an answer is from that of one thread alone; another's is 1 from it."""
        found = model(BATCHES[number]).logits.numpy()
        return deployments.distance(found, alone[number]) / deployments.distance(alone[number ^ 1], alone[number])

    def ask(first: int) -> float:
        together.wait()
        return max(apart((first + turn) % len(BATCHES)) for turn in range(NUM_CALLS))

    with ThreadPoolExecutor(NUM_THREADS) as pool:
        assert max(pool.map(ask, range(NUM_THREADS))) < 0.3
