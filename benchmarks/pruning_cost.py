"""Cost of pruning: at full size seconds to find units and to cut them, and memory; on trained models the evidence.

    python benchmarks/pruning_cost.py [--models NAME…] [--trained DIR…] [--data DIR] [--quick] [--json FILE]

Times are of the paper's four models with random weights, one after the other. Memory is measured in a process of its
own for each: the peak while it finds units, cuts the widest one by a quarter and compensates for that, less what was
resident before the model was there. Evidence (T0 and T1: moments, criteria, the KL of every unit at four widths) is
gathered on 256 images of the train split; the latency table, timed once for each machine, isn't part of it.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from checks import SHARED, TRAINED, Check, finish, parser_of
from full_size import MODELS, SPEC, build, cuts_for_macs, macs_by_module
from torch import Tensor, nn
from tradeoff_subject import Draw, Subject
from transformers import AutoImageProcessor, AutoModelForImageClassification

from profiling_agent.lib.machine import peak_memory_bytes
from profiling_agent.lib.modules import pin_threads, random_batch
from profiling_agent.profiling.evidence import measure_sensitivity
from profiling_agent.pruning.compensation import compensate
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.schemas import Cut, Unit

MAX_FIND_S = MAX_CUT_S = 10.0
MAX_EVIDENCE_S = 60.0
SHARE = 0.25
# The unpruned model, the pruned one, a candidate of it, and one for all else: activations and copies of single weights.
NUM_COPIES = 4
# As few as compensation takes, in batches that add little to what is measured.
NUM_IMAGES, BATCH = 128, 4


def seconds(name: str) -> dict[str, float]:
    """Return how long it takes to find a model's units, and to cut and check them all."""
    model = build(name)
    macs = macs_by_module(model)
    started = time.perf_counter()
    units = find_units(model, SPEC, macs).units
    found = time.perf_counter()
    cuts = cuts_for_macs(model, units, macs, SHARE)
    planned = time.perf_counter()
    prune_model(model, cuts, spec=SPEC)
    return {"find_s": found - started, "cut_s": time.perf_counter() - planned, "num_units": len(units)}


def columns_read(model: nn.Module, unit: Unit) -> int:
    """Return how many columns the unit's consumer reads of it: the side of its Gram matrix."""
    return model.get_submodule(unit.consumer).get_parameter("weight")[0].numel()


def calibration() -> Iterator[tuple[Tensor, Tensor]]:
    """Yield images batch by batch, as a run reads them."""
    for seed in range(NUM_IMAGES // BATCH):
        yield random_batch(SPEC, BATCH, seed=seed), torch.zeros(BATCH, dtype=torch.int64)


def memory(name: str) -> dict[str, int]:
    """Return the peak of this process while it prunes, beyond what was resident before, and the bytes it is made of."""
    before = peak_memory_bytes()
    model = build(name)
    units = find_units(model, SPEC, {}).units
    widest = max(units, key=lambda unit: columns_read(model, unit))
    cuts = [Cut(unit=widest, keep=snap(widest, SHARE), requested_ratio=SHARE)]
    pruned = prune_model(model, cuts, spec=SPEC)
    compensate(model, pruned.model, cuts, pruned.keep, calibration)
    return {
        "peak_bytes": peak_memory_bytes() - before,
        "model_bytes": sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values()),
        "gram_bytes": 8 * columns_read(model, widest) ** 2,
    }


def memory_of_fresh_process(name: str) -> dict[str, int]:
    """Return what `memory` measures where nothing else has been."""
    command = [sys.executable, __file__, "--memory-of", name]
    said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(said.splitlines()[-1])


def evidence(folder: Path, data: Path) -> dict[str, Any]:
    """Return how long the evidence on a trained model takes, once its images are read."""
    name = folder.name.removesuffix("-cifar10")
    model: Any = AutoModelForImageClassification.from_pretrained(folder, use_safetensors=True)
    subject = Subject(name, model.eval(), AutoImageProcessor.from_pretrained(folder, backend="pil"), data)
    draw, units = Draw(subject, 0), subject.units
    assert len(draw.images[0]), "they are read before the time is taken"
    found = measure_sensitivity(model, units, draw.batches)
    return {"model": name, "evidence_s": found.seconds, "num_units": len(units), "num_images": found.num_images}


def checks_of(row: dict[str, Any]) -> list[Check]:
    """Return what must hold for one model."""
    name = row["model"]
    if "evidence_s" in row:
        return [Check.at_most(f"{name}: seconds of evidence (T0 and T1)", row["evidence_s"], MAX_EVIDENCE_S)]
    checks = [
        Check.at_most(f"{name}: seconds to find {row['num_units']} units", row["find_s"], MAX_FIND_S),
        Check.at_most(f"{name}: seconds to cut and check them", row["cut_s"], MAX_CUT_S),
    ]
    if "peak_bytes" in row:
        bound = NUM_COPIES * row["model_bytes"] + row["gram_bytes"]
        checks.append(Check.at_most(f"{name}: peak memory, bytes", row["peak_bytes"], bound))
    return checks


def main() -> int:
    """Run every model; return 1 where a check does not hold."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument(
        "--trained", nargs="*", type=Path, default=[SHARED / "models" / f"{name}-cifar10" for name in TRAINED]
    )
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "cifar10")
    parser.add_argument("--quick", action="store_true", help="times alone")
    parser.add_argument("--memory-of", choices=tuple(MODELS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    pin_threads()
    if asked.memory_of:
        print(json.dumps(memory(asked.memory_of)))
        return 0
    rows = []
    for measured in (*asked.models, *(folder for folder in asked.trained if folder.exists())):
        if isinstance(measured, Path):
            rows.append(evidence(measured, asked.data))
        else:
            used = {} if asked.quick else memory_of_fresh_process(measured)
            rows.append({"model": measured, **seconds(measured), **used})
        print(
            "  ".join(f"{key} {value if isinstance(value, str) else f'{value:.6g}'}" for key, value in rows[-1].items())
        )
    return finish([check for row in rows for check in checks_of(row)], rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
