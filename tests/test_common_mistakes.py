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

    def file(self, name: str, text: str) -> str:
        """Return the path of a new text file."""
        (self.scratch / name).write_text(text)
        return str(self.scratch / name)

    def plan(self, layer: str) -> tuple[str, ...]:
        """Return options that name a plan with one pruning recommendation."""
        entry = {"layer": layer, "pruning_type": "structured", "pruning_ratio": 0.2}
        return ("--plan", self.file("plan.json", json.dumps({"pruning": [entry]})))


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


def other_size(place: Place) -> tuple[str, ...]:
    path = place.model() / "preprocessor_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"size": {"height": 48, "width": 48}}))
    return ("--model", str(path.parent))


def empty_folder(place: Place) -> str:
    (place.scratch / "empty").mkdir()
    return str(place.scratch / "empty")


def sheet(place: Place, **changes: Any) -> str:
    """Return a sweep file, in JSON, which is YAML."""
    content = {"models": [str(place.world.model)], "datasets": [str(place.world.data)]}
    return place.file("sheet.yaml", json.dumps(content | changes))


def one_class(place: Place) -> tuple[str, ...]:
    (place.scratch / "data").mkdir()
    shades = np.random.default_rng(0).integers(0, 256, (120, 32, 32, 3), dtype=np.uint8)
    features = Features({"image": Image(), "label": ClassLabel(names=list(zoo.LABELS.values()))})
    rows = {"image": [Pillow.fromarray(each) for each in shades], "label": [0] * 120}
    Dataset.from_dict(rows, features=features).to_parquet(str(place.scratch / "data" / "test.parquet"))
    return ("--dataset", str(place.scratch / "data"))


def no_classes(place: Place) -> tuple[str, ...]:
    for split in ("train", "test"):
        (place.scratch / "data" / split).mkdir(parents=True)
        for row, pixels in enumerate(np.random.default_rng(0).integers(0, 256, (9, 8, 8, 3), dtype=np.uint8)):
            Pillow.fromarray(pixels).save(place.scratch / "data" / split / f"{row}.png")
    return ("--dataset", str(place.scratch / "data"))


RUN: dict[str, tuple[Callable[[Place], tuple[str, ...]], str]] = {
    # Options and terms of the contract.
    "unknown option": (lambda _: ("--modle", "x"), "--modle"),
    "few samples": (lambda _: ("--num-samples", "3"), "50"),
    # Plans.
    "plan with an unknown layer": (lambda place: place.plan(layer="encoder.block.7"), "matches no layer"),
    # Models.
    "model folder that is not there": (lambda _: ("--model", "/nowhere/at/all"), "/nowhere/at/all"),
    "model that is a file": (lambda place: ("--model", place.file("model.txt", "x")), "model"),
    "unknown embedded data": (lambda _: ("--dataset", "reference:cifar"), "reference:"),
    "unknown embedded model": (lambda _: ("--model", "reference:vgg"), "reference:"),
    "folder that is no model": (lambda place: ("--model", empty_folder(place)), "config.json"),
    "weights as a pickle": (pickled, "safetensors"),
    "weights cut off": (truncated, "model.safetensors"),
    "processor missing": (lambda place: without_file(place, "preprocessor_config.json"), "processor"),
    "processor of another size": (other_size, "processor"),
    # Data.
    "data that is not there": (lambda _: ("--dataset", "/nowhere/at/all"), "/nowhere/at/all"),
    "folder without data": (lambda place: ("--dataset", empty_folder(place)), "empty"),
    "wrong split": (lambda _: ("--split", "validation"), "test"),
    "wrong image column": (lambda _: ("--image-column", "img"), "img"),
    "wrong label column": (lambda _: ("--label-column", "target"), "target"),
    "one class": (one_class, "class"),
    "splits without classes": (no_classes, "(found 9 .png in test, 9 .png in train): lay images out as"),
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
    "sweep of nothing": (lambda _: ("sweep", "nowhere.yaml"), "nowhere.yaml"),
    "sweep of a model that is not there": (
        lambda place: ("sweep", sheet(place, models=["/nowhere/at/all"]), "--output", str(place.scratch / "out")),
        "/nowhere/at/all",
    ),
    "doctor of an unnamed language model": (lambda _: ("doctor", "--llm", ""), "llm"),
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
