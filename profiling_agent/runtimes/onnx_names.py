"""Names of the model's layers for the nodes of exported ONNX graphs. Imports no torch."""

import ast
from collections.abc import Collection
from pathlib import Path

import onnx

from profiling_agent.runtimes.registry import MODULE

# Operators of linear layers and convolutions in exported graphs.
LAYER_OPS = ("MatMul", "Gemm", "Conv")
# Activations that may follow them.
ACTIVATIONS = ("Clip", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid")
# Metadata key of torch's exporter: the names of the modules around a node, outermost first.
SCOPES_KEY = "pkg.torch.onnx.name_scopes"
# The weight's name goes first: a convolution with a folded norm has the norm's scope.
WEIGHT_SUFFIX = ".weight"


def write_bare(model: onnx.ModelProto, path: Path) -> None:
    """Write the graph without the exporter's metadata of each node: source lines of this machine, half of a small file."""
    for node in model.graph.node:
        del node.metadata_props[:]
    onnx.save(model, path)


def nodes_of_layers(model: onnx.ModelProto, layers: Collection[str], ops: Collection[str]) -> dict[str, str]:
    """Return by node name the layer of each node that computes one of `layers` by one of `ops`."""
    layer_by_node: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type in ops and (layer := layer_of(node)) in layers:
            layer_by_node[node.name] = layer
    return layer_by_node


def layers_by_name(model: onnx.ModelProto) -> dict[str, str]:
    """Return the layer of each node by the names of the node and its outputs, without nodes of no layer.

    An activation counts as the layer whose result it takes: runtimes fuse both, and name the operator after the activation.
    """
    layers: dict[str, str] = {}
    for node in model.graph.node:
        input_layer = layers.get(node.input[0]) if node.op_type in ACTIVATIONS else None
        if layer := input_layer or layer_of(node):
            # An unused output has no name.
            layers |= dict.fromkeys(filter(None, (node.name, *node.output)), layer)
    return layers


def is_convnet(model: onnx.ModelProto) -> bool:
    """Return whether most layers are convolutions."""
    ops = [node.op_type for node in model.graph.node]
    return ops.count("Conv") > ops.count("MatMul") + ops.count("Gemm")


def layer_of(node: onnx.NodeProto) -> str:
    """Return the name of a node's module: by its weight or, if it has none, by its scope."""
    weights = [name for name in node.input if name.startswith(MODULE) and name.endswith(WEIGHT_SUFFIX)]
    if weights:
        return weights[0].removeprefix(MODULE).removesuffix(WEIGHT_SUFFIX)
    metadata = next((entry.value for entry in node.metadata_props if entry.key == SCOPES_KEY), "")
    scopes = [name for name in (ast.literal_eval(metadata) if metadata else ()) if name.startswith(MODULE)]
    return scopes[-1].removeprefix(MODULE) if scopes else ""
