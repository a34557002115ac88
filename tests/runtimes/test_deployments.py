"""Deployments: every runtime and scheme answers as the model does, and its layers can be timed."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import deployments
import numpy as np
import onnx
import pytest
import torch
import zoo
from onnx import TensorProto
from pruning.families import FAMILIES, processor_of, spec_of
from torch import nn

from profiling_agent.errors import ArtifactError, PlanError
from profiling_agent.runtimes.artifact import ONNX, load_recipe, open_session
from profiling_agent.runtimes.onnx_runtime import OnnxSession
from profiling_agent.runtimes.open_vino import OpenVinoSession
from profiling_agent.runtimes.registry import ModelSession, noise_batch, runtime
from profiling_agent.runtimes.torch_artifact import load, save_deployed, save_model
from profiling_agent.schemas import RUNTIMES, Deployment, QuantizationRecommendation

IMAGES = noise_batch(zoo.SPEC, 3, seed=2)
# Float32 in another order; bfloat16 has 8 significant bits; int8 of random weights and noise, of residual adds as well.
BOUNDS = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 2e-2, "dynamic": 6e-2, "static": 6e-2, "static_nncf": 0.2}
INT8 = ("dynamic", "static", "static_nncf")
Saved = Callable[..., Path]
NAMES = [deployment.name for deployment in deployments.all_deployments()]
# test_opened_elsewhere.py has the others' layers.
COMPILED = [("vit", "inductor bfloat16"), ("resnet", "inductor static")]
CASES = COMPILED + [(family, name) for family in deployments.MODELS for name in NAMES if "inductor" not in name]


def bound_of(deployment: Deployment) -> float:
    """Where 8 bits would saturate one side of int8 has 7, whose steps are twice as wide."""
    is_reduced = deployment.scheme in INT8 and runtime(deployment.runtime).saturates()
    return BOUNDS[deployment.scheme] * (2 if is_reduced else 1)


@pytest.mark.parametrize(
    ("family", "name"),
    [
        # Compiling takes seconds for each size of batch, an export of int8 layers as long.
        pytest.param(*case, marks=pytest.mark.slow if case in COMPILED or "openvino static" in case else ())
        for case in CASES
    ],
)
def test_an_opened_form_says_what_the_float_model_does(
    sources: deployments.Sources, saved: Saved, family: str, name: str
):
    deployment = deployments.deployment(name)

    session = open_session(saved(name, family), num_threads=1)

    expected = deployments.float_logits(sources(family), IMAGES)
    assert session.run(IMAGES).dtype == np.float32
    assert deployments.distance(session.run(IMAGES), expected) < bound_of(deployment)
    assert deployments.distance(session.run(IMAGES[:1]), expected[:1]) < 2 * bound_of(deployment)
    assert session.bound(IMAGES)() > 0
    assert threads_of(session) == 1
    bits = {layer.reduce_range for layer in load_recipe(saved(name, family)).quantized if layer.dtype == "qint8"}
    assert bits <= {runtime(deployment.runtime).saturates()}


def threads_of(session: ModelSession) -> int:
    """Ask the runtime itself."""
    if isinstance(session, OnnxSession):
        return session.session.get_session_options().intra_op_num_threads
    if isinstance(session, OpenVinoSession):
        return session.request(IMAGES).get_compiled_model().get_property("INFERENCE_NUM_THREADS")
    return torch.get_num_threads()


def weight_bytes(folder: Path) -> int:
    return (folder / load_recipe(folder).model_files[-1]).stat().st_size


@pytest.mark.parametrize("name", ["eager dynamic", "onnxruntime dynamic", "openvino static_nncf", "openvino bfloat16"])
def test_weights_are_stored_as_small_as_they_are(sources: deployments.Sources, saved: Saved, name: str):
    modules = [*sources("vit").module.modules()]
    params = sum(parameter.numel() for parameter in sources("vit").module.parameters())
    in_layers = sum(each.weight.numel() for each in modules if isinstance(each, nn.Linear | nn.Conv2d))

    expected = in_layers * (2 if name == "openvino bfloat16" else 1) + (params - in_layers) * 4
    # Scales, the patch embedding that dynamic int8 leaves alone, and the graph itself.
    assert expected * 0.9 < weight_bytes(saved(name)) < expected + 75_000


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eager dynamic", "onnxruntime dynamic", "onnxruntime static", "openvino static_nncf"])
def test_int8_has_seven_bits_where_a_runtimes_kernels_saturate_and_a_layer_that_is_to_stay_in_float_does(
    sources: deployments.Sources, saved: Saved, tmp_path: Path, name: str
):
    deployment, saturates = deployments.deployment(name), runtime(deployments.deployment(name).runtime).saturates()
    kind = "dynamic" if deployment.scheme == "dynamic" else "static"
    recommendations = (
        QuantizationRecommendation(layer="all", quantization_type=kind, dtype="qint8"),
        QuantizationRecommendation(layer=r"mlp\.fc2$", quantization_type="cast", dtype="float32"),
    )

    kept = deployment.model_copy(update={"recommendations": recommendations})
    save_deployed(sources("vit"), kept, tmp_path / "kept", num_threads=1)

    recipes = [load_recipe(folder) for folder in (saved(name), tmp_path / "kept")]
    if deployment.runtime == "onnxruntime":
        held = onnx.load(saved(name) / ONNX).graph.initializer
        steps = [onnx.numpy_helper.to_array(one) for one in held if one.data_type == TensorProto.INT8]
        assert max(np.abs(one.astype(int)).max() for one in steps) == (64 if saturates else 127)
    every, others = ({layer.name for layer in recipe.quantized} for recipe in recipes)
    assert every - others == {"vit.layers.0.mlp.fc2"}
    # Four bytes for each of its weights instead of one.
    assert weight_bytes(tmp_path / "kept") - weight_bytes(saved(name)) == pytest.approx(256 * 64 * 3, rel=0.1)


def test_static_int8_of_a_convnet_has_integers_for_every_layer(saved: Saved):
    graph = onnx.load(saved("onnxruntime static", "resnet") / ONNX).graph

    weights = {held.name: held.data_type for held in graph.initializer if len(held.dims) == 4}
    assert set(weights.values()) == {TensorProto.INT8}


def test_a_pattern_that_hits_nothing_is_refused_and_leaves_nothing(sources: deployments.Sources, tmp_path: Path):
    wrong = QuantizationRecommendation(layer="no_such_layer", quantization_type="static", dtype="qint8")

    for name in ("onnxruntime static", "openvino static_nncf", "openvino static"):
        deployment = deployments.deployment(name).model_copy(update={"recommendations": (wrong,)})
        with pytest.raises(PlanError, match="no_such_layer"):
            save_deployed(sources("vit"), deployment, tmp_path / "model")

    assert list(tmp_path.iterdir()) == []


OPENED = """
import sys
from pathlib import Path
from profiling_agent.measure.worker import WorkerSetup, open_artifact
assert open_artifact(Path(sys.argv[1]), WorkerSetup(batch_size=2, device="cpu")).run_once() > 0
print([name for name in ("torch", "transformers", "openvino_telemetry.main", "nncf") if name in sys.modules])
"""


@pytest.mark.parametrize("name", ["onnxruntime float32", "openvino float32"])
def test_what_needs_no_torch_is_raced_without_it_and_reports_to_nobody(saved: Saved, tmp_path: Path, name: str):
    command = [sys.executable, "-c", OPENED, str(saved(name))]
    (home := tmp_path / "home").mkdir()
    places = {"HOME": str(home), "XDG_CACHE_HOME": str(home / ".cache"), "TMPDIR": str(home)}
    environment = {name: value for name, value in os.environ.items() if name != "ORT_DISABLE_TELEMETRY"} | places
    said = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout

    assert said.strip() == "[]"
    # ONNX Runtime notes an id of the machine there, for what it sends.
    assert [path for path in home.rglob("*") if path.is_file()] == []


def test_what_is_missing_is_said_with_the_command_that_installs_it(
    saved: Saved, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    folder = saved("onnxruntime float32")
    missing = "onnxruntime isn't installed: pip install profiling-agent[onnx]"
    with monkeypatch.context() as hidden:
        for name in ("onnxruntime", "openvino", "torchao"):
            hidden.setitem(sys.modules, name, None)

        assert [runtime(name).missing("cpu") for name in RUNTIMES] == [
            None,
            None,
            "torchao isn't installed: pip install profiling-agent[inductor]",
            missing,
            "openvino isn't installed: pip install profiling-agent[openvino]",
        ]
        with pytest.raises(ArtifactError, match=re.escape(f"'{folder}' was saved for onnxruntime: {missing}")):
            load(folder)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert "g++" in (runtime("inductor").missing("cpu") or "")


@pytest.mark.slow
def test_relu6_is_in_the_range_of_an_int8_convolutions_output(tmp_path: Path):
    """Rounded before it, values would have steps as wide as all that it cuts off asks for: twice a real MobileNet's KL."""
    model = FAMILIES["mobilenet_v1"]()
    spec = spec_of(model)
    save_model(model, tmp_path / "model", spec=spec, processor=processor_of(spec), base_model="tiny")
    source = deployments.saved_source(tmp_path)

    save_deployed(source, deployments.deployment("onnxruntime static"), tmp_path / "int8", num_threads=1)
    before, after = (
        [node.op_type for node in onnx.load(path).graph.node]
        for path in (tmp_path / "model.onnx", tmp_path / "int8" / ONNX)
    )

    assert before.count("Clip") == before.count("Conv") == after.count("Conv") == 27
    assert "Clip" not in after
