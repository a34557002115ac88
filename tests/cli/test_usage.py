"""Arguments that can't be read: one line says which, as of any bad request."""

import subprocess
import sys
from pathlib import Path

import pytest


def call(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "profiling_agent.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("run", "--seed", "\x1b[31mx"), "--seed"),
        (("run", "--no"), "--no"),
    ],
)
def test_arguments_that_cannot_be_read_are_refused_in_one_line(arguments: tuple[str, ...], word: str):
    said = call(*arguments)

    assert said.returncode == 2
    assert said.stderr.startswith("profiling-agent: ")
    assert said.stderr.count("\n") == 1
    assert said.stderr.strip().isprintable()
    assert word in said.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ("run", "--max-size-ratio", "50"),
            "--max-size-ratio: give a fraction above 0, up to 2: 0.5 is half, or 50% (got '50')",
        ),
        (
            ("run", "--quantize-dtype", "fp32", "--quantize-layers", "fc1"),
            "--quantize-dtype is 'none' but --quantize-layers is 'fc1': drop one of them",
        ),
        (("doctor", "--device", "tpu"), "--device: Input should be 'auto', 'cpu' or 'cuda' (got 'tpu')"),
        (
            ("doctor", "--model", "max_size_ratio", "--runtimes", "tensorrt"),
            "--runtimes names 'tensorrt': use auto, or some of eager, graphed, inductor, onnxruntime, openvino",
        ),
    ],
)
def test_a_value_that_is_not_allowed_is_refused_by_the_name_of_its_flag(arguments: tuple[str, ...], message: str):
    ended = call(*arguments)

    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == f"profiling-agent: {message}\n"


def test_a_number_with_a_unit_gets_past_the_flags(tmp_path: Path):
    contract = ("--max-accuracy-drop", "1%", "--max-size-ratio", "50%", "--min-speedup", "2x", "--runtimes", "torch")

    ended = call("run", *contract, "--output", str(tmp_path / "runs"), "--model", str(tmp_path / "nowhere"), "--quiet")

    assert ended.returncode == 2
    assert "nowhere" in ended.stderr
    assert list((tmp_path / "runs").iterdir()) == []


@pytest.mark.parametrize("verb", ["resume", "race"])
def test_a_link_to_itself_is_refused_in_one_line(tmp_path: Path, verb: str):
    (tmp_path / "loop").symlink_to("loop")

    said = call(verb, str(tmp_path / "loop"))

    assert said.returncode == 2
    assert said.stderr.count("\n") == 1
    assert "is no path" in said.stderr


def test_without_arguments_the_help_is_shown():
    assert "approve" in call().stdout
