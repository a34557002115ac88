"""OpenVINO on the CPU: float32, bfloat16, and static int8 by our own layers or by NNCF. Imports no torch."""

import importlib
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

from profiling_agent.errors import QuantizationError
from profiling_agent.lib.logs import muted, third_party_errors
from profiling_agent.lib.machine import available_threads
from profiling_agent.runtimes import registry
from profiling_agent.runtimes.artifact import IR, IR_WEIGHTS, QuantizedLayer, Recipe
from profiling_agent.runtimes.onnx_runtime import is_convnet, nodes_of_layers
from profiling_agent.runtimes.registry import INPUT, Batch, Source
from profiling_agent.schemas import Deployment, Scheme

# Compiled sizes to keep, each with its own copy of the weights: one that comes often, the end of a split, and golden
# images.
MAX_SIZES = 3
# Layers in its graphs.
CONVOLUTIONS = ("Convolution", "GroupConvolution")
LAYER_TYPES = ("MatMul", *CONVOLUTIONS)
# Operators of an input's quantization in our int8 graphs.
QUANTIZING = ("FakeQuantize", "Convert", "Subtract", "Multiply")
# Images on which OpenVINO's logits are compared with torch's: both round alike, but sum in another order, and values
# near a rounding edge differ (by 0.13 at most on families that it computes right). Further apart than the distance and
# that many times the rounding's effect is wrong.
NUM_COMPARED, MAX_DISTANCE, MAX_ROUNDING_RATIO = 4, 0.25, 3.0


class OpenVinoSession(registry.ModelSession):
    """An OpenVINO graph, compiled for each batch size or once for all; threads that share it take turns."""

    def __init__(self, path: Path, *, scheme: Scheme, num_threads: int | None) -> None:
        """Use the graph at `path`, which is read and compiled when it first runs."""
        self._is_int8 = scheme in ("static", "static_nncf")
        self._core, self._path = importlib.import_module("openvino").Core(), path
        self._properties: dict[str, Any] = {
            # Of the parts that aren't int8. Without a hint OpenVINO takes bfloat16 wherever the CPU has it.
            "INFERENCE_PRECISION_HINT": "bf16" if scheme == "bfloat16" else "f32",
            "NUM_STREAMS": 1,
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": num_threads or available_threads(),
        }
        # A request has one buffer for images and one for logits: its user holds the lock until the logits are copied.
        self._lock = threading.Lock()
        self._request_of = lru_cache(MAX_SIZES)(self._compiled)

    def request(self, pixel_values: Batch) -> Any:
        """Return an infer request for batches of this shape; threads hold the lock."""
        return self._request_of(pixel_values.shape[1:] if self._is_for_any_size else pixel_values.shape)

    @cached_property
    def _is_for_any_size(self) -> bool:
        # Compiling for each size is a few per cent faster (a quarter for a small convnet at batch 1). Not for
        # transformers in int8: with all shapes known OpenVINO (2026.4.1) splits up our quantization, a ViT is 1.6 to
        # 1.9 times slower for it, and it computes NNCF's smoothed activations wrongly (a DINOv2's KL is 0.37 instead of
        # 0.014).
        types = Counter(op.get_type_name() for op in self._core.read_model(self._path).get_ops())
        return self._is_int8 and types["MatMul"] >= types["Convolution"] + types["GroupConvolution"]

    def _compiled(self, shape: tuple[int, ...]) -> Any:
        model = self._core.read_model(self._path)
        if not self._is_for_any_size:
            model.reshape(list(shape))
        return self._core.compile_model(model, "CPU", self._properties).create_infer_request()

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        with self._lock:
            (logits,) = self.request(pixel_values).infer([pixel_values]).values()
            return logits.copy()

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        """Return a function that runs these images once and returns the milliseconds it took."""
        with self._lock:
            request, feed = self.request(pixel_values), [pixel_values]
        return registry.timed(lambda: request.infer(feed, share_inputs=True, share_outputs=True))


class OpenVino(registry.Runtime):
    """OpenVINO on the CPU."""

    name = "openvino"
    extra = "openvino"
    requires = ("openvino",)
    files = (IR, IR_WEIGHTS)
    graph_format = "openvino"
    on_cpu = ("float32", "bfloat16", "static", "static_nncf")
    # `static` is exported with int8 layers instead.
    from_onnx = ("float32", "bfloat16", "static_nncf")
    # oneDNN has kernels for AVX2's VNNI too, which is the only one of Intel's hybrid processors (source:
    # docs/facts.md).
    int8_instructions = ("avx512_vnni", "avx_vnni")

    @classmethod
    def convert(cls, source: Source, deployment: Deployment, folder: Path) -> dict[str, Any]:
        """Write the graph of a deployment, `model.xml` and `model.bin`."""
        from profiling_agent.quantization.quantize import chosen_layers

        path, scheme = folder / IR, deployment.scheme
        if scheme == "static":
            return _write_static(source, deployment, path)
        layers = chosen_layers(source.module, registry.recommended(deployment)) if scheme != "float32" else {}
        if scheme == "static_nncf":
            return _write_nncf(source, layers, path)
        # bfloat16 is the precision of the products; the weights are stored as float16, in half of the bytes.
        _save(_read_onnx(source.onnx), path, compress_to_fp16=scheme == "bfloat16")
        return {"quantized": tuple(QuantizedLayer(name=name, kind="cast", dtype="bfloat16") for name in layers)}

    @classmethod
    def open(cls, folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> OpenVinoSession:  # noqa: ARG003
        """Open a saved folder; by default with a thread for each core that a container's quota has time for."""
        return OpenVinoSession(folder / IR, scheme=recipe.deployment.scheme, num_threads=num_threads)


def _conversion_errors(problem: str) -> AbstractContextManager[None]:
    return third_party_errors(lambda message: QuantizationError(f"{problem}: {message}"))


def _read_onnx(path: Path) -> Any:
    with _conversion_errors("OpenVINO can't read the exported model"):
        return importlib.import_module("openvino").Core().read_model(path)


def _save(graph: Any, path: Path, *, compress_to_fp16: bool = False) -> None:
    with _conversion_errors("OpenVINO can't write the model"):
        importlib.import_module("openvino").save_model(graph, path, compress_to_fp16=compress_to_fp16)


def _write_static(source: Source, deployment: Deployment, path: Path) -> dict[str, Any]:
    """Quantize in torch and export that: OpenVINO recognizes int8 arithmetic in quantize, dequantize and matmul."""
    import torch

    from profiling_agent.lib.modules import logits_of, relative_distance
    from profiling_agent.quantization.quantize import quantize_model
    from profiling_agent.runtimes.onnx_export import write_graph
    from profiling_agent.runtimes.torch_artifact import quantized_rows

    quantized = quantize_model(
        source.module,
        registry.recommended(deployment),
        calibration=torch.from_numpy(source.calibration).split(source.batch_size),
        reduce_range=OpenVino.saturates(),
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        exported = Path(scratch) / "static.onnx"
        write_graph(quantized.model, exported, spec=source.recipe.input)
        graph = _read_onnx(exported)
    _fold_pads_(graph)
    _save(graph, path)
    batch = torch.from_numpy(source.calibration[:NUM_COMPARED])
    float_logits, int8_logits = logits_of(source.module, batch), logits_of(quantized.model, batch)
    logits = torch.from_numpy(OpenVinoSession(path, scheme="static", num_threads=None).run(batch.numpy()))
    rounding, distance = relative_distance(int8_logits, float_logits), relative_distance(logits, int8_logits)
    # OpenVINO computes some graphs wrongly among int8 layers, not in float32: a mean over the last of three dimensions
    # (SwiftFormer's pool), a linear layer that reads a BatchNorm of two (LeViT's head). ONNX Runtime computes both
    # right.
    if not distance <= max(MAX_DISTANCE, MAX_ROUNDING_RATIO * rounding):
        raise QuantizationError(
            f"OpenVINO computes something else than the int8 graph says: its logits are {distance:.2g} from torch's "
            f"of the same graph, which are {rounding:.2g} from float32's"
        )
    return {"quantized": quantized_rows(quantized.model)}


def _fold_pads_(graph: Any) -> None:
    """Move zero padding from before the quantization of an input into the convolution: a padded copy is slow in float."""
    for layer in graph.get_ops():
        if layer.get_type_name() not in CONVOLUTIONS:
            continue
        reader, node = layer, layer.input_value(0).get_node()
        # Back to where the input is rounded; zero is rounded to itself.
        while reader.get_type_name() != "FakeQuantize" and node.get_type_name() in QUANTIZING:
            if len(node.output(0).get_target_inputs()) > 1:
                break
            reader, node = node, node.input_value(0).get_node()
        inputs = [value.get_node() for value in node.input_values()]
        is_padded = node.get_type_name() == "Pad" and reader.get_type_name() == "FakeQuantize"
        if not is_padded or any(each.get_type_name() != "Constant" for each in inputs[1:]):
            continue
        # Without a value it is zero.
        begins, ends, *values = (each.get_data() for each in inputs[1:])
        is_zero = node.get_attributes()["pad_mode"] == "constant" and not any(value.any() for value in values)
        if is_zero and not any([*begins[:2], *ends[:2]]) and min([*begins, *ends]) >= 0:
            attributes = layer.get_attributes()
            for name, sides in (("pads_begin", begins), ("pads_end", ends)):
                layer.set_attribute(
                    name, [int(old + more) for old, more in zip(attributes[name], sides[2:], strict=True)]
                )
            reader.input(0).replace_source_output(node.input_value(0))
    graph.validate_nodes_and_infer_types()


def _write_nncf(source: Source, layers: Mapping[str, Any], path: Path) -> dict[str, Any]:
    import onnx
    import torch

    from profiling_agent.quantization.quantize import chosen_layers

    model, graph = _read_onnx(source.onnx), onnx.load(source.onnx, load_external_data=False)
    layer_by_node = nodes_of_layers(graph, [name for name, _ in source.module.named_modules()])
    # Of the whole model NNCF quantizes products of attention too; of some layers only these.
    is_whole = layers.keys() == chosen_layers(source.module, registry.recommend("static_nncf")).keys()
    excluded = {node for node, layer in layer_by_node.items() if layer not in layers and not is_whole}
    products = [op.get_friendly_name() for op in model.get_ops() if op.get_type_name() in LAYER_TYPES]
    ignored = [name for name in products if name.split("/")[0] in excluded]
    is_reduced = OpenVino.saturates()
    with (
        muted("nncf", "torch.utils._pytree"),
        _conversion_errors("NNCF can't quantize the model"),
        torch.random.fork_rng(devices=[]),
    ):
        nncf: Any = importlib.import_module("nncf")
        quantized = nncf.quantize(
            model,
            nncf.Dataset([{INPUT: image[None]} for image in source.calibration]),
            # Sums of two products saturate in 16 bits unless added in 32; by default NNCF avoids it only in the first
            # layer.
            advanced_parameters=nncf.AdvancedQuantizationParameters(
                overflow_fix=nncf.OverflowFix.ENABLE if is_reduced else None
            ),
            # For attention: leaves softmax and norms in float, and smooths activations (SmoothQuant).
            model_type=None if is_convnet(graph) else nncf.ModelType.TRANSFORMER,
            ignored_scope=nncf.IgnoredScope(names=ignored) if ignored else None,
        )
    _save(quantized, path)
    options: Any = {"kind": "static", "dtype": "qint8", "reduce_range": is_reduced}
    names = [name for name in layers if name in layer_by_node.values()]
    return {"quantized": tuple(QuantizedLayer(name=name, **options) for name in names)}
