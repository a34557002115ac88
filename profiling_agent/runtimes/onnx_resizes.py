"""Resizes of a model's own weights in an exported graph: computed once, by ONNX Runtime, and held as what comes out of them.

DINOv2 with registers brings its position embeddings to the size of the images by a bicubic resize with antialiasing, which
OpenVINO computes without it and says nothing: logits are 1 to 3% from torch's.
"""

from collections.abc import Sequence
from typing import Any

from onnx import TensorProto, helper, numpy_helper
from onnxscript import ir, optimizer

from profiling_agent.lib.third_party import import_onnxruntime
from profiling_agent.runtimes.onnx_runtime import one_thread


def fold_resizes_(model: Any) -> None:
    """Set in the place of every antialiased resize that depends on no image what it gives; the model is onnxscript's.

    What ONNX Runtime can't compute by itself stays as it is.
    """
    resizes = [
        node
        for node in model.graph
        if node.op_type == "Resize" and "antialias" in node.attributes and node.attributes["antialias"].as_int() == 1
    ]
    for node in resizes:
        if (needed := _needed(model, node)) is None:
            continue
        if (result := _computed(model, needed, node.outputs[0].name)) is not None:
            output = node.outputs[0]
            held = ir.val(f"{output.name}_resized", const_value=ir.tensor(result))
            model.graph.register_initializer(held)
            output.replace_all_uses_with(held)
    if resizes:
        optimizer.remove_unused_nodes(model)


def _needed(model: Any, last: Any) -> list[Any] | None:
    """Return a node and all others that it is computed from, in their order; None where images are among it."""
    found, ahead = {last}, [last]
    while ahead:
        for value in _given(ahead.pop()):
            node = value.producer()
            if node is None and not value.is_initializer():
                return None
            if node is not None and node not in found:
                found.add(node)
                ahead.append(node)
    return [node for node in model.graph if node in found]


def _given(node: Any) -> list[Any]:
    return [value for value in node.inputs if value is not None]


def _computed(model: Any, nodes: Sequence[Any], name: str) -> Any:
    weights = {value.name: value for node in nodes for value in _given(node) if value.is_initializer()}
    graph = helper.make_graph(
        [ir.to_proto(node) for node in nodes],
        "resize",
        inputs=[],
        outputs=[helper.make_tensor_value_info(name, TensorProto.FLOAT, None)],
        initializer=[numpy_helper.from_array(value.const_value.numpy(), each) for each, value in weights.items()],
    )
    opsets = [helper.make_opsetid(domain, version) for domain, version in model.opset_imports.items()]
    import_onnxruntime()
    from onnxruntime.capi.onnxruntime_pybind11_state import Fail, InvalidArgument, InvalidGraph, NotImplemented

    whole = helper.make_model(graph, opset_imports=opsets, ir_version=model.ir_version).SerializeToString()
    try:
        return one_thread(whole).run([name], {})[0]
    except (Fail, InvalidArgument, InvalidGraph, NotImplemented):
        return None
