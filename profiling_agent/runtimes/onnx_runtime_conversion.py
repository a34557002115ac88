"""Conversion of ONNX files into ONNX Runtime's deployments: fused attention and int8 quantization.

ONNX Runtime has an int8 kernel for attention as one operator: queries, keys and values become one product, quantized
once, without transposed copies. ViT-B in dynamic int8 is 8% faster for it. The rules are onnxscript's.
"""

import contextlib
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Collection, Generator, Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx
from numpy.typing import NDArray
from onnx.checker import ValidationError
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, QuantType, quantize_dynamic, quantize_static
from onnxscript import ir, optimizer
from onnxscript.rewriter.ort_fusions import attention, mha, mha_bias, sdpa

from profiling_agent.errors import ArtifactError, QuantizationError
from profiling_agent.lib.io import first_line
from profiling_agent.lib.logs import muted
from profiling_agent.quantization.quantize import chosen_layers
from profiling_agent.runtimes.artifact import ONNX, PreparedFiles, QuantizedLayer
from profiling_agent.runtimes.base import INPUT, Batch, Source
from profiling_agent.runtimes.onnx_graph import LAYER_OPS, is_convnet, layer_of, nodes_of_layers, write_bare
from profiling_agent.runtimes.onnx_runtime import OnnxRuntime
from profiling_agent.runtimes.registry import recommended
from profiling_agent.schemas import Deployment

# Between int8 convolutions everything has to be int8, or each result is converted to float and back. In a transformer
# norms, softmax, GELU and residual adds stay in float: they take little time, and int8 costs them much accuracy. A Clip
# (ReLU6) left out would get values that were rounded over the whole range that it cuts off: half of a real MobileNet's KL.
CONVNET_OPS = (*LAYER_OPS, "Add", "Clip", "Relu", "MaxPool")
ATTENTION = "Attention"
DOMAIN = "com.microsoft"
PROJECTIONS = 3
# Above onnxscript's default, for the concatenated weights of the projections.
MAX_FOLDED = 1 << 31
# Errors of the quantizer, also for models above protobuf's 2 GB, which can't be one file.
ERRORS = (ValueError, RuntimeError, KeyError, IndexError, ValidationError)


def write_deployment(source: Source, deployment: Deployment, folder: Path) -> PreparedFiles:
    """Write `model.onnx` into `folder`; layers that aren't chosen for quantization stay in float.

    Raises:
        ArtifactError: there is no ONNX file to begin with.
        PlanError: a pattern hits no layer.
        QuantizationError: ONNX Runtime can't quantize the file.
    """
    if source.onnx is None:
        raise ArtifactError("ONNX Runtime needs the model as ONNX, and was given none")
    path = (folder / ONNX).resolve()
    model = onnx.load(source.onnx)
    layers = chosen_layers(source.module, recommended(deployment)) if deployment.scheme != "float32" else {}
    # Kernels of the fused operator measure ranges at run time; none takes static ranges.
    fused: Mapping[str, tuple[str, ...]] = {}
    if deployment.scheme != "static":
        model, fused = fuse_attention(model, layers)
    # The exporter's shapes contradict the quantizer's own inference once it has transposed a weight.
    del model.graph.value_info[:]
    if deployment.scheme == "float32":
        write_bare(model, path)
        return PreparedFiles(quantized=(), tied={})
    nodes = nodes_of_layers(model, layers, LAYER_OPS)
    attentions = {node: names for node, names in fused.items() if names[0] in layers}
    covered = {*nodes.values(), *itertools.chain.from_iterable(attentions.values())}
    if deployment.scheme == "dynamic":
        _quantize_dynamic(model, path, [*nodes, *attentions])
    else:
        _quantize_static(model, path, nodes, source.calibration)
    with _quantizer_context(path.parent):
        write_bare(onnx.load(path), path)
    kind = "dynamic" if deployment.scheme == "dynamic" else "static"
    quantized = tuple(
        QuantizedLayer(name=name, kind=kind, dtype="qint8", reduce_range=OnnxRuntime.saturates())
        for name in layers
        if name in covered
    )
    return PreparedFiles(quantized=quantized, tied={})


@contextlib.contextmanager
def _quantizer_context(folder: Path) -> Generator[None]:
    """Mute the quantizer's advice on the root logger, confine its files to `folder`, and convert its errors."""
    try:
        with muted(""), tempfile.TemporaryDirectory(dir=folder) as scratch, contextlib.chdir(scratch):
            yield
    except ERRORS as error:
        line = first_line(error)[:200]
        raise QuantizationError(f"ONNX Runtime can't quantize the model ({type(error).__name__}: {line})") from error


def _quantize_dynamic(model: onnx.ModelProto, path: Path, nodes: Collection[str]) -> None:
    # Unsigned weights are twice as slow, and convolutions have no fast dynamic kernel.
    with _quantizer_context(path.parent):
        quantize_dynamic(
            model,
            path,
            op_types_to_quantize=["MatMul", "Gemm", ATTENTION],
            per_channel=True,
            weight_type=QuantType.QInt8,
            # 7-bit weights if sums of two products saturate in 16 bits.
            reduce_range=OnnxRuntime.saturates(),
            # The quantizer first splits each Gemm into a MatMul and an Add with new names.
            nodes_to_quantize=[*nodes, *(f"{name}_MatMul" for name in nodes)],
            # ONNX can't infer shapes behind ONNX Runtime's own operators.
            extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
        )


def _quantize_static(model: onnx.ModelProto, path: Path, nodes: dict[str, str], images: Batch) -> None:
    if is_convnet(model):
        ops, layers = CONVNET_OPS, [node.name for node in model.graph.node if node.op_type in LAYER_OPS]
        excluded = [name for name in layers if name not in nodes]
        options: dict[str, Any] = {"op_types_to_quantize": list(ops), "nodes_to_exclude": excluded}
    else:
        options = {"op_types_to_quantize": list(LAYER_OPS), "nodes_to_quantize": list(nodes)}
    # Signed activations are up to twice as slow here (ResNet 0.33 ms instead of 0.16), and no more accurate.
    with _quantizer_context(path.parent):
        quantize_static(
            model,
            path,
            _ImageReader(images),
            quant_format=QuantFormat.QDQ,
            per_channel=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
            reduce_range=OnnxRuntime.saturates(),
            **options,
        )


class _ImageReader(CalibrationDataReader):
    """Calibration images one by one: for a batch the quantizer keeps the outputs of all layers."""

    def __init__(self, images: Batch) -> None:
        self._images: Iterator[NDArray[Any]] = iter(images)

    def get_next(self) -> Any:
        image = next(self._images, None)
        return None if image is None else {INPUT: image[None]}


def fuse_attention(
    model: onnx.ModelProto, layers: Collection[str]
) -> tuple[onnx.ModelProto, Mapping[str, tuple[str, ...]]]:
    """Return the graph with each plain attention as one node, and the layers fused into it by node name.

    `layers` are those chosen for int8. Returns the graph unchanged and no names if no kernel fits: only some projections are
    chosen, queries and values differ in width, or int8 meets a relative position bias.
    """
    rewritten = _apply_attention_rules(model)
    if rewritten is None:
        return model, {}
    fused_layers: dict[str, tuple[str, ...]] = {}
    products: defaultdict[str, list[str]] = defaultdict(list)
    for node in model.graph.node:
        if node.op_type == "MatMul":
            products[node.input[0]].append(layer_of(node))
    for node in rewritten.graph.node:
        if node.op_type != ATTENTION or node.domain != DOMAIN:
            continue
        names = tuple(products[node.input[0]])
        are_chosen = {name in layers for name in names}
        if len(names) != PROJECTIONS or len(are_chosen) > 1 or not _remove_equal_widths(node):
            return model, {}
        # The int8 kernel adds no bias to the scores.
        if are_chosen == {True} and any(node.input[PROJECTIONS:]):
            return model, {}
        fused_layers[node.name] = names
    return rewritten, fused_layers


def _apply_attention_rules(model: onnx.ModelProto) -> onnx.ModelProto | None:
    """Return a copy of the graph after onnxscript's rules for attention, or None if they match nothing."""
    fused = ir.from_proto(model)
    sdpa.fuse_sdpa(fused, apply_shape_inference=True)
    mha.fuse_mha1(fused)
    mha.fuse_mha2(fused)
    mha_bias.fuse_mha_bias(fused)
    if not attention.fuse_attention(fused):
        return None
    optimizer.fold_constants(fused, input_size_limit=MAX_FOLDED, output_size_limit=MAX_FOLDED)
    optimizer.optimize(fused)
    return ir.to_proto(fused)


def _remove_equal_widths(node: onnx.NodeProto) -> bool:
    """Remove the widths from the node if all are equal, and return that: ONNX Runtime doesn't quantize nodes with widths."""
    widths = next((attribute for attribute in node.attribute if attribute.name == "qkv_hidden_sizes"), None)
    if widths is None:
        return True
    if len(set(widths.ints)) > 1:
        return False
    node.attribute.remove(widths)
    return True
