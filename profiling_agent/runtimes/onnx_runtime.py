"""ONNX Runtime on the CPU: float32, dynamic int8, static int8 as pairs of quantize and dequantize. Imports no torch.

ONNX Runtime has an int8 kernel for attention as one operator: queries, keys and values become one product, quantized
once, without transposed copies. ViT-B in dynamic int8 is 8% faster for it. The rules of the fusion are onnxscript's.
"""

import ast
import contextlib
import importlib
import itertools
import tempfile
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from profiling_agent.errors import QuantizationError
from profiling_agent.lib.logs import muted, third_party_errors
from profiling_agent.lib.machine import available_threads
from profiling_agent.runtimes import registry
from profiling_agent.runtimes.artifact import ONNX, QuantizedLayer, Recipe
from profiling_agent.runtimes.registry import INPUT, MODULE, OUTPUT, Batch, Source
from profiling_agent.schemas import Deployment

if TYPE_CHECKING:
    import onnx

# Operators of linear layers and convolutions in exported graphs.
LAYER_OPS = ("MatMul", "Gemm", "Conv")
# Between int8 convolutions everything has to be int8, or each result is converted to float and back. In a transformer
# norms, softmax, GELU and residual adds stay in float: they take little time, and int8 costs them much accuracy. A Clip
# (ReLU6) left out would get values that were rounded over the whole range that it cuts off: half of a real MobileNet's
# KL.
CONVNET_OPS = (*LAYER_OPS, "Add", "Clip", "Relu", "MaxPool")
ATTENTION, DOMAIN, PROJECTIONS = "Attention", "com.microsoft", 3
# Above onnxscript's default, for the concatenated weights of the projections.
MAX_FOLDED = 1 << 31
# Metadata key of torch's exporter: the names of the modules around a node, outermost first.
SCOPES_KEY = "pkg.torch.onnx.name_scopes"


class OnnxSession(registry.ModelSession):
    """An opened ONNX graph, a path or bytes."""

    def __init__(self, graph: str | bytes, *, num_threads: int | None) -> None:
        options, providers = _session_options(num_threads), ["CPUExecutionProvider"]
        self.session: Any = importlib.import_module("onnxruntime").InferenceSession(graph, options, providers=providers)

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        return self.session.run([OUTPUT], {INPUT: pixel_values})[0]

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        """Return a function that runs these images once and returns the milliseconds it took."""
        return registry.timed(lambda: self.session.run([OUTPUT], {INPUT: pixel_values}))


def _session_options(num_threads: int | None) -> Any:
    options: Any = importlib.import_module("onnxruntime").SessionOptions()
    # Errors only: the warnings are advice about the graph's optimisation.
    options.log_severity_level = 3
    options.intra_op_num_threads = num_threads or available_threads()
    options.inter_op_num_threads = 1
    # Its threads wait for the next pass by spinning, which takes cores from the next process.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    return options


class OnnxRuntime(registry.Runtime):
    """ONNX Runtime on the CPU."""

    name = "onnxruntime"
    extra = "onnx"
    requires = ("onnxruntime", "onnx", "onnxscript")
    files = (ONNX,)
    graph_format = "onnx"
    on_cpu = from_onnx = ("float32", "dynamic", "static")
    # MLAS has kernels for AVX2's VNNI too, which is the only one of Intel's hybrid processors (source: docs/facts.md).
    int8_instructions = ("avx512_vnni", "avx_vnni")

    @classmethod
    def convert(cls, source: Source, deployment: Deployment, folder: Path) -> dict[str, Any]:
        """Write `model.onnx`, with attention fused; layers that aren't chosen for quantization stay in float."""
        import onnx

        from profiling_agent.quantization.quantize import chosen_layers

        path, scheme, model = (folder / ONNX).resolve(), deployment.scheme, onnx.load(source.onnx)
        layers = chosen_layers(source.module, registry.recommended(deployment)) if scheme != "float32" else {}
        # Kernels of the fused operator measure ranges at run time; none takes static ranges.
        model, fused = fuse_attention(model, layers) if scheme != "static" else (model, {})
        # The exporter's shapes contradict the quantizer's own inference once it has transposed a weight.
        del model.graph.value_info[:]
        if scheme == "float32":
            write_bare(model, path)
            return {}
        nodes = nodes_of_layers(model, layers)
        attentions = {node: names for node, names in fused.items() if names[0] in layers}
        covered = {*nodes.values(), *itertools.chain.from_iterable(attentions.values())}
        with (
            # Also for models above protobuf's 2 GB, which can't be one file.
            third_party_errors(lambda message: QuantizationError(f"ONNX Runtime can't quantize the model: {message}")),
            # The quantizer's advice is on the root logger, and its files are in the working directory.
            muted(""),
            tempfile.TemporaryDirectory(dir=path.parent) as scratch,
            contextlib.chdir(scratch),
        ):
            from onnxruntime.quantization import QuantFormat, QuantType, quantize_dynamic, quantize_static

            # 7-bit weights if sums of two products saturate in 16 bits. Unsigned ones are twice as slow.
            options: Any = {"per_channel": True, "reduce_range": cls.saturates(), "weight_type": QuantType.QInt8}
            if scheme == "dynamic":
                quantize_dynamic(
                    model,
                    path,
                    # Convolutions have no fast dynamic kernel.
                    op_types_to_quantize=["MatMul", "Gemm", ATTENTION],
                    # The quantizer first splits each Gemm into a MatMul and an Add with new names.
                    nodes_to_quantize=[name + suffix for name in (*nodes, *attentions) for suffix in ("", "_MatMul")],
                    # ONNX can't infer shapes behind ONNX Runtime's own operators.
                    extra_options={"DefaultTensorType": onnx.TensorProto.FLOAT},
                    **options,
                )
            else:
                if is_convnet(model):
                    layer_nodes = [node.name for node in model.graph.node if node.op_type in LAYER_OPS]
                    options["nodes_to_exclude"] = [name for name in layer_nodes if name not in nodes]
                else:
                    options["nodes_to_quantize"] = [*nodes]
                # One by one: for a batch the quantizer keeps the outputs of all layers.
                feeds = ({INPUT: image[None]} for image in source.calibration)
                reader: Any = SimpleNamespace(get_next=lambda: next(feeds, None))
                # Signed activations are up to twice as slow here (ResNet 0.33 ms instead of 0.16), and no more
                # accurate.
                quantize_static(
                    model,
                    path,
                    reader,
                    quant_format=QuantFormat.QDQ,
                    activation_type=QuantType.QUInt8,
                    op_types_to_quantize=[*(CONVNET_OPS if is_convnet(model) else LAYER_OPS)],
                    **options,
                )
            write_bare(onnx.load(path), path)
        kind = "dynamic" if scheme == "dynamic" else "static"
        names = [name for name in layers if name in covered]
        fields: Any = {"kind": kind, "dtype": "qint8", "reduce_range": cls.saturates()}
        return {"quantized": tuple(QuantizedLayer(name=name, **fields) for name in names)}

    @classmethod
    def open(cls, folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> OnnxSession:  # noqa: ARG003
        """Open a saved folder; by default with a thread for each core that a container's quota has time for."""
        return OnnxSession(str(folder / ONNX), num_threads=num_threads)


def fuse_attention(
    model: "onnx.ModelProto", layers: Collection[str]
) -> "tuple[onnx.ModelProto, Mapping[str, tuple[str, ...]]]":
    """Return the graph with each plain attention as one node, and the layers fused into it by node name.

    `layers` are those chosen for int8. Returns the graph unchanged and no names if no kernel fits: only some
    projections are chosen, queries and values differ in width, or int8 meets a relative position bias.
    """
    from onnxscript import ir, optimizer
    from onnxscript.rewriter.ort_fusions import attention, mha, mha_bias, sdpa

    rewritten = ir.from_proto(model)
    sdpa.fuse_sdpa(rewritten, apply_shape_inference=True)
    mha.fuse_mha1(rewritten)
    mha.fuse_mha2(rewritten)
    mha_bias.fuse_mha_bias(rewritten)
    if not attention.fuse_attention(rewritten):
        return model, {}
    optimizer.fold_constants(rewritten, input_size_limit=MAX_FOLDED, output_size_limit=MAX_FOLDED)
    optimizer.optimize(rewritten)
    fused = ir.to_proto(rewritten)
    fused_layers: dict[str, tuple[str, ...]] = {}
    products: defaultdict[str, list[str]] = defaultdict(list)
    for node in model.graph.node:
        if node.op_type == "MatMul":
            products[node.input[0]].append(layer_of(node))
    for node in fused.graph.node:
        if node.op_type != ATTENTION or node.domain != DOMAIN:
            continue
        names = tuple(products[node.input[0]])
        are_chosen = {name in layers for name in names}
        # The int8 kernel adds no bias to the scores.
        has_int8_bias = are_chosen == {True} and any(node.input[PROJECTIONS:])
        widths = [attribute for attribute in node.attribute if attribute.name == "qkv_hidden_sizes"]
        are_equal = all(len(set(attribute.ints)) == 1 for attribute in widths)
        if len(names) != PROJECTIONS or len(are_chosen) > 1 or has_int8_bias or not are_equal:
            return model, {}
        # ONNX Runtime doesn't quantize nodes with widths, even equal ones.
        for attribute in widths:
            node.attribute.remove(attribute)
        fused_layers[node.name] = names
    return fused, fused_layers


def write_bare(model: "onnx.ModelProto", path: Path) -> None:
    """Write the graph without the exporter's metadata: source lines of this machine, half of a small file."""
    import onnx

    for node in model.graph.node:
        del node.metadata_props[:]
    onnx.save(model, path)


def nodes_of_layers(model: "onnx.ModelProto", layers: Collection[str]) -> dict[str, str]:
    """Return by node name the layer of each product or convolution that computes one of `layers`."""
    nodes = ((node.name, layer_of(node)) for node in model.graph.node if node.op_type in LAYER_OPS)
    return {name: layer for name, layer in nodes if layer in layers}


def is_convnet(model: "onnx.ModelProto") -> bool:
    """Return whether most layers are convolutions."""
    ops = [node.op_type for node in model.graph.node]
    return ops.count("Conv") > ops.count("MatMul") + ops.count("Gemm")


def layer_of(node: "onnx.NodeProto") -> str:
    """Return the name of a node's module: by its weight or, if it has none, by its scope; '' if it has neither."""
    # The weight's name goes first: a convolution with a folded norm has the norm's scope.
    names = [name.removesuffix(".weight") for name in node.input if name.endswith(".weight")]
    if not any(name.startswith(MODULE) for name in names):
        scopes = next((entry.value for entry in node.metadata_props if entry.key == SCOPES_KEY), "[]")
        names = list(reversed(ast.literal_eval(scopes or "[]")))
    return next((name.removeprefix(MODULE) for name in names if name.startswith(MODULE)), "")
