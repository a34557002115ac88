"""Common mistakes: each ends in one clear line and exit code 2, and leaves nothing behind."""

import json
import shutil
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import zoo
from conftest import World
from datasets import ClassLabel, Dataset, Features, Image
from PIL import Image as Pillow
from transformers import ViTConfig, ViTModel
from typer.testing import CliRunner

from profiling_agent.cli.main import app
from profiling_agent.jobs.tasks import MODULES
from profiling_agent.processes.child import fork_server

SETTINGS = {"COLUMNS": "200", "TERM": "dumb", "HF_HUB_OFFLINE": "1"}


class Place(NamedTuple):
    """What a mistake is made with: a good model and data set, a finished run, and a scratch folder."""

    world: World
    finished: Path
    scratch: Path

    def model(self) -> Path:
        """Return a copy of the model to be spoilt."""
        return Path(shutil.copytree(self.world.model, self.scratch / "model"))

    def edited(self, file: str, **changes: Any) -> tuple[str, ...]:
        """Return options that name a model with a JSON file of changed values; None removes a key."""
        path = self.model() / file
        values = json.loads(path.read_text()) | changes
        path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}))
        return ("--model", str(path.parent))

    def file(self, name: str, text: str) -> str:
        """Return the path of a new text file."""
        (self.scratch / name).write_text(text)
        return str(self.scratch / name)

    def folder(self, name: str, text: str) -> str:
        """Return the path of a folder with a new text file."""
        return str(Path(self.file(name, text)).parent)

    def plan(self, **pruning: Any) -> tuple[str, ...]:
        """Return options that name a plan with one pruning recommendation."""
        entry = {"layer": "fc1", "pruning_type": "structured", "pruning_ratio": 0.2} | pruning
        return ("--plan", self.file("plan.json", json.dumps({"pruning": [entry]})))

    def data(self, rows: dict[str, list[Any]], features: Features) -> tuple[str, ...]:
        """Return options that name a data set with these rows as its test split."""
        (self.scratch / "data").mkdir()
        Dataset.from_dict(rows, features=features).to_parquet(str(self.scratch / "data" / "test.parquet"))
        return ("--dataset", str(self.scratch / "data"))


def pictures(num_images: int) -> list[Pillow.Image]:
    random = np.random.default_rng(0)
    return [Pillow.fromarray(random.integers(0, 256, (32, 32, 3), dtype=np.uint8)) for _ in range(num_images)]


def pickled(place: Place) -> tuple[str, ...]:
    option, model = without_file(place, "model.safetensors")
    torch.save({}, Path(model) / "pytorch_model.bin")
    return (option, model)


def truncated(place: Place) -> tuple[str, ...]:
    weights = place.model() / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    return ("--model", str(weights.parent))


def without_file(place: Place, name: str) -> tuple[str, str]:
    model = place.model()
    (model / name).unlink()
    return ("--model", str(model))


def no_classifier(place: Place) -> tuple[str, ...]:
    config = ViTConfig(hidden_size=64, num_hidden_layers=1, num_attention_heads=4, intermediate_size=128, image_size=32)
    return ("--model", str(zoo.save(ViTModel(config), place.scratch / "model")))


def undecodable(place: Place) -> tuple[str, ...]:
    for name in ("class 0", "class 1"):
        folder = place.scratch / "data" / "test" / name
        folder.mkdir(parents=True)
        for number in range(60):
            (folder / f"{number}.jpg").write_bytes(b"this is no picture")
    return ("--dataset", str(place.scratch / "data"))


def empty_folder(place: Place) -> str:
    (place.scratch / "empty").mkdir()
    return str(place.scratch / "empty")


def without_report(place: Place) -> str:
    (place.scratch / "run").mkdir()
    shutil.copy(place.finished / "request.json", place.scratch / "run")
    return str(place.scratch / "run")


def without_jobs(place: Place) -> str:
    """Return a run that was copied without its jobs."""
    ignored = shutil.ignore_patterns("jobs")
    return str(shutil.copytree(place.finished, place.scratch / "bare", symlinks=True, ignore=ignored))


def sheet(place: Place, **changes: Any) -> str:
    """Return a sweep file, in JSON, which is YAML."""
    content = {"models": [str(place.world.model)], "datasets": [str(place.world.data)]}
    return place.file("sheet.yaml", json.dumps(content | changes))


def one_class(place: Place) -> tuple[str, ...]:
    labels = ClassLabel(names=list(zoo.LABELS.values()))
    return place.data({"image": pictures(120), "label": [0] * 120}, Features({"image": Image(), "label": labels}))


def unlabelled(place: Place) -> tuple[str, ...]:
    return place.data({"image": pictures(120)}, Features({"image": Image()}))


RUN: dict[str, tuple[Callable[[Place], tuple[str, ...]], str]] = {
    # Options and terms of the contract.
    "unknown option": (lambda _: ("--modle", "x"), "--modle"),
    "word for a number": (lambda _: ("--batch-size", "many"), "--batch-size"),
    "few samples": (lambda _: ("--num-samples", "3"), "50"),
    "pattern that is none": (lambda _: ("--quantize-layers", "fc1("), "fc1("),
    # Plans.
    "plan that is not there": (lambda _: ("--plan", "nowhere.json"), "nowhere.json"),
    "plan that is no JSON": (lambda place: ("--plan", place.file("plan.json", "{")), "plan"),
    "plan with an unknown layer": (lambda place: place.plan(layer="encoder.block.7"), "matches no layer"),
    "plan that cuts everything": (lambda place: place.plan(pruning_ratio=1), "less than 1"),
    "plan with an unknown type": (lambda place: place.plan(pruning_type="magic"), "pruning_type"),
    # Models.
    "model folder that is not there": (lambda _: ("--model", "/nowhere/at/all"), "/nowhere/at/all"),
    "model that is a file": (lambda place: ("--model", place.file("model.txt", "x")), "model"),
    "unknown embedded model": (lambda _: ("--model", "reference:vgg"), "reference:"),
    "folder that is no model": (lambda place: ("--model", empty_folder(place)), "config.json"),
    "names of fewer classes": (
        lambda place: place.edited("config.json", id2label={"0": "a", "1": "b", "2": "c"}, label2id=None),
        "names 3 classes by",
    ),
    "no classifier": (no_classifier, "classif"),
    "weights as a pickle": (pickled, "safetensors"),
    "weights cut off": (truncated, "model.safetensors"),
    "processor missing": (lambda place: without_file(place, "preprocessor_config.json"), "processor"),
    "processor of another size": (
        lambda place: place.edited("preprocessor_config.json", size={"height": 48, "width": 48}),
        "processor",
    ),
    "model with one output": (
        lambda place: ("--model", str(zoo.save(zoo.vit(id2label={0: "one"}), place.scratch / "model"))),
        "output",
    ),
    # Data.
    "data that is not there": (lambda _: ("--dataset", "/nowhere/at/all"), "/nowhere/at/all"),
    "unknown embedded data": (lambda _: ("--dataset", "reference:cifar"), "reference:"),
    "folder without data": (lambda place: ("--dataset", empty_folder(place)), "empty"),
    "wrong split": (lambda _: ("--split", "validation"), "test"),
    "wrong image column": (lambda _: ("--image-column", "img"), "img"),
    "wrong label column": (lambda _: ("--label-column", "target"), "target"),
    "no labels": (unlabelled, "label"),
    "one class": (one_class, "class"),
    "files that are no pictures": (undecodable, "image"),
    "numbers without pictures": (lambda place: ("--dataset", place.folder("table.csv", "a,b\n1,2\n")), "image"),
    # The machine.
    "unknown user's folder": (lambda _: ("--output", "~nobody-of-that-name/x"), "home folder"),
    "output that is a file": (lambda place: ("--output", place.file("runs.txt", "x")), "runs.txt"),
    "output that can't be written": (lambda _: ("--output", "/proc/runs"), "/proc/runs"),
}
OTHER: dict[str, tuple[Callable[[Place], tuple[str, ...]], str]] = {
    "unknown command": (lambda _: ("rum",), "rum"),
    "show without a run": (lambda _: ("show",), "RUN"),
    "show of nothing": (lambda _: ("show", "/nowhere/at/all"), "/nowhere/at/all"),
    "resume of no run": (lambda place: ("resume", empty_folder(place)), "run"),
    "approve a run that waits for nothing": (lambda place: ("approve", str(place.finished)), "waits for no"),
    "unknown export format": (
        lambda place: ("export", str(place.finished), "--format", "tflite", "--output", "x"),
        "onnx",
    ),
    "benchmark of a folder of folders": (lambda place: ("benchmark", str(place.scratch)), "is no saved model"),
    "benchmark of a run without a report": (lambda place: ("benchmark", without_report(place)), "has no report yet"),
    "benchmark of a run without its models": (
        lambda place: ("benchmark", without_jobs(place)),
        "is missing",
    ),
    "compare with nothing": (lambda place: ("compare", str(place.finished), "/nowhere/at/all"), "/nowhere/at/all"),
    "sweep of nothing": (lambda _: ("sweep", "nowhere.yaml"), "nowhere.yaml"),
    "sweep of a model that is not there": (
        lambda place: ("sweep", sheet(place, models=["/nowhere/at/all"]), "--output", str(place.scratch / "out")),
        "/nowhere/at/all",
    ),
    "doctor of an unnamed language model": (lambda _: ("doctor", "--llm", ""), "llm"),
    "doctor of an unknown device": (lambda _: ("doctor", "--device", "tpu"), "Input should be 'auto', 'cpu' or 'cuda'"),
}


@pytest.fixture(scope="module")
def _imported_offline(_imported_once: None) -> Iterator[None]:
    """Keep what the children of offline runs are copies of, for all mistakes."""
    with ExitStack() as stack:
        with pytest.MonkeyPatch.context() as patch:
            for name, value in SETTINGS.items():
                patch.setenv(name, value)
            stack.enter_context(fork_server(MODULES))
        yield


@pytest.fixture
def place(world: World, finished: Path, tmp_path: Path, _imported_offline: None) -> Place:
    return Place(world, finished, tmp_path)


def refusal(arguments: tuple[str, ...]) -> str:
    """Call the command line as `main` does; return its one line on standard error."""
    ended: Any = CliRunner().invoke(app, list(arguments), env=SETTINGS)

    assert ended.exit_code == 2, (ended.output, ended.exception)
    lines = [line for line in ended.stderr.splitlines() if line.strip()]
    assert len(lines) == 1, ended.stderr
    return lines[0]


@pytest.mark.parametrize("mistake", RUN)
def test_a_mistaken_run_is_refused_in_one_line_and_leaves_nothing(mistake: str, place: Place):
    make, expected = RUN[mistake]
    runs = place.scratch / "runs"
    good = ("--model", str(place.world.model), "--dataset", str(place.world.data), "--output", str(runs), "--quiet")

    line = refusal(("run", *good, "--runtimes", "eager", "--max-iterations", "1", *make(place)))

    assert expected in line
    assert not runs.exists() or not list(runs.iterdir())


@pytest.mark.parametrize("mistake", OTHER)
def test_another_mistaken_command_is_refused_in_one_line(mistake: str, place: Place):
    make, expected = OTHER[mistake]

    assert expected in refusal(make(place))
    assert (place.finished / "report.json").exists()
    assert not (place.scratch / "out").exists()


def test_cuda_that_is_not_there_is_refused(place: Place):
    if torch.cuda.is_available():
        pytest.skip("this machine has CUDA")

    assert "CUDA" in refusal(("run", "--device", "cuda", "--output", str(place.scratch / "runs")))
