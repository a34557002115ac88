"""Exported ONNX graphs: the layers that nodes stand for, and resizes of weights computed ahead.

DINOv2 with registers resizes its position embeddings to the size of the images, bicubic with antialiasing. OpenVINO
computes that without antialiasing and without a warning: logits are 1 to 3% from torch's. Imports no torch.
"""

import ast
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import onnx
from onnx import TensorProto, helper, numpy_helper
from onnxscript import ir, optimizer

from profiling_agent.lib.logs import import_onnxruntime
from profiling_agent.runtimes.base import MODULE
from profiling_agent.runtimes.onnx_runtime import one_thread

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


def fold_resizes_(model: Any) -> None:
    """Replace every antialiased resize that depends on no image by its result; `model` is onnxscript's.

    Resizes that ONNX Runtime can't compute separately stay.
    """
    resizes = [
        node
        for node in model.graph
        if node.op_type == "Resize" and "antialias" in node.attributes and node.attributes["antialias"].as_int() == 1
    ]
    for node in resizes:
        if (subgraph := _constant_subgraph(model, node)) is None:
            continue
        if (result := _compute(model, subgraph, node.outputs[0].name)) is not None:
            output = node.outputs[0]
            constant = ir.val(f"{output.name}_resized", const_value=ir.tensor(result))
            model.graph.register_initializer(constant)
            output.replace_all_uses_with(constant)
    if resizes:
        optimizer.remove_unused_nodes(model)


def _constant_subgraph(model: Any, last: Any) -> list[Any] | None:
    """Return a node and all nodes that it is computed from, in graph order; None if it depends on images."""
    subgraph, pending = {last}, [last]
    while pending:
        for value in _present_inputs(pending.pop()):
            node = value.producer()
            if node is None and not value.is_initializer():
                return None
            if node is not None and node not in subgraph:
                subgraph.add(node)
                pending.append(node)
    return [node for node in model.graph if node in subgraph]


def _present_inputs(node: Any) -> list[Any]:
    return [value for value in node.inputs if value is not None]


def _compute(model: Any, nodes: Sequence[Any], name: str) -> Any:
    weights = {value.name: value for node in nodes for value in _present_inputs(node) if value.is_initializer()}
    graph = helper.make_graph(
        [ir.to_proto(node) for node in nodes],
        "resize",
        inputs=[],
        outputs=[helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        initializer=[numpy_helper.from_array(value.const_value.numpy(), key) for key, value in weights.items()],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    import_onnxruntime()
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, NotImplemented

    serialized = helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version).SerializeToString()
    try:
        return one_thread(serialized).run([name], {})[0]
    except (Fail, InvalidArgument, InvalidGraph, NotImplemented):
        return None
