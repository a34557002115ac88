"""`profiling-agent export`: a model for other tools, or one line that says why not."""

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from commands import call
from conftest import World
from transformers import AutoModelForImageClassification

from profiling_agent.lib.modules import random_batch
from profiling_agent.quantization.quantize import quantize_model
from profiling_agent.runtimes.torch_artifact import load_module, save_model
from profiling_agent.schemas import QuantizationRecommendation


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_model(zoo.vit(), tmp_path / "saved", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    return tmp_path / "saved"


def test_a_run_stands_for_its_best_model_and_hf_is_a_folder_that_transformers_loads(saved: Path, tmp_path: Path):
    run, plain = tmp_path / "run", tmp_path / "plain"
    run.mkdir()
    (run / "request.json").write_text("{}")
    refused(call("export", run, "--format", "hf", "--output", plain), "has no model yet")
    shutil.copytree(saved, run / "jobs" / "model")
    (run / "best").symlink_to("jobs/model")

    assert call("export", run, "--format", "hf", "--output", plain).exit_code == 0
    loaded = AutoModelForImageClassification.from_pretrained(plain, local_files_only=True)
    batch = random_batch(zoo.SPEC, 2)
    with torch.inference_mode():
        assert torch.equal(loaded(pixel_values=batch).logits, load_module(saved)(pixel_values=batch).logits)


def refused(ended, says: str):
    assert ended.exit_code == 2
    assert says in ended.stderr
    assert len(ended.stderr.strip().splitlines()) == 1


def test_what_can_not_be_exported_or_written_is_one_line(saved: Path, tmp_path: Path, world: World):
    def export(source: Path, output: Path, *options: object) -> Any:
        return call("export", source, "--format", "hf", "--output", output, *options)

    everything = QuantizationRecommendation(layer="all", dtype="qint8")
    quantized = quantize_model(zoo.vit(), [everything]).model
    save_model(quantized, tmp_path / "quantized", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    (tmp_path / "file").write_text("mine")

    refused(export(tmp_path / "quantized", tmp_path / "out"), "quantized")
    refused(export(world.model, tmp_path / "out"), "no saved model")
    refused(export(saved, tmp_path / "file"), "exists already")
    refused(export(saved, tmp_path / "file" / "out"), "can't be written")
    assert (tmp_path / "file").read_text() == "mine"
    assert not (tmp_path / "out").exists()
