"""OpenVINO's conversion: a float32 model brought into its deployments, in int8 by our own layers or by NNCF."""

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
from profiling_agent.lib.machine import saturates
from profiling_agent.lib.third_party import hide_telemetry, import_openvino, muted
from profiling_agent.modules.inference import logits_of, relative_distance
from profiling_agent.quantization.kinds import quantized_modules
from profiling_agent.quantization.quantize import chosen_layers, quantize_model
from profiling_agent.runtimes.artifact import IR, PreparedFiles, QuantizedLayer
from profiling_agent.runtimes.onnx_export import write_graph
from profiling_agent.runtimes.onnx_names import LAYER_OPS, is_convnet, nodes_of_layers
from profiling_agent.runtimes.open_vino import LAYER_TYPES, OpenVinoSession, original
from profiling_agent.runtimes.registry import INPUT, Batch, Source, missing_packages, recommended
from profiling_agent.runtimes.save import calibration_batches
from profiling_agent.schemas import Deployment

# Below this a constant is a scale or a small bias, of which there are many and which together are nothing.
LARGE_BYTES = 2048
# How lines begin that say nothing of the model, and what is kept of the others.
ABOUT_ITSELF = ("Exception from ", "Check ", "FrontEnd API failed", "Summary:", "-- Conversion is failed")
MAX_CAUSE = 500
# Images on which OpenVINO's logits are compared with those of torch, which rounds alike: it adds in another order, and steps that lie near an edge
# fall to the other side (0.13 at most on families that it computes right). More than the first and than so many times what rounding costs is wrong.
NUM_COMPARED, MOST_APART, TIMES_APART = 4, 0.25, 3.0
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
        return _write_ours(source, deployment, path)
    if source.onnx is None:
        raise ArtifactError("OpenVINO needs the model as ONNX, and was given none")
    if deployment.scheme == "static_nncf":
        return _write_nncf(source, source.onnx, deployment, path)
    # bfloat16 is how it computes; half of the bytes are what float16 weights take.
    _save(_read(source.onnx), path, halve=deployment.scheme == "bfloat16")
    layers = chosen_layers(source.module, recommended(deployment)) if deployment.scheme == "bfloat16" else ()
    rows = tuple(QuantizedLayer(name=name, kind="cast", dtype="bfloat16") for name in layers)
    return PreparedFiles(quantized=rows, tied={})


@contextmanager
def _theirs(doing: str) -> Generator[None]:
    try:
        yield
    except (RuntimeError, ValueError, TypeError) as error:
        raise QuantizationError(f"{doing} ({type(error).__name__}: {_cause(error)[:MAX_CAUSE]})") from error


def _cause(error: BaseException) -> str:
    """Return the lines that name node and cause; those around them name OpenVINO's own source files."""
    lines = [line.strip() for line in str(error).splitlines()]
    return " ".join(line for line in lines if line and not line.startswith(ABOUT_ITSELF)) or first_line(error)


def _read(exported: Path) -> Any:
    with _theirs("OpenVINO can't read the exported model"):
        return import_openvino().Core().read_model(exported)


def _save(model: Any, path: Path, *, halve: bool) -> None:
    with _theirs("OpenVINO can't write the model"):
        import_openvino().save_model(model, path, compress_to_fp16=halve)
    # A sixth of the graph's file is indentation.
    graph = ElementTree.parse(path)
    for element in graph.iter():
        element.text = element.text.strip() if element.text else None
        element.tail = None
    graph.write(path, encoding="utf-8", xml_declaration=True)


def _halve_constants(model: Any) -> None:
    """Store large constants as float16, which OpenVINO itself doesn't do once weights are int8.

    What is added to activations (position embeddings and biases) is rounded; anything else only where that changes
    nothing (masks), so that weights which are left in float stay what they are. In a trained Swin-B it is 2 MB of 94.
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
        if _is_added(constant) or np.array_equal(rounded, values):
            halved = opset.convert(opset.constant(rounded), "f32")
            for reader in constant.output(0).get_target_inputs():
                reader.replace_source_output(halved.output(0))


def _is_added(node: Any) -> bool:
    """Return whether all that a node's values are used for is to be added, at most in another shape."""
    readers = [reader.get_node() for reader in node.output(0).get_target_inputs()]
    return bool(readers) and all(
        reader.get_type_name() == "Add" or (reader.get_type_name() in SHAPING and _is_added(reader))
        for reader in readers
    )


def _write_ours(source: Source, deployment: Deployment, path: Path) -> PreparedFiles:
    """Quantize in torch and export that: OpenVINO finds int8 arithmetic in quantize, dequantize and matmul."""
    quantized = quantize_model(
        source.module,
        recommended(deployment),
        calibration=lambda: calibration_batches(source),
        reduce_range=saturates("openvino"),
    )
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        exported = Path(scratch) / "static.onnx"
        write_graph(quantized.model, exported, spec=source.recipe.input)
        model = _read(exported)
        _halve_constants(model)
        _save(model, path, halve=False)
    _check_computes(path, quantized.model, source)
    rows = tuple(
        QuantizedLayer(name=name, kind=module.kind, dtype=module.dtype, reduce_range=module.reduce_range)
        for name, module in quantized_modules(quantized.model).items()
    )
    return PreparedFiles(quantized=rows, tied={})


def _check_computes(path: Path, quantized: torch.nn.Module, source: Source) -> None:
    """Refuse a graph of which OpenVINO makes something else than it says.

    It does among int8 layers, where in float32 it doesn't: a mean over the last of three dimensions (SwiftFormer's pool), a linear
    layer that reads a BatchNorm of two (LeViT's head). ONNX Runtime computes from both graphs what torch does.
    """
    images = source.calibration[:NUM_COMPARED]
    session = OpenVinoSession(import_openvino().Core(), path, scheme="static", num_threads=None)
    if len(images) < (session.fixed_size or 1):
        return
    given = torch.from_numpy(images[: session.fixed_size or len(images)])
    asked, simulated = logits_of(source.module, given), logits_of(quantized, given)
    found = torch.from_numpy(session.run(given.numpy()))
    lost, differs = relative_distance(simulated, asked), relative_distance(found, simulated)
    if not differs <= max(MOST_APART, TIMES_APART * lost):
        raise QuantizationError(
            f"OpenVINO computes something else than the int8 graph says: its logits are {differs:.2g} from torch's of the same graph, "
            f"which are {lost:.2g} from float32's"
        )


def _write_nncf(source: Source, exported: Path, deployment: Deployment, path: Path) -> PreparedFiles:
    if line := missing_packages(("nncf",), extra="openvino"):
        raise ArtifactError(f"static_nncf is made by NNCF: {line}")
    layers = chosen_layers(source.module, recommended(deployment))
    graph = onnx.load(exported, load_external_data=False)
    every = nodes_of_layers(graph, [name for name, _ in source.module.named_modules()], LAYER_OPS)
    model = _read(exported)
    kept = {node for node, layer in every.items() if layer not in layers}
    quantized = _quantized(model, source.calibration, kept, is_transformer=not is_convnet(graph))
    _halve_constants(quantized)
    _save(quantized, path, halve=False)
    rows = tuple(
        QuantizedLayer(name=name, kind="static", dtype="qint8", reduce_range=saturates("openvino"))
        for name in layers
        if name in every.values()
    )
    return PreparedFiles(quantized=rows, tied={})


def _quantized(model: Any, images: Batch, kept: Collection[str], *, is_transformer: bool) -> Any:
    hide_telemetry()
    with muted("nncf", "torch.utils._pytree"):
        nncf: Any = importlib.import_module("nncf")
        names = [
            name
            for op in model.get_ops()
            if op.get_type_name() in LAYER_TYPES and original(name := op.get_friendly_name()) in kept
        ]
        random_state = torch.get_rng_state()
        try:
            with _theirs("NNCF can't quantize the model"):
                return nncf.quantize(
                    model,
                    nncf.Dataset([{INPUT: image[None]} for image in images]),
                    subset_size=len(images),
                    fast_bias_correction=True,
                    # Products of two neighbours saturate in 16 bits where they aren't added in 32; by default NNCF sees to the first layer alone.
                    advanced_parameters=nncf.AdvancedQuantizationParameters(overflow_fix=nncf.OverflowFix.ENABLE)
                    if saturates("openvino")
                    else None,
                    # Knows attention: leaves softmax and norms in float, and evens out activations (SmoothQuant).
                    model_type=nncf.ModelType.TRANSFORMER if is_transformer else None,
                    ignored_scope=nncf.IgnoredScope(names=names) if names else None,
                )
        finally:
            torch.set_rng_state(random_state)
