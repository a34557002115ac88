"""How a run's cost grows: in passes, with twice the units, images, plans and deployments.

    python benchmarks/growth.py [--json FILE]

A ViT of six blocks at 64 px, fitted as the full-size models are (fitted.py), in OpenVINO, with 512 search images and one plan; then with twelve blocks,
with 1,024 images, with two plans, and with ONNX Runtime's deployments too. A pass of the deeper model takes twice as long: in passes, twice the units
should cost what evidence on more units does and nothing else.
"""

import argparse
import tempfile
from pathlib import Path
from typing import Any

import torch
from checks import Check, finish, stamped, use_own_ledger
from fitted import FOLDER, SHARED, fitted
from torch import nn
from transformers import ViTConfig, ViTForImageClassification

from profiling_agent import Request, optimize

SIDE, BLOCKS = 64, {"six": 6, "twelve": 12}
BASE: dict[str, Any] = {"num_samples": 512, "max_iterations": 1, "runtimes": "openvino"}
DOUBLED: dict[str, dict[str, Any]] = {
    "units": {},
    "images": {"num_samples": 1024},
    "plans": {"max_iterations": 2},
    "deployments": {"runtimes": "openvino,onnxruntime"},
}
# Twice of anything costs at most twice as much, and what two runs of one request differ by.
MAX_GROWTH = 2.2


def make(name: str) -> nn.Module:
    """Return a ViT of as many blocks, the same weights on each call."""
    torch.manual_seed(0)
    config = ViTConfig(
        image_size=SIDE,
        patch_size=8,
        hidden_size=192,
        intermediate_size=768,
        num_attention_heads=3,
        num_hidden_layers=BLOCKS[name],
    )
    return ViTForImageClassification(config).eval()


def run(what: str, name: str, asked: dict[str, Any], output: str) -> dict[str, Any]:
    """Return what a run cost, and print it."""
    model = fitted(name, FOLDER / "growth", make=make, side=SIDE)
    report = optimize(
        Request(
            model=str(model),
            dataset=str(SHARED / "data" / "cifar10"),
            output=output,
            batch_size=8,
            cache=False,
            **asked,
        )
    )
    seconds = sum(row.seconds for row in report.times)
    passes = {row.kind: row.passes for row in report.times}
    search = report.deployment_search
    row = {
        "doubled": what,
        "units": len(report.sensitivity),
        "search images": report.acquired.search.num_images,
        "attempts": len(report.attempts),
        "deployments": len(search.options) if search else 0,
        "seconds": seconds,
        "passes": sum(passes.values()),
        "of kinds": passes,
    }
    told = {key: value for key, value in row.items() if key != "of kinds"}
    print(told, {kind: round(number) for kind, number in passes.items()}, flush=True)
    return stamped(row)


def main() -> int:
    """Run, print, and return 1 where something grows faster than it should."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    use_own_ledger()
    with tempfile.TemporaryDirectory() as scratch:
        rows = [run("nothing", "six", BASE, scratch)]
        for what, more in DOUBLED.items():
            rows.append(run(what, "twelve" if what == "units" else "six", BASE | more, scratch))
    base = rows[0]
    checks = [
        Check.at_most(
            f"passes with twice the {row['doubled']}, times those of the first",
            row["passes"] / base["passes"],
            MAX_GROWTH,
        )
        for row in rows[1:]
    ]
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
