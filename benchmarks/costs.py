"""Costs of the graph, of a profile and of pruning, apart from the measurements of a run.

    python benchmarks/costs.py graph|profile|pruning [--models NAME...] [--trained DIR...] [--data DIR] [--quick] [--json FILE]

graph: a default run is made once. Then its checkpoints are removed and it is driven again: every job answers from the run folder, so what is left is
the graph's own work and the little that stages do next to their jobs, an upper bound of it.

profile: seconds of a profile of a ViT-B/16 with random weights.

pruning: at full size seconds to find units and to cut them, and memory; on trained models the evidence. Times are of the paper's four models with random
weights, one after the other. Memory is measured in a process of its own for each: the peak while it finds units, cuts the widest one by a quarter and
compensates for that, less what was resident before the model was there. Evidence (moments, criteria, the KL of every unit at four widths) is gathered on
256 images of the train split; the latency table, timed once for each machine, isn't part of it.
"""

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from checks import SHARED, TRAINED, Check, finish, parser_of, use_own_ledger
from full_size import MODELS, SPEC, build, cuts_for_macs, macs_by_module
from torch import Tensor, nn
from tradeoff_subject import Draw, Subject
from transformers import AutoImageProcessor, AutoModelForImageClassification

from profiling_agent import Request, optimize, resume
from profiling_agent.lib.machine import peak_memory_bytes
from profiling_agent.lib.modules import pin_threads, random_batch
from profiling_agent.measure.worker import measure_headline
from profiling_agent.profiling.evidence import measure_sensitivity
from profiling_agent.profiling.profile import profile_model
from profiling_agent.pruning.compensation import compensate
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.torch_session import TorchSession
from profiling_agent.schemas import Cut, Unit
from profiling_agent.workspace import Workspace

# Of a default run.
MAX_SHARE, MAX_CHECKPOINT_BYTES = 0.01, 5_000_000
MAX_PROFILE_S = 90.0
MAX_FIND_S = MAX_CUT_S = 10.0
MAX_EVIDENCE_S = 60.0
SHARE = 0.25
# The unpruned model, the pruned one, a candidate of it, and one for all else: activations and copies of single weights.
NUM_COPIES = 4
# As few as compensation takes, in batches that add little to what is measured.
NUM_IMAGES, BATCH = 128, 4

Measured = tuple[list[dict[str, Any]], list[Check]]


def graph(given: argparse.Namespace) -> Measured:
    """Run, replay and compare; with `--quick` two iterations."""
    use_own_ledger()
    with tempfile.TemporaryDirectory() as output:
        request = Request(output=output, run_id="default", max_iterations=2 if given.quick else 5)
        started = time.perf_counter()
        optimize(request)
        run_s = time.perf_counter() - started
        workspace = Workspace(Path(output) / "default")
        checkpoint_bytes = workspace.checkpoints.stat().st_size
        jobs_before = {job.name for job in workspace.jobs.iterdir()}
        for leftover in workspace.root.glob("checkpoints.sqlite*"):
            leftover.unlink()
        started = time.perf_counter()
        resume(workspace.root)
        replay_s = time.perf_counter() - started
        num_repeated = len({job.name for job in workspace.jobs.iterdir()} - jobs_before)
    checks = [
        Check.at_most("the graph's share of a default run", replay_s / run_s, MAX_SHARE),
        Check.at_most("bytes of checkpoints", checkpoint_bytes, MAX_CHECKPOINT_BYTES),
        Check.at_most("jobs done again in the replay", num_repeated, 0),
    ]
    return [{"run_s": run_s, "replay_s": replay_s, "checkpoint_bytes": checkpoint_bytes}], checks


def profile(given: argparse.Namespace) -> Measured:
    """Profile at batch 1 and 32, with `--quick` at batch 1."""
    rows = [profiled(batch_size) for batch_size in ((1,) if given.quick else (1, 32))]
    return rows, [Check.at_most(f"seconds, batch {row['batch_size']}", row["seconds"], MAX_PROFILE_S) for row in rows]


def profiled(batch_size: int) -> dict[str, Any]:
    """Profile the model, headline included, and return the table's row."""
    model = build("ViT-B/16")
    started = time.perf_counter()
    headline = measure_headline(TorchSession(model, device="cpu"), SPEC, batch_size=batch_size)
    with tempfile.TemporaryDirectory() as folder:
        trace = Path(folder) / "trace.json.gz"
        known: dict[str, Any] = {"headline": headline, "size_bytes": 0, "architecture": "vit"}
        profile = profile_model(model, SPEC, batch_size=batch_size, trace_path=trace, **known)
        trace_bytes = trace.stat().st_size
    return {
        "batch_size": batch_size,
        "seconds": time.perf_counter() - started,
        "latency_ms": headline.latency.median_ms,
        "num_layers": len(profile.layers),
        "num_operators": len(profile.operators),
        "trace_bytes": trace_bytes,
        "profile_bytes": len(profile.model_dump_json()),
    }


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
    """Return what `memory` measures in a process of its own."""
    command = [sys.executable, __file__, "pruning", "--memory-of", name]
    stdout = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
    return json.loads(stdout.splitlines()[-1])


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


def pruning(given: argparse.Namespace) -> Measured:
    """Measure every model; with `--quick` times only."""
    rows: list[dict[str, Any]] = []
    for name in given.models:
        used = {} if given.quick else memory_of_fresh_process(name)
        rows.append({"model": name, **seconds(name), **used})
    rows += [evidence(folder, given.data) for folder in given.trained if folder.exists()]
    return rows, [check for row in rows for check in checks_of(row)]


PARTS = {"graph": graph, "profile": profile, "pruning": pruning}


def main() -> int:
    """Measure one part; return 1 if a check does not hold."""
    parser = parser_of(__doc__)
    parser.add_argument("part", choices=tuple(PARTS))
    parser.add_argument("--models", nargs="*", choices=tuple(MODELS), default=list(MODELS), metavar="NAME")
    parser.add_argument(
        "--trained", nargs="*", type=Path, default=[SHARED / "models" / f"{name}-cifar10" for name in TRAINED]
    )
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "cifar10")
    parser.add_argument("--quick", action="store_true", help="less of it")
    parser.add_argument("--memory-of", choices=tuple(MODELS), help=argparse.SUPPRESS)
    given = parser.parse_args()
    pin_threads()
    if given.memory_of:
        print(json.dumps(memory(given.memory_of)))
        return 0
    rows, checks = PARTS[given.part](given)
    for row in rows:
        print("  ".join(f"{key} {value if isinstance(value, str) else f'{value:.6g}'}" for key, value in row.items()))
    return finish(checks, rows, given.json)


if __name__ == "__main__":
    raise SystemExit(main())
