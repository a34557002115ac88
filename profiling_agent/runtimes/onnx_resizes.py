"""Constant folding of antialiased resizes in exported ONNX graphs, computed by ONNX Runtime.

DINOv2 with registers resizes its position embeddings to the size of the images, bicubic with antialiasing. OpenVINO
computes that without antialiasing and without a warning: logits are 1 to 3% from torch's.
"""

from collections.abc import Sequence
from typing import Any

from onnx import TensorProto, helper, numpy_helper
from onnxscript import ir, optimizer

from profiling_agent.lib.third_party import import_onnxruntime
from profiling_agent.runtimes.onnx_runtime import one_thread


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
