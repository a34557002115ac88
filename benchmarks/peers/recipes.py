"""Int8 as others make it: what an engineer writes for each tool, after an export and with the pixels of calibration images.

python benchmarks/peers/recipes.py NAME SUBJECT OUTPUT BATCH_SIZE [transformer]

SUBJECT is a folder that `subject.py` wrote; OUTPUT holds the deployed model afterwards, and nothing else. Every library is imported in its
recipe: each runs in the environment of its tool.
"""

import inspect
import shutil
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class Given:
    """What a recipe starts from: exports in `folder`, calibration pixels in whole batches, and their labels."""

    folder: Path
    output: Path
    batches: list[Any]
    labels: list[Any]
    is_transformer: bool


def nncf(given: Given) -> None:
    """Quantize with NNCF for OpenVINO."""
    import nncf
    import openvino

    graph = openvino.convert_model(given.folder / "float32.onnx")
    kind = nncf.ModelType.TRANSFORMER if given.is_transformer else None
    quantized = nncf.quantize(graph, nncf.Dataset(given.batches), subset_size=len(given.batches), model_type=kind)
    openvino.save_model(quantized, given.output / "model.xml")


def onnxruntime_static(given: Given) -> None:
    """Quantize with ONNX Runtime to pairs of quantize and dequantize, a scale for each channel."""
    from onnxruntime.quantization import CalibrationDataReader, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    class Reader(CalibrationDataReader):
        def __init__(self) -> None:
            self.feeds = iter([{"pixel_values": batch} for batch in given.batches])

        def get_next(self) -> Any:
            return next(self.feeds, None)

    with tempfile.TemporaryDirectory() as scratch:
        quant_pre_process(given.folder / "float32.onnx", f"{scratch}/prepared.onnx")
        quantize_static(f"{scratch}/prepared.onnx", given.output / "model.onnx", Reader(), per_channel=True)


def onnxruntime_dynamic(given: Given) -> None:
    """Quantize with ONNX Runtime, activations as they come."""
    from onnxruntime.quantization import QuantType, quantize_dynamic

    # Its integer convolution takes unsigned weights only.
    kind = QuantType.QInt8 if given.is_transformer else QuantType.QUInt8
    quantize_dynamic(given.folder / "float32.onnx", given.output / "model.onnx", weight_type=kind)


def torchao_pt2e(given: Given) -> None:
    """Quantize with torchao for torch.compile on x86."""
    import torch
    import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer as x86
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    model = torch.export.load(given.folder / "float32.pt2").module(check_guards=False)
    quantizer = x86.X86InductorQuantizer().set_global(x86.get_default_x86_inductor_quantization_config())
    batches = [torch.from_numpy(batch) for batch in given.batches]
    with torch.no_grad():
        prepared = prepare_pt2e(model, quantizer)
        for batch in batches:
            prepared(batch)
        torch.export.save(torch.export.export(convert_pt2e(prepared), (batches[0],)), given.output / "model.pt2")


def neural_compressor(given: Given) -> None:
    """Quantize with Intel Neural Compressor for torch.compile."""
    import torch
    from neural_compressor.torch.quantization import StaticQuantConfig, convert, prepare  # pyright: ignore[reportMissingImports]

    model: Any = torch.export.load(given.folder / "float32.pt2").module(check_guards=False)
    model._exported, model.dynamic_shapes = True, None
    batches = [torch.from_numpy(batch) for batch in given.batches]
    with torch.no_grad():
        prepared = prepare(model, StaticQuantConfig())
        for batch in batches:
            prepared(batch)
        torch.export.save(torch.export.export(convert(prepared), (batches[0],)), given.output / "model.pt2")


def olive(given: Given) -> None:
    """Search with Olive among static and dynamic int8, by accuracy and latency on the calibration images."""
    from olive.data.registry import Registry  # pyright: ignore[reportMissingImports]
    from olive.workflows import run  # pyright: ignore[reportMissingImports]

    pairs = [
        ({"pixel_values": image}, label)
        for batch, labels in zip(given.batches, given.labels, strict=True)
        for image, label in zip(batch, labels, strict=True)
    ]
    Registry.register_dataset("pixels")(lambda **_: pairs)
    Registry.register_post_process("argmax")(lambda logits, **_: logits.argmax(-1))
    accuracy = {"name": "accuracy_score", "priority": 2, "goal": {"type": "max-degradation", "value": 0.01}}
    accuracy["metric_config"] = {"task": "multiclass", "num_classes": int(max(map(max, given.labels))) + 1}
    latency = {"name": "avg", "priority": 1, "goal": {"type": "percent-min-improvement", "value": 0.1}}
    with tempfile.TemporaryDirectory() as scratch:
        data = {
            "name": "images",
            "type": "DataContainer",
            "load_dataset_config": {"type": "pixels"},
            "post_process_data_config": {"type": "argmax"},
            "dataloader_config": {"batch_size": len(given.batches[0])},
        }
        metrics = [
            {"name": "accuracy", "type": "accuracy", "data_config": "images", "sub_types": [accuracy]},
            {"name": "latency", "type": "latency", "data_config": "images", "sub_types": [latency]},
        ]
        quantization = {"type": "OnnxQuantization", "data_config": "images", "precision": "int8", "reduce_range": False}
        static = {
            "quant_format": "QDQ",
            "activation_type": "int8",
            "calibrate_method": "MinMax",
            "quant_preprocess": True,
        }
        searched = {"quant_mode": ["static", "dynamic"], "per_channel": [False, True]}
        found = run(
            {
                "input_model": {"type": "ONNXModel", "model_path": str(given.folder / "float32.onnx")},
                "data_configs": [data],
                "evaluators": {"both": {"metrics": metrics}},
                "evaluator": "both",
                "passes": {"int8": quantization | static | searched},
                "search_strategy": {"execution_order": "joint", "sampler": "sequential"},
                "output_dir": f"{scratch}/output",
                "cache_dir": f"{scratch}/cache",
            }
        )
        shutil.copy(found.get_best_candidate().model_path, given.output / "model.onnx")


RECIPES: dict[str, Callable[[Given], None]] = {
    "NNCF": nncf,
    "ONNX Runtime static": onnxruntime_static,
    "ONNX Runtime dynamic": onnxruntime_dynamic,
    "torchao PT2E": torchao_pt2e,
    "Olive": olive,
    "Intel Neural Compressor": neural_compressor,
}


def num_lines(recipe: Callable[[Given], None]) -> int:
    """Return the lines of a recipe's body that aren't its docstring, empty or comments."""
    _, _, body = inspect.getsource(recipe).partition('"""')[2].partition('"""')
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in body.splitlines())


def main(name: str, subject: str, output: str, batch_size: str, *transformer: str) -> None:
    """Make one deployed model."""
    folder, size = Path(subject), int(batch_size)
    pixels, labels = (np.load(folder / f"calibration{kind}.npy") for kind in ("", "_labels"))
    whole = range(0, len(pixels) - size + 1, size)
    batches, classes = ([array[start : start + size] for start in whole] for array in (pixels, labels))
    RECIPES[name](Given(folder, Path(output), batches, classes, bool(transformer)))


if __name__ == "__main__":
    main(*sys.argv[1:])
