"""Models that people have, at full size: each goes from the request to the verdict within a time budget.

    python benchmarks/popular.py [--models NAME ...] [--time-budget 20m] [--json FILE] [--output DIR]

A random body and a classifier fitted to its features of CIFAR-10 at 224 px (fitted.py): real cost, and answers that mean something; all runtimes that are
installed, batch 8, the default contract. Without --time-budget each has the one that stands beside it here. Rows are added to FILE as they come, in place of older ones of
the same model. A deployment counts as missed where it was refused and its runtime can do it: where the family's tiny model has it, whole, in
benchmarks/results/support.json.
"""

import argparse
import json
import os
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from checks import Check, finish, stamped, use_own_ledger
from fitted import FOLDER, SHARED, fitted
from full_run import OVER, Peak, told
from torch import Tensor, nn
from transformers import (
    BeitConfig,
    BeitForImageClassification,
    ConvNextConfig,
    ConvNextForImageClassification,
    DeiTConfig,
    DeiTForImageClassification,
    Dinov2Config,
    Dinov2ForImageClassification,
    EfficientNetConfig,
    EfficientNetForImageClassification,
    MobileNetV2Config,
    MobileNetV2ForImageClassification,
    MobileViTConfig,
    MobileViTForImageClassification,
    PvtConfig,
    PvtForImageClassification,
    RegNetConfig,
    RegNetForImageClassification,
    ResNetConfig,
    ResNetForImageClassification,
    SegformerConfig,
    SegformerForImageClassification,
    SwinConfig,
    SwinForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from profiling_agent import Request, optimize
from profiling_agent.errors import ProfilingAgentError
from profiling_agent.lib.io import CACHE_VARIABLE
from profiling_agent.reporting.report import RunReport
from profiling_agent.schemas import DeploymentOption

SUPPORT = Path(__file__).resolve().parent / "results" / "support.json"
# What is left out is no miss, and neither is what was made and lost too much accuracy: the runtime can do it.
MISSED = ("could not be made", "could not be run", "dropped out")
# Of noise, which norms of convolutions are estimated on.
NUM_NOISE, SIDE = 32, 224
# Of the 1,000 images of a classifier: one that is surer than it is right loses to rounding what no trained one does.
NUM_JUDGED = 300


@dataclass(frozen=True)
class Popular:
    """A model of `family` (the tiny one of benchmarks/support.py), as its checkpoints are configured, and the time that its run is given."""

    build: Callable[[], nn.Module]
    family: str
    budget: str


SMALL_HEADS: Mapping[str, Any] = {"hidden_size": 384, "num_attention_heads": 6}
REGNET_Y_400MF = RegNetConfig(
    layer_type="y", depths=[1, 3, 6, 6], hidden_sizes=[48, 104, 208, 440], groups_width=8, embedding_size=32
)
MODELS: Mapping[str, Popular] = {
    "ViT-B/16": Popular(lambda: ViTForImageClassification(ViTConfig()), "vit", "20m"),
    "DeiT-S": Popular(
        lambda: DeiTForImageClassification(DeiTConfig(intermediate_size=1536, **SMALL_HEADS)), "deit", "10m"
    ),
    "BEiT-B": Popular(
        lambda: BeitForImageClassification(BeitConfig(use_relative_position_bias=True, use_mask_token=False)),
        "beit",
        "20m",
    ),
    # 14 px patches of 224, as people run it; its positions are for 518 px.
    "DINOv2-S": Popular(
        lambda: Dinov2ForImageClassification(Dinov2Config(patch_size=14, image_size=518, **SMALL_HEADS)),
        "dinov2",
        "10m",
    ),
    "Swin-T": Popular(lambda: SwinForImageClassification(SwinConfig()), "swin", "10m"),
    # Trained layer scales are about 0.1; at 1e-6, what they start with, every block could go.
    "ConvNeXt-T": Popular(
        lambda: ConvNextForImageClassification(ConvNextConfig(layer_scale_init_value=0.1)), "convnext", "10m"
    ),
    "ResNet-50": Popular(lambda: ResNetForImageClassification(ResNetConfig()), "resnet_bottleneck", "10m"),
    "RegNetY-400MF": Popular(lambda: RegNetForImageClassification(REGNET_Y_400MF), "regnet_y", "6m"),
    # The configuration's own defaults are B7.
    "EfficientNet-B0": Popular(
        lambda: EfficientNetForImageClassification(
            EfficientNetConfig(
                image_size=224, width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, dropout_rate=0.2
            )
        ),
        "efficientnet",
        "6m",
    ),
    "MobileNetV2": Popular(lambda: MobileNetV2ForImageClassification(MobileNetV2Config()), "mobilenet_v2", "6m"),
    "MobileViT-S": Popular(
        lambda: MobileViTForImageClassification(MobileViTConfig(image_size=224)), "mobilevit", "10m"
    ),
    "SegFormer-B0": Popular(lambda: SegformerForImageClassification(SegformerConfig()), "segformer", "6m"),
    "PVT-T": Popular(lambda: PvtForImageClassification(PvtConfig()), "pvt", "10m"),
}


def built(name: str) -> nn.Module:
    """Return the model in eval mode, its batch norms as they are after seeing noise: untrained ones let signals die out in so deep a network.

    So do weights as small as some configurations draw them, EfficientNet's of norms among them: beside a norm's epsilon their variance is nothing.
    """
    torch.manual_seed(0)
    model = MODELS[name].build().eval()
    norms = [layer for layer in model.modules() if isinstance(layer, nn.BatchNorm2d)]
    for layer in model.modules() if norms else ():
        if isinstance(layer, nn.Conv2d):
            nn.init.kaiming_normal_(layer.weight, mode="fan_in")
    for norm in norms:
        nn.init.ones_(norm.weight)
        norm.momentum = None
        norm.train()
    if norms:
        with torch.no_grad():
            model(pixel_values=_noise())
    return model.eval()


def _noise() -> Tensor:
    return torch.randn(NUM_NOISE, 3, SIDE, SIDE, generator=torch.Generator().manual_seed(1))


def can_do(family: str) -> set[tuple[str, str]]:
    """Return runtime and scheme of what the family's tiny model is deployed in, unpruned."""
    rows = json.loads(SUPPORT.read_text(encoding="utf-8"))["rows"]
    (row,) = [row for row in rows if row["family"] == family]
    return {
        (each["runtime"], each["scheme"])
        for each in row["deployable"]
        if each["form"] == "whole" and not each["refused"]
    }


def missed(options: Sequence[DeploymentOption], family: str) -> list[str]:
    """Return the deployments that failed, each with why, where the family's tiny model has them."""
    able = can_do(family)
    return [
        f"{option.deployment.name}: {option.reason}"
        for option in options
        if any(said in option.reason for said in MISSED)
        and (option.deployment.runtime, option.deployment.scheme) in able
    ]


def row_of(name: str, report: RunReport, seconds: float, peak: Peak) -> dict[str, Any]:
    """Print what came of a run, and return its row."""
    search = report.deployment_search
    options = search.options if search else ()
    row = told(name, report, seconds, peak) | {
        "refused": [f"{option.deployment.name}: {option.reason}" for option in options if option.race_result is None],
        "missed": missed(options, MODELS[name].family),
    }
    for line in row["refused"]:
        print(f"  {line}", flush=True)
    return row


def run(name: str, budget: str, output: str) -> dict[str, Any]:
    """Return the row of a run; of one that crashed, why."""
    model = fitted(name, FOLDER / "popular", make=built, num_judged=NUM_JUDGED)
    cifar = str(SHARED / "data" / "cifar10")
    request = Request(model=str(model), dataset=cifar, batch_size=8, time_budget=budget, output=output)
    started, peak = time.monotonic(), Peak()
    try:
        with peak.watched():
            report = optimize(request)
    except ProfilingAgentError as error:
        print(f"\n{name}: {error}", flush=True)
        return {"model": name, "budget": budget, "crashed": str(error), "seconds": time.monotonic() - started}
    except Exception as error:  # noqa: BLE001 - whatever ends a run is what this looks for
        traceback.print_exc()
        return {"model": name, "budget": budget, "crashed": repr(error), "seconds": time.monotonic() - started}
    return row_of(name, report, time.monotonic() - started, peak)


def checks_of(row: Mapping[str, Any]) -> list[Check]:
    """Return what must hold: no crash, in time, and no deployment missed."""
    name, minutes = row["model"], float(row["budget"].removesuffix("m"))
    checks = [Check.at_most(f"{name}: crashes", float("crashed" in row), 0.0)]
    if "crashed" in row:
        return checks
    return [
        *checks,
        Check.at_most(f"{name}: minutes", row["seconds"] / 60, OVER * minutes),
        Check.at_most(f"{name}: deployments missed", float(len(row["missed"])), 0.0),
    ]


def rows_in(path: Path | None) -> dict[str, dict[str, Any]]:
    """Return the rows that a file holds, by model."""
    if path is None or not path.exists():
        return {}
    return {row["model"]: row for row in json.loads(path.read_text(encoding="utf-8"))["rows"]}


def main() -> int:
    """Run, print, and return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--time-budget", help="in minutes, such as 20m; the same for each")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--output", help="keep the run folders here")
    asked = parser.parse_args()
    use_own_ledger()
    rows = rows_in(asked.json)
    status = 0
    with tempfile.TemporaryDirectory() as scratch, tempfile.TemporaryDirectory() as fresh:
        for name in asked.models:
            # What every user's first run pays for.
            os.environ[CACHE_VARIABLE] = str(Path(fresh) / name.replace("/", "-"))
            rows[name] = stamped(run(name, asked.time_budget or MODELS[name].budget, asked.output or scratch))
            ordered = [rows[each] for each in MODELS if each in rows]
            status = finish([check for row in ordered for check in checks_of(row)], ordered, asked.json)
    return status


if __name__ == "__main__":
    raise SystemExit(main())
