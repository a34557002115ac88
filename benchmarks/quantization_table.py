"""Dynamic int8 of a full-size ViT-B/16: ours, the paper's recipe and ONNX Runtime in one race, beside Table 3.

The weights are random, so accuracy isn't measured here. Every method runs in a process of its own, all take turns.
"""

import argparse
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from checks import Check, finish
from onnxruntime.quantization import QuantType, quantize_dynamic
from torch import Tensor, nn
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessorPil

from profiling_agent.artifacts.load import load_module
from profiling_agent.artifacts.save import save_model
from profiling_agent.evaluation.footprint import folder_bytes
from profiling_agent.evaluation.race import Pace, processes, race_until_clear
from profiling_agent.evaluation.scores import Score
from profiling_agent.quantization.quantize import quantize_model, torch_quantize_dynamic
from profiling_agent.records import InputSpec, QuantizationRecommendation
from profiling_agent.runtimes.contender import racer_command
from profiling_agent.runtimes.eager import random_batch
from profiling_agent.runtimes.racer import serve
from profiling_agent.runtimes.turns import Start

SPEC = InputSpec(channels=3, height=224, width=224, source="benchmark")
MAX_SIZE_RATIO, MIN_SPEEDUP = 0.265, 1.5
FP32, OURS, PAPERS, ONNX_FP32, ONNX_INT8 = "eager fp32", "ours, int8", "torch.ao, int8", "ONNX fp32", "ONNX int8"
# Table 3 of arXiv 2509.05584, ViT-B/16 on another machine: memory reduction in percent, seconds before and after.
PAPER_ROWS = (("ONNX", 74.1, 0.3869, 0.2179), ("Ours (the paper's)", 74.2, 0.2320, 0.1316))


@dataclass(frozen=True, slots=True)
class Entry:
    """One method: how its process is started, and the bytes that it needs on disk (None: the recipe saves nothing)."""

    name: str
    command: list[str]
    size_bytes: int | None


class Logits(nn.Module):
    """The model as ONNX export wants it: a tensor in, a tensor out."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixel_values: Tensor) -> Tensor:
        """Return the logits."""
        return self.model(pixel_values=pixel_values).logits


class OnnxSession(nn.Module):
    """An ONNX file that runs like a module."""

    def __init__(self, path: str) -> None:
        super().__init__()
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = torch.get_num_threads()
        self.session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])

    def forward(self, pixel_values: Tensor) -> np.ndarray:
        """Return the logits."""
        return self.session.run(None, {"pixel_values": pixel_values.numpy()})[0]


def open_onnx(path: str, start: Start) -> tuple[nn.Module, Tensor]:
    """Return an ONNX file as a racer wants it."""
    return OnnxSession(path), random_batch(SPEC, start.batch_size)


def open_papers_recipe(folder: str, start: Start) -> tuple[nn.Module, Tensor]:
    """Return the fp32 model with every Linear quantized by torch's default: one scale a layer, 7-bit activations."""
    model = load_module(folder, verify=False)
    names = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    quantized = torch_quantize_dynamic(model, names, "qint8", per_channel=False)
    return quantized, random_batch(SPEC, start.batch_size)


RACERS = {"onnx": open_onnx, "papers": open_papers_recipe}


def own_racer(kind: str, path: Path) -> list[str]:
    """Return the command line that races something that is no artifact of ours."""
    return [sys.executable, __file__, "--racer", kind, str(path)]


def save_ours(model: nn.Module, folder: Path) -> Path:
    """Save an artifact and return its folder."""
    save_model(model, folder, spec=SPEC, processor=ViTImageProcessorPil(), base_model="random ViT-B/16")
    return folder


def export_onnx(model: nn.Module, folder: Path) -> tuple[Path, Path]:
    """Write the model as ONNX, fp32 and dynamically quantized as the paper's peer is (QInt8, MatMul and Gemm)."""
    plain, quantized = folder / "fp32.onnx", folder / "int8.onnx"
    program: Any = torch.onnx.export(
        Logits(model).eval(), (random_batch(SPEC, 1),), input_names=["pixel_values"], dynamo=True, verbose=False
    )
    program.save(plain, external_data=False)
    # The exporter notes shapes that the quantizer's own inference contradicts after it has transposed a weight.
    graph = onnx.load(plain)
    del graph.graph.value_info[:]
    onnx.save(graph, plain)
    quantize_dynamic(plain, quantized, weight_type=QuantType.QInt8, op_types_to_quantize=["MatMul", "Gemm"])
    return plain, quantized


def prepare(root: Path, *, is_quick: bool) -> list[Entry]:
    """Make every model that is to race; the eager fp32 baseline is the first."""
    torch.manual_seed(0)
    model = ViTForImageClassification(ViTConfig(num_labels=1000)).eval()
    print(f"ViT-B/16: {sum(parameter.numel() for parameter in model.parameters()) / 1e6:.2f} M parameters", flush=True)
    everything = QuantizationRecommendation(layer="all", dtype="qint8")
    fp32 = save_ours(model, root / "fp32")
    ours = save_ours(quantize_model(model, [everything]).model, root / "int8")
    entries = [
        Entry(FP32, racer_command(fp32), folder_bytes(fp32)),
        Entry(OURS, racer_command(ours), folder_bytes(ours)),
        Entry(PAPERS, own_racer("papers", fp32), None),
    ]
    if not is_quick:
        for name, path in zip((ONNX_FP32, ONNX_INT8), export_onnx(model, root), strict=True):
            entries.append(Entry(name, own_racer("onnx", path), path.stat().st_size))
    return entries


def run(entries: list[Entry], *, is_quick: bool) -> list[Score]:
    """Let all take turns at batch size 1."""
    start = Start(batch_size=1, device="cpu")
    pace = Pace(seconds_per_turn=0.5, min_rounds=5 if is_quick else 15, max_seconds=20 if is_quick else 90)
    line_up = processes([entry.command for entry in entries], start)
    scores, num_rounds, num_races = race_until_clear(line_up, pace=pace)
    print(f"{num_races} race(s), {num_rounds} rounds\n")
    return scores


def rows_of(entries: list[Entry], scores: list[Score]) -> list[dict[str, Any]]:
    """Return one row per method, sizes and speed-ups relative to eager fp32."""
    baseline_bytes = entries[0].size_bytes or 1
    return [
        {
            "method": entry.name,
            "size_bytes": entry.size_bytes,
            "size_ratio": entry.size_bytes / baseline_bytes if entry.size_bytes else None,
            "latency_ms": float(np.median(result.samples_ms)),
            "speedup": result.speedup,
            "speedup_low": result.low,
            "speedup_high": result.high,
        }
        for entry, result in zip(entries, scores, strict=True)
    ]


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table, and the paper's below it."""
    print(f"{'method':<20}{'MB':>8}{'of fp32':>9}{'ms':>8}{'speed-up':>10}  95% interval")
    for row in rows:
        size = f"{row['size_bytes'] / 1e6:8.1f}{row['size_ratio']:>9.1%}" if row["size_bytes"] else f"{'-':>8}{'-':>9}"
        interval = f"{row['speedup_low']:.2f} to {row['speedup_high']:.2f}"
        print(f"{row['method']:<20}{size}{row['latency_ms']:>8.1f}{row['speedup']:>9.2f}x  {interval}")
    print("\npaper, Table 3 (AMD EPYC 7763, no VNNI, torch 2.6):")
    for name, reduction, before, after in PAPER_ROWS:
        print(f"{name:<20}{'':>8}{1 - reduction / 100:>9.1%}{after * 1e3:>8.1f}{before / after:>9.2f}x")
    print()


def main() -> int:
    """Run the benchmark, or one of its racers."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="few rounds, no ONNX")
    parser.add_argument("--json", type=Path, help="write checks and rows to this file")
    parser.add_argument("--racer", nargs=2, metavar=("KIND", "PATH"), help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.racer:
        kind, path = arguments.racer
        serve(lambda start: RACERS[kind](path, start))
    with tempfile.TemporaryDirectory() as root:
        entries = prepare(Path(root), is_quick=arguments.quick)
        rows = rows_of(entries, run(entries, is_quick=arguments.quick))
    show(rows)
    ours = next(row for row in rows if row["method"] == OURS)
    checks = [
        Check.at_most("size on disk, int8 over fp32", ours["size_ratio"], MAX_SIZE_RATIO),
        Check.at_least("speed-up over eager fp32, lower 95% bound", ours["speedup_low"], MIN_SPEEDUP),
    ]
    return finish(checks, rows, arguments.json)


if __name__ == "__main__":
    sys.exit(main())
