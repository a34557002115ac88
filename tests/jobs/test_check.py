"""A look at a model: what is read, refused and crashes is told, and nothing is left behind."""

import json
import tempfile
from pathlib import Path

import pytest
import zoo
from commands import call
from crashing_library import break_library

from profiling_agent.cli.main import _installed
from profiling_agent.cli.tables import model_tables
from profiling_agent.cli.terminal import console
from profiling_agent.jobs import check
from profiling_agent.jobs.runner import scratch_jobs
from profiling_agent.request import Request
from profiling_agent.schemas import Deployment, Prunable


@pytest.fixture(scope="module")
def laid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Prunable]:
    """Return the folder of a model of one block that was laid out, and what can be cut of it."""
    folder, model = tmp_path_factory.mktemp("laid"), zoo.vit(num_hidden_layers=1)
    return folder, check.lay_out(model, folder, spec=zoo.SPEC, processor=zoo.processor(), name="zoo")


def test_what_can_be_cut_is_counted_with_a_reason_for_the_rest(laid: tuple[Path, Prunable]):
    folder, told = laid

    assert told.units == {"heads": 1, "mlp": 1}
    # A quarter of 4 heads and of an MLP of 256: a row of q, k, v with its bias and a column of o for each channel, a row and a column of the MLP's.
    params = sum(parameter.numel() for parameter in zoo.vit(num_hidden_layers=1).parameters())
    assert told.params == params
    assert told.cut_share == pytest.approx((16 * (3 * 65 + 64) + 64 * (65 + 64)) / params)
    assert set(told.refused) == {"classifier", "stem"}
    assert {"whole", "pruned"} <= {path.name for path in folder.iterdir()}


def test_a_deployment_that_can_not_be_made_says_why(laid: tuple[Path, Prunable]):
    row = check.make(laid[0], "pruned", Deployment(runtime="openvino", scheme="float32"))

    assert row.refused == "conversion: OpenVINO needs the model as ONNX, and was given none"


def test_a_damaged_deployment_is_told_when_it_is_opened_again(laid: tuple[Path, Prunable]):
    row = check.make(laid[0], "whole", Deployment(runtime="eager", scheme="dynamic"))
    folder = check.deployment_folder(laid[0], row)
    assert (row.refused, check.reopen(laid[0], row).refused) == ("", "")

    (folder / "weights.safetensors").write_bytes(b"")

    assert check.reopen(laid[0], row).refused.startswith("reopening: ")


def test_runtimes_that_are_not_there_or_take_long_are_named():
    names, left_out = _installed(Request())
    assert "inductor" not in names
    assert any(line.startswith("inductor: ") for line in left_out)

    named, nothing = _installed(Request(runtimes="eager"))

    assert (named, nothing) == (["eager"], [])


def test_a_look_is_shown_as_tables_with_a_reason_for_what_stays(
    laid: tuple[Path, Prunable], capsys: pytest.CaptureFixture[str]
):
    folder, prunable = laid
    made = check.make(folder, "pruned", Deployment(runtime="eager", scheme="dynamic"))
    refused = check.make(folder, "pruned", Deployment(runtime="openvino", scheme="float32"))

    console.print(model_tables(prunable, [made, refused], ["inductor: it compiles for minutes"]))

    lines = [" ".join(line.split()) for line in capsys.readouterr().out.splitlines()]
    assert any(line.startswith("ViTForImageClassification, ") and "images of 3x32x32" in line for line in lines)
    assert "│ heads │ 1 │ can be cut │" in lines
    assert any("│ classifier │ 1 │ stay, as classifier: its outputs are the logits" in line for line in lines)
    assert any(line.startswith("│ eager dynamic │ yes │ ") for line in lines)
    assert any(line.startswith("│ openvino float32 │ no │ ") for line in lines)
    assert "not tried: inductor: it compiles for minutes" in lines


@pytest.mark.slow
def test_a_model_is_looked_at_from_its_folder_a_crash_is_a_refusal_and_nothing_is_left(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    break_library("onnxruntime", tmp_path, monkeypatch)
    zoo.save(zoo.vit(num_hidden_layers=1), tmp_path / "model")
    (tmp_path / "temporary").mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))

    ended = call("doctor", "--model", tmp_path / "model", "--runtimes", "onnxruntime,eager", "--json")

    shown = json.loads(ended.stdout)
    assert ended.exit_code == 0
    assert shown["prunable"]["units"] == {"heads": 1, "mlp": 1}
    refused = {
        (row["deployment"]["runtime"], row["deployment"]["scheme"]): row["refused"] for row in shown["deployable"]
    }
    crashed = [refused.pop(("onnxruntime", scheme)) for scheme in ("float32", "dynamic", "static")]
    assert all("SIGILL" in reason for reason in crashed)
    assert refused == dict.fromkeys((("eager", scheme) for scheme in ("float32", "bfloat16", "float16", "dynamic")), "")
    assert {row["form"] for row in shown["deployable"]} == {"pruned"}
    assert not list((tmp_path / "temporary").glob("profiling-agent-*"))


@pytest.mark.slow
def test_an_export_that_fails_is_the_reason_of_each_deployment_that_reads_it(tmp_path: Path):
    zoo.save(zoo.vit(num_hidden_layers=1), tmp_path / "model")

    with scratch_jobs() as jobs:
        jobs.run(check.LookTask(model=str(tmp_path / "model")))
        # Where the file would be written.
        (jobs.workspace.root / check.CHECK_FOLDER / "whole.onnx").mkdir()
        rows = list(check.check_deployments(jobs, "whole", ["onnxruntime"]))

    assert [row.deployment.scheme for row in rows] == ["float32", "dynamic", "static"]
    assert all(row.refused.startswith("export: ") for row in rows)
