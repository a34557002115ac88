"""A saved model for a runtime that isn't torch's, whose hashes fit what somebody made of it: one line says why it isn't opened."""

from functools import partial
from pathlib import Path
from typing import Any

import deployed
import edits
import numpy as np
import onnx
import pytest
from edits import Edit
from PIL import Image

from profiling_agent import load
from profiling_agent.deployment.registry import open_session
from profiling_agent.deployment.save import save_deployed
from profiling_agent.errors import ArtifactError, RunError
from profiling_agent.handover.export import export

RUNTIMES = {"onnx": "onnxruntime float32", "openvino": "openvino float32", "eager": "eager float32"}


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("deployed")
    source = deployed.source_of("vit", root / "source")
    for name, deployment in RUNTIMES.items():
        save_deployed(source, deployed.deployment(deployment), root / name, num_threads=1)
    return root


def edited(root: Path, name: str, tmp_path: Path, *done: Edit) -> Path:
    return edits.edited(root / name, tmp_path / "model", *done)


is_refused = partial(edits.refuses, load)


def graph(change: Any) -> Edit:
    def do(folder: Path) -> None:
        model = onnx.load(folder / "model.onnx")
        change(model.graph)
        onnx.save(model, folder / "model.onnx")

    return do


def renamed(graph: Any) -> None:
    graph.output[0].name = "said"
    for node in graph.node:
        node.output[:] = ["said" if name == "logits" else name for name in node.output]


def of_another_shape(graph: Any) -> None:
    graph.input[0].type.tensor_type.shape.dim[2].dim_value = 64


ONNX: dict[str, Edit] = {
    "another name of the answer": graph(renamed),
    "a larger image": graph(of_another_shape),
    "no operators": graph(lambda graph: graph.ClearField("node")),
    "an operator of nobody's": graph(lambda graph: setattr(graph.node[3], "op_type", "Nothing")),
    "no inputs": graph(lambda graph: graph.ClearField("input")),
    "no weights": graph(lambda graph: graph.ClearField("initializer")),
    "emptied": edits.bytes_of("model.onnx", lambda _: b""),
    "cut": edits.bytes_of("model.onnx", lambda held: held[: len(held) // 2]),
    "prose": edits.bytes_of("model.onnx", lambda _: b"\x1b[31m no protobuf"),
}


@pytest.mark.parametrize("what", ONNX)
def test_an_onnx_file_that_is_another_model_or_none_is_refused(root: Path, tmp_path: Path, what: str):
    is_refused(edited(root, "onnx", tmp_path, ONNX[what]))


IR: dict[str, Edit] = {
    "no graph": edits.bytes_of("model.xml", lambda _: b"<net/>"),
    "depth": edits.bytes_of("model.xml", lambda _: b"<net>" * 10_000),
    "emptied": edits.bytes_of("model.xml", lambda _: b""),
    "an operator of nobody's": edits.bytes_of("model.xml", lambda held: held.replace(b'"MatMul"', b'"Nothing"')),
    "no weights": edits.bytes_of("model.bin", lambda _: b""),
    "weights beyond the file": edits.bytes_of(
        "model.xml", lambda held: held.replace(b'offset="0"', b'offset="999999999"')
    ),
    "a name with an escape": edits.bytes_of("model.xml", lambda held: held[:-40] + b"\x1b[31m"),
}


@pytest.mark.parametrize("what", IR)
def test_an_openvino_graph_that_is_another_model_or_none_is_refused(root: Path, tmp_path: Path, what: str):
    is_refused(edited(root, "openvino", tmp_path, IR[what]))


@pytest.mark.parametrize("name", RUNTIMES)
def test_images_of_another_size_than_the_golden_ones_are_not_even_opened(root: Path, tmp_path: Path, name: str):
    spec = {"channels": 3, "height": 8192, "width": 8192, "source": "x"}

    with pytest.raises(ArtifactError, match=r"golden\.safetensors.*images of shape"):
        open_session(edited(root, name, tmp_path, edits.recipe(input=spec)))


@pytest.mark.parametrize(
    "fields",
    [
        {"size": {"height": 16, "width": 16}},
        {"do_resize": False},
        {"image_mean": [0.5], "image_std": [0.5]},
        {"image_mean": "grey"},
        {"rescale_factor": "half"},
        {"image_std": [1e-320, 1.0, 1.0]},
        {"resample": 99},
    ],
)
def test_what_a_processor_makes_of_a_picture_is_looked_at(root: Path, tmp_path: Path, fields: dict[str, Any]):
    model = load(edited(root, "onnx", tmp_path, edits.processor(**fields)))

    with pytest.raises(ArtifactError) as caught:
        model.predict(Image.new("RGB", (40, 48)))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("names", [["one", "two"], "cat", None, {"0": ["\x1b[31m"]}, {}])
def test_names_of_classes_are_texts_or_numbers(root: Path, tmp_path: Path, names: Any):
    model = load(edited(root, "onnx", tmp_path, edits.config(id2label=names)))

    assert model.predict(Image.new("RGB", (40, 48))).label.isprintable()


def test_a_golden_file_of_another_type_is_refused_by_every_runtime(root: Path, tmp_path: Path):
    is_refused(edited(root, "openvino", tmp_path, edits.golden("pixel_values", lambda held: held.astype(np.int16))))


def test_an_export_does_not_follow_a_run_out_of_its_folder(root: Path, tmp_path: Path):
    run = tmp_path / "run"
    run.mkdir()
    (run / "request.json").write_text("{}")
    (run / "best").symlink_to(root / "eager")

    with pytest.raises(RunError, match="leads out of"):
        export(run, "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_an_export_of_cuts_that_are_none_is_refused(root: Path, tmp_path: Path):
    unit = {
        "name": "x",
        "kind": "mlp",
        "producers": ["x"],
        "consumer": "x",
        "width": 64,
        "step": 8,
        "params_per_channel": 1,
        "macs_per_channel": 1,
    }
    folder = edited(root, "eager", tmp_path, edits.recipe(cuts=[{"unit": unit, "keep": 32, "requested_ratio": 0.5}]))

    with pytest.raises(ArtifactError, match="no module 'x'"):
        export(folder, "hf", tmp_path / "out")
    assert not (tmp_path / "out").exists()
