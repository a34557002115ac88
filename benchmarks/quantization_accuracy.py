"""Accuracy that every int8 deployment costs, on all test images of CIFAR-10.

    python benchmarks/quantization_accuracy.py [--models DIR...] [--data DIR] [--quick] [--json FILE]

Each model is brought into every deployment by the product's own jobs: tuned, calibrated on images of the train split,
converted. Choices are made on 2,000 search images of the test split (the fastest deployment, by a race at batch 32, that loses
no more than `FLOOR` there) and reported on the other 8,000, with paired 95% intervals. The paper's Table 3 reports 0 to 1
point lost for dynamic int8 on ImageNet-1K.
"""

import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from checks import TRAINED, Check, Estimate, finish, parser_of, stamped
from numpy.typing import NDArray
from workshop import Made, Workshop, deployments

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.jobs.tasks import AcquireTask, EvaluateTask, RaceTask, ResolveShapeTask
from profiling_agent.measure.intervals import paired_drop, read_predictions
from profiling_agent.schemas import SHARD, AccuracyDrop, Acquired, ArtifactRef, Deployment, SplitInfo
from profiling_agent.search.deployments import INT8

BATCH_SIZE = 32
# Top-1 that may be lost on search images by what is chosen.
FLOOR = 0.003
# Points that the choice may lose on the others, its interval's end included, which is 0.2 to 0.3 above what 8,000 tell.
MAX_LOST = 0.6
QUICK = ("eager dynamic", "openvino static")
Right = NDArray[np.bool_]


@dataclass(frozen=True)
class Exam:
    """One model's images, and its answers in float32."""

    shop: Workshop
    acquired: Acquired
    baseline: ArtifactRef
    images: range | None = None

    @property
    def splits(self) -> tuple[SplitInfo, SplitInfo]:
        """Return the images that choices are made on, and those that are reported."""
        return self.acquired.search, self.acquired.heldout

    def answers(self, model: ArtifactRef, deployment: Deployment) -> tuple[Right, Right]:
        """Return which images of each split `model` gets right."""
        found: list[Right] = []
        for split in self.splits:
            known: dict[str, Any] = {
                "batch_size": BATCH_SIZE,
                "device": "cpu",
                "isolated": deployment.runtime != "eager",
            }
            shards = split.shards(self.images)
            tasks = [EvaluateTask(model=model, split=split, shard=shard, **known) for shard in shards]
            files = [shard.predictions.files[0] for shard in self.shop.jobs.run_each(tasks)]
            found.append(np.concatenate([read_predictions(self.shop.root / file.path).right for file in files]))
        return found[0], found[1]


def sit(shop: Workshop, model: Path, data: Path, *, is_quick: bool) -> Exam:
    """Draw the images and save the model."""
    asked = shop.jobs.run(AcquireTask(model=str(model), dataset=str(data), device="cpu"))
    resolved = shop.jobs.run(ResolveShapeTask(model=str(model), device="cpu"))
    return Exam(shop, asked, resolved.baseline, images=range(SHARD) if is_quick else None)


def drops(base: tuple[Right, Right], own: tuple[Right, Right]) -> dict[str, Any]:
    """Return the drop on search images, on the others, and on all."""
    whole = paired_drop(np.concatenate(base), np.concatenate(own))
    return {
        "top1": float(np.concatenate(own).mean()),
        "all": _triple(whole),
        "search": _triple(paired_drop(base[0], own[0])),
        "heldout": _triple(paired_drop(base[1], own[1])),
        "p_value": whole.p_value,
        "num_images": whole.num_images,
    }


def _triple(drop: AccuracyDrop) -> list[float]:
    return [drop.drop, drop.low, drop.high]


def grade(exam: Exam, name: str, made: Made, base: tuple[Right, Right]) -> dict[str, Any] | None:
    """Return a deployment's line, None where it can't be run."""
    assert made.deployed is not None
    try:
        own = exam.answers(made.deployed.model, made.deployment)
    except ProfilingAgentError as error:
        print(f"  {made.name} could not be run: {error}", flush=True)
        return None
    return {
        "model": name,
        "deployment": made.name,
        "size_bytes": made.deployed.model.size_bytes,
        "kl": made.deployed.kl,
        "error": made.deployed.distance,
        "kept": sum(rec.dtype == "float32" for rec in made.deployment.recommendations),
        **drops(base, own),
    }


def measure(
    model: Path, data: Path, chosen: Sequence[Deployment], *, is_quick: bool
) -> tuple[list[dict[str, Any]], list[Check]]:
    """Return one model's rows and its check."""
    started = time.perf_counter()
    with tempfile.TemporaryDirectory() as root, Workshop(Path(root)) as shop:
        exam = sit(shop, model, data, is_quick=is_quick)
        base = exam.answers(exam.baseline, Deployment())
        made = [
            shop.deploy(exam.baseline, deployment, exam.acquired.calibration, batch_size=BATCH_SIZE, tuned=True)
            for deployment in chosen
        ]
        graded = [(one, grade(exam, model.name, one, base)) for one in made if one.deployed]
        rows = [(one, row) for one, row in graded if row]
        models = (exam.baseline, *(one.deployed.model for one, _ in rows if one.deployed))
        race = shop.jobs.run(RaceTask(models=models, batch_size=BATCH_SIZE, device="cpu", seed=0))
    results = {result.model.sha256: result for result in race.results}
    for one, row in rows:
        result = results.get(one.deployed.model.sha256) if one.deployed else None
        row["speedup"] = [result.speedup, result.speedup_low, result.speedup_high] if result else None
    found = [stamped(row) for _, row in rows]
    ours = choose(found)
    show(model.name, float(np.concatenate(base).mean()), found, ours)
    print(f"  {time.perf_counter() - started:.0f} s", flush=True)
    return found, checks_of(model.name, ours)


def choose(rows: Sequence[dict[str, Any]]) -> dict[str, Any] | None:
    """Return the fastest deployment that keeps the floor on the search images."""
    able = [row for row in rows if row["speedup"] and row["search"][0] <= FLOOR]
    return max(able, key=lambda row: row["speedup"][0], default=None)


def checks_of(name: str, ours: dict[str, Any] | None) -> list[Check]:
    """Return what must hold for one model."""
    if ours is None:
        return [Check.at_least(f"{name}: deployments that keep the floor", 0, 1)]
    lost = Estimate(*(100 * end for end in ours["heldout"]))
    return [
        Check.at_most(f"{name}: points that {ours['deployment']} loses on images that didn't choose it", lost, MAX_LOST)
    ]


def _told(triple: Sequence[float], scale: float = 100) -> str:
    return f"{scale * triple[0]:+.2f} [{scale * triple[1]:+.2f}, {scale * triple[2]:+.2f}]"


def show(name: str, top1: float, rows: Sequence[dict[str, Any]], ours: dict[str, Any] | None) -> None:
    """Print one model's table: points lost."""
    print(f"\n{name}: float32 {top1:.2%} on {rows[0]['num_images']} images" if rows else f"\n{name}: no deployment")
    print(f"  {'deployment':<30}{'KL':>9}  {'kept':>4}  {'all':<22}{'search':<22}{'the others':<22}times as fast")
    for row in rows:
        fast = f"{row['speedup'][0]:.2f}" if row.get("speedup") else "-"
        print(
            f"{'*' if row is ours else ' '} {row['deployment']:<30}{row['kl']:>9.5f}  {row['kept']:>4}  {_told(row['all']):<22}"
            f"{_told(row['search']):<22}{_told(row['heldout']):<22}{fast}"
        )


def main() -> int:
    """Run every model; return 1 where a check does not hold."""
    parser = parser_of(__doc__, TRAINED)
    parser.add_argument("--quick", action="store_true", help="one model, two deployments, 512 images of each split")
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    chosen = [deployment for deployment in deployments() if not asked.quick or deployment.name in QUICK]
    # Half precision and float32 in other runtimes lose nothing that could be seen, and were never the fastest.
    chosen = [deployment for deployment in chosen if deployment.scheme in INT8]
    for model in asked.models[: 1 if asked.quick else None]:
        measured, found = measure(model, asked.data, chosen, is_quick=asked.quick)
        rows += measured
        checks += found
    print()
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
