"""Names in exported graphs: the layers of the model that the nodes stand for. No torch here."""

import ast
from collections.abc import Collection

import onnx

# The operators that linear layers and convolutions become.
LAYER_OPS = ("MatMul", "Gemm", "Conv")
# What torch's exporter writes beside each node: the names of the modules that it was called in, outermost first.
SCOPES = "pkg.torch.onnx.name_scopes"
# The exported function holds the model under this name.
PREFIX = "model."
# A convolution that swallowed its norm is noted under the norm's name.
WEIGHT = ".weight"


def nodes_of_layers(model: onnx.ModelProto, layers: Collection[str], ops: Collection[str]) -> dict[str, str]:
    """Return the layer of each node, by node name, that computes one of `layers` by one of `ops`."""
    found: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type in ops and (layer := layer_of(node)) in layers:
            found[node.name] = layer
    return found


def is_convnet(model: onnx.ModelProto) -> bool:
    """Return whether most layers are convolutions."""
    ops = [node.op_type for node in model.graph.node]
    return ops.count("Conv") > ops.count("MatMul") + ops.count("Gemm")


def layer_of(node: onnx.NodeProto) -> str:
    """Return the name of the module that a node stands for, by its weight or, where that has none, by its scope."""
    named = [name for name in node.input if name.startswith(PREFIX) and name.endswith(WEIGHT)]
    if named:
        return named[0].removeprefix(PREFIX).removesuffix(WEIGHT)
    noted = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "")
    scopes = [name for name in (ast.literal_eval(noted) if noted else ()) if name.startswith(PREFIX)]
    return scopes[-1].removeprefix(PREFIX) if scopes else ""
