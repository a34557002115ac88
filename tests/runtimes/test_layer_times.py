"""What each layer of a deployed model takes of a pass, as its runtime tells it: a ViT whose MLPs do 32 times the work of its attention."""

from pathlib import Path

import deployed
import pytest
from torch import nn

from profiling_agent.runtimes.registry import OperatorTime, by_layer, layer_times
from profiling_agent.runtimes.save import save_deployed

NAMES = [one.name for one in deployed.all_deployments() if one.runtime != "inductor"]


@pytest.mark.parametrize("name", NAMES)
def test_each_runtime_says_where_a_pass_goes(sources: deployed.Sources, tmp_path: Path, name: str):
    wide, deployment = sources("wide"), deployed.deployment(name)
    save_deployed(wide, deployment, tmp_path / "model", num_threads=1)
    # OpenVINO isn't given that file for our int8 layers: it reads an export of its own.
    exported = None if name == "openvino static" else wide.onnx

    told = layer_times(tmp_path / "model", exported, batch_size=8, num_threads=1)

    modules = {layer for layer, _ in wide.module.named_modules()}
    assert set(told) <= modules
    for block in ("vit.layers.0", "vit.layers.1"):
        layers = {layer: ms for layer, ms in told.items() if layer.startswith(block)}
        assert {f"{block}.mlp.fc1", f"{block}.mlp.fc2"} <= set(layers)
        in_mlp = sum(ms for layer, ms in layers.items() if ".mlp." in layer)
        in_attention = sum(ms for layer, ms in layers.items() if ".attention" in layer)
        assert in_mlp > 0
        assert in_attention > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", ["eager float32", "onnxruntime static", "openvino static", "openvino static_nncf"])
def test_each_convolution_of_a_network_has_its_time(sources: deployed.Sources, tmp_path: Path, name: str):
    source, deployment = sources("resnet"), deployed.deployment(name)
    save_deployed(source, deployment, tmp_path / "model", num_threads=1)

    told = layer_times(
        tmp_path / "model", None if name == "openvino static" else source.onnx, batch_size=8, num_threads=1
    )

    convolutions = {layer for layer, module in source.module.named_modules() if isinstance(module, nn.Conv2d)}
    # A norm that a convolution swallowed may stand for it.
    named = {layer.replace(".normalization", ".convolution") for layer in told}
    assert convolutions <= named
    assert sum(told.values()) > 0


def test_what_nobody_knows_counts_with_the_layer_before_it():
    operators = [
        OperatorTime(names=("Cast",), ms=1.0),
        OperatorTime(names=("node_1", "linear"), ms=2.0),
        OperatorTime(names=("BiasGelu_token_3",), ms=4.0),
        OperatorTime(names=("fused", "node_2"), ms=8.0),
        OperatorTime(names=("model.mlp.fc2", "node_1"), ms=16.0),
    ]

    told = by_layer(operators, {"linear": "mlp.fc1", "node_2": "norm", "node_1": "mlp.fc1"})

    assert told == {"": 1.0, "mlp.fc1": 6.0, "norm": 8.0, "mlp.fc2": 16.0}
