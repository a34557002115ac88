"""Conversion of float32 models into OpenVINO's deployments, in int8 by our own layers or by NNCF."""

import importlib
import tempfile
from collections.abc import Collection, Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import onnx
import torch

from profiling_agent.errors import ArtifactError, QuantizationError
from profiling_agent.lib.io import first_line
from profiling_agent.lib.logs import hide_telemetry, import_openvino, muted
from profiling_agent.modules.inference import logits_of, relative_distance
from profiling_agent.quantization.quantize import chosen_layers, quantize_model
from profiling_agent.runtimes.artifact import IR, PreparedFiles, QuantizedLayer
from profiling_agent.runtimes.base import INPUT, Batch, Source, missing_packages
from profiling_agent.runtimes.onnx_export import write_graph
from profiling_agent.runtimes.onnx_graph import LAYER_OPS, is_convnet, nodes_of_layers
from profiling_agent.runtimes.open_vino import LAYER_TYPES, OpenVino, OpenVinoSession, exported_name
from profiling_agent.runtimes.registry import recommended
from profiling_agent.runtimes.save import calibration_batches
from profiling_agent.runtimes.torch_artifact import quantized_rows
from profiling_agent.schemas import Deployment

# Smaller constants are scales and small biases: many, and negligible together.
LARGE_BYTES = 2048
# Prefixes of message lines that don't concern the model, and the length kept of the others.
IGNORED_PREFIXES = ("Exception from ", "Check ", "FrontEnd API failed", "Summary:", "-- Conversion is failed")
MAX_CAUSE = 500
# Images on which OpenVINO's logits are compared with torch's: both round alike, but sum in another order, and values near a rounding edge
# differ (by 0.13 at most on families that it computes right). Further apart than the distance and that many times the rounding's effect is wrong.
NUM_COMPARED, MAX_DISTANCE, MAX_ROUNDING_RATIO = 4, 0.25, 3.0
SHAPING = ("Reshape", "Transpose", "Unsqueeze")


def write_deployment(source: Source, deployment: Deployment, folder: Path) -> PreparedFiles:
    """Write the graph of a deployment, `model.xml` and `model.bin`, into `folder`.

    Raises:
        ArtifactError: there is no ONNX file to begin with, or the int8 model can't be exported.
        PlanError: a pattern hits no layer.
        QuantizationError: OpenVINO can't convert the model, or NNCF can't quantize it.
    """
    path = folder / IR
    if deployment.scheme == "static":
        return _write_static(source, deployment, path)
    if source.onnx is None:
        raise ArtifactError("OpenVINO needs the model as ONNX, and was given none")
    if deployment.scheme == "static_nncf":
        return _write_nncf(source, source.onnx, deployment, path)
    # bfloat16 is the precision of the products; the weights are stored as float16, in half of the bytes.
    _save(_read(source.onnx), path, halve=deployment.scheme == "bfloat16")
    layers = chosen_layers(source.module, recommended(deployment)) if deployment.scheme == "bfloat16" else ()
    rows = tuple(QuantizedLayer(name=name, kind="cast", dtype="bfloat16") for name in layers)
    return PreparedFiles(quantized=rows, tied={})


@contextmanager
def _conversion_errors(message: str) -> Generator[None]:
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        raise QuantizationError(f"{message} ({type(error).__name__}: {_cause(error)[:MAX_CAUSE]})") from error


def _cause(error: BaseException) -> str:
    """Return the lines that name node and cause, without those about OpenVINO's own source files."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(IGNORED_PREFIXES)) or first_line(error)


def _read(exported: Path) -> Any:
    with _conversion_errors("OpenVINO can't read the exported model"):
        return import_openvino().Core().read_model(exported)


def _save(model: Any, path: Path, *, halve: bool) -> None:
    with _conversion_errors("OpenVINO can't write the model"):
        import_openvino().save_model(model, path, compress_to_fp16=halve)
    # A sixth of the graph's file is indentation.
    graph = ElementTree.parse(path)
    for element in graph.iter():
        element.text = element.text.strip() if element.text else None
        element.tail = None
    graph.write(path, encoding="utf-8", xml_declaration=True)


def _halve_constants(model: Any) -> None:
    """Store large constants as float16, which OpenVINO itself doesn't do once weights are int8.

    Constants that are added to activations (position embeddings and biases) are rounded, others only if that changes nothing
    (masks): weights that stay in float keep their values. In a trained Swin-B it is 2 MB of 94.
    """
    openvino = import_openvino()
    opset: Any = importlib.import_module("openvino.opset13")
    for constant in model.get_ops():
        if constant.get_type_name() != "Constant" or constant.get_element_type() != openvino.Type.f32:
            continue
        values = constant.get_data()
        if values.nbytes < LARGE_BYTES or np.abs(values).max() > np.finfo(np.float16).max:
            continue
        rounded = values.astype(np.float16)
        if _is_only_added(constant) or np.array_equal(rounded, values):
            halved = opset.convert(opset.constant(rounded), "f32")
            for reader in constant.output(0).get_target_inputs():
                reader.replace_source_output(halved.output(0))


def _is_only_added(node: Any) -> bool:
    """Return whether a node's values are only added, at most after a change of shape."""
    readers = [reader.get_node() for reader in node.output(0).get_target_inputs()]
    return bool(readers) and all(
        reader.get_type_name() == "Add" or (reader.get_type_name() in SHAPING and _is_only_added(reader))
        for reader in readers
    )


def _write_static(source: Source, deployment: Deployment, path: Path) -> PreparedFiles:
    """Quantize in torch and export that: OpenVINO recognizes int8 arithmetic in quantize, dequantize and matmul."""
    quantized = quantize_model(
        source.module,
        recommended(deployment),
        calibration=lambda: calibration_batches(source),
        reduce_range=OpenVino.saturates(),
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        exported = Path(scratch) / "static.onnx"
        write_graph(quantized.model, exported, spec=source.recipe.input)
        model = _read(exported)
        _halve_constants(model)
        _save(model, path, halve=False)
    _check_logits(path, quantized.model, source)
    return PreparedFiles(quantized=quantized_rows(quantized.model), tied={})


def _check_logits(path: Path, quantized: torch.nn.Module, source: Source) -> None:
    """Raise QuantizationError if OpenVINO computes a graph wrongly.

    It does so among int8 layers, not in float32: a mean over the last of three dimensions (SwiftFormer's pool), a linear
    layer that reads a BatchNorm of two (LeViT's head). ONNX Runtime computes both graphs as torch does.
    """
    images = source.calibration[:NUM_COMPARED]
    session = OpenVinoSession(import_openvino().Core(), path, scheme="static", num_threads=None)
    if len(images) < (session.fixed_size or 1):
        return
    batch = torch.from_numpy(images[: session.fixed_size or len(images)])
    float_logits, int8_logits = logits_of(source.module, batch), logits_of(quantized, batch)
    openvino_logits = torch.from_numpy(session.run(batch.numpy()))
    rounding, distance = relative_distance(int8_logits, float_logits), relative_distance(openvino_logits, int8_logits)
    if not distance <= max(MAX_DISTANCE, MAX_ROUNDING_RATIO * rounding):
        raise QuantizationError(
            f"OpenVINO computes something else than the int8 graph says: its logits are {distance:.2g} from torch's of the same graph, "
            f"which are {rounding:.2g} from float32's"
        )


def _write_nncf(source: Source, exported: Path, deployment: Deployment, path: Path) -> PreparedFiles:
    if line := missing_packages(("nncf",), extra="openvino"):
        raise ArtifactError(f"static_nncf is made by NNCF: {line}")
    layers = chosen_layers(source.module, recommended(deployment))
    graph = onnx.load(exported, load_external_data=False)
    layer_by_node = nodes_of_layers(graph, [name for name, _ in source.module.named_modules()], LAYER_OPS)
    model = _read(exported)
    excluded = {node for node, layer in layer_by_node.items() if layer not in layers}
    quantized = _quantize_with_nncf(model, source.calibration, excluded, is_transformer=not is_convnet(graph))
    _halve_constants(quantized)
    _save(quantized, path, halve=False)
    rows = tuple(
        QuantizedLayer(name=name, kind="static", dtype="qint8", reduce_range=OpenVino.saturates())
        for name in layers
        if name in layer_by_node.values()
    )
    return PreparedFiles(quantized=rows, tied={})


def _quantize_with_nncf(model: Any, images: Batch, excluded: Collection[str], *, is_transformer: bool) -> Any:
    hide_telemetry()
    with muted("nncf", "torch.utils._pytree"):
        nncf: Any = importlib.import_module("nncf")
        names = [
            name
            for op in model.get_ops()
            if op.get_type_name() in LAYER_TYPES and exported_name(name := op.get_friendly_name()) in excluded
        ]
        random_state = torch.get_rng_state()
        try:
            with _conversion_errors("NNCF can't quantize the model"):
                return nncf.quantize(
                    model,
                    nncf.Dataset([{INPUT: image[None]} for image in images]),
                    subset_size=len(images),
                    fast_bias_correction=True,
                    # Sums of two products saturate in 16 bits unless added in 32; by default NNCF avoids it only in the first layer.
                    advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE)
                    if OpenVino.saturates()
                    else None,
                    # For attention: leaves softmax and norms in float, and smooths activations (SmoothQuant).
                    model_type=nncf.ModelType.TRANSFORMER if is_transformer else None,
                    ignored_scope=nncf.IgnoredScope(names=names) if names else None,
                )
        finally:
            torch.set_rng_state(random_state)
