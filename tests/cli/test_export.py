"""`profiling-agent export`: a model for other tools, or one line that says why not."""

import shutil
from pathlib import Path

import pytest
import torch
import zoo
from commands import call
from conftest import World
from transformers import AutoModelForImageClassification

from profiling_agent.modules.inference import random_batch
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.runtimes.torch_artifact import load_module, save_model
from profiling_agent.schemas import QuantizationRecommendation


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(zoo.vit(), tmp_path / "saved", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    return tmp_path / "saved"


@pytest.mark.slow
def test_onnx_is_a_folder_with_the_graph_and_ten_lines_that_run_it(saved: Path, tmp_path: Path):
    ended = call("export", saved, "--format", "onnx", "--output", tmp_path / "new" / "out")

    assert ended.exit_code == 0
    assert "from torch's" in ended.stdout
    assert {"model.onnx", "run.py"} <= {path.name for path in (tmp_path / "new" / "out").iterdir()}


def test_hf_is_a_folder_that_transformers_loads(saved: Path, tmp_path: Path):
    ended = call("export", saved, "--format", "hf", "--output", tmp_path / "plain")

    assert ended.exit_code == 0
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path / "plain", local_files_only=True)
    batch = random_batch(zoo.SPEC, 2)
    with torch.inference_mode():
        assert torch.equal(loaded(pixel_values=batch).logits, load_module(saved)(pixel_values=batch).logits)


def test_a_run_stands_for_its_best_model(saved: Path, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "request.json").write_text("{}")
    unfinished = call("export", run, "--format", "hf", "--output", tmp_path / "plain")
    shutil.copytree(saved, run / "jobs" / "model")
    (run / "best").symlink_to("jobs/model")
    finished = call("export", run, "--format", "hf", "--output", tmp_path / "plain")

    assert (unfinished.exit_code, finished.exit_code) == (2, 0)
    assert "has no model yet" in unfinished.stderr
    assert (tmp_path / "plain" / "config.json").exists()


@pytest.mark.parametrize("format_", ["onnx", "hf"])
def test_a_quantized_model_is_refused(tmp_path: Path, format_: str):
    everything = QuantizationRecommendation(layer="all", dtype="qint8")
    model = quantize_model(zoo.vit(), [everything]).model
    save_model(model, tmp_path / "saved", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")

    refused(call("export", tmp_path / "saved", "--format", format_, "--output", tmp_path / "out"), "quantized")
    assert not (tmp_path / "out").exists()


def refused(ended, says: str):
    assert ended.exit_code == 2
    assert says in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_a_bad_call_is_one_clear_line(saved: Path, tmp_path: Path, world: World):
    out = tmp_path / "out"

    refused(call("export", saved, "--format", "tflite", "--output", out), "choose one of onnx, openvino, hf")
    refused(call("export", saved, "--format", "hf", "--output", out, "--batch-size", 4), "batch_size")
    refused(call("export", world.model, "--format", "hf", "--output", out), "no saved model")
    refused(call("export", tmp_path / "nowhere", "--format", "onnx", "--output", out), "nowhere")
    assert not out.exists()


@pytest.mark.parametrize("format_", ["onnx", "hf"])
def test_an_output_that_can_not_be_written_is_refused(saved: Path, tmp_path: Path, format_: str):
    (tmp_path / "file").write_text("mine")

    refused(call("export", saved, "--format", format_, "--output", tmp_path / "file"), "exists already")
    refused(call("export", saved, "--format", format_, "--output", tmp_path / "file" / "out"), "can't be written")
    assert (tmp_path / "file").read_text() == "mine"


def test_the_help_says_what_the_formats_are():
    said = call("export", "--help").output

    assert "run.py" in said
    assert "ONNX Runtime" in said
    assert "from_pretrained" in said
