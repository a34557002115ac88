"""Names in exported graphs: the layers of the model that the nodes stand for. No torch here."""

import ast
from collections.abc import Collection
from pathlib import Path

import onnx

from profiling_agent.runtimes.registry import MODULE

# The operators that linear layers and convolutions become.
LAYER_OPS = ("MatMul", "Gemm", "Conv")
# And what follows them.
ACTIVATIONS = ("Clip", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "Relu", "Sigmoid")
# What torch's exporter writes beside each node: the names of the modules that it was called in, outermost first.
SCOPES = "pkg.torch.onnx.name_scopes"
# A convolution that swallowed its norm is noted under the norm's name.
WEIGHT = ".weight"


def write_bare(model: onnx.ModelProto, path: Path) -> None:
    """Write the graph without the exporter's notes on each node: source lines of this machine, half of a small file."""
    for node in model.graph.node:
        del node.metadata_props[:]
    onnx.save(model, path)


def nodes_of_layers(model: onnx.ModelProto, layers: Collection[str], ops: Collection[str]) -> dict[str, str]:
    """Return the layer of each node, by node name, that computes one of `layers` by one of `ops`."""
    found: dict[str, str] = {}
    for node in model.graph.node:
        if node.op_type in ops and (layer := layer_of(node)) in layers:
            found[node.name] = layer
    return found


def layers_by_name(model: onnx.ModelProto) -> dict[str, str]:
    """Return the layer that each node stands for, by the node's name and by those of what it computes; nodes of no layer are left out.

    An activation stands for the layer whose result it takes: runtimes make one operator of both, and name it after the activation.
    """
    found: dict[str, str] = {}
    for node in model.graph.node:
        before = found.get(node.input[0]) if node.op_type in ACTIVATIONS else None
        if layer := before or layer_of(node):
            # An output that nobody reads has no name.
            found |= dict.fromkeys(filter(None, (node.name, *node.output)), layer)
    return found


def is_convnet(model: onnx.ModelProto) -> bool:
    """Return whether most layers are convolutions."""
    ops = [node.op_type for node in model.graph.node]
    return ops.count("Conv") > ops.count("MatMul") + ops.count("Gemm")


def layer_of(node: onnx.NodeProto) -> str:
    """Return the name of the module that a node stands for, by its weight or, where that has none, by its scope."""
    named = [name for name in node.input if name.startswith(MODULE) and name.endswith(WEIGHT)]
    if named:
        return named[0].removeprefix(MODULE).removesuffix(WEIGHT)
    noted = next((entry.value for entry in node.metadata_props if entry.key == SCOPES), "")
    scopes = [name for name in (ast.literal_eval(noted) if noted else ()) if name.startswith(MODULE)]
    return scopes[-1].removeprefix(MODULE) if scopes else ""
