"""Beside one busy process: how much longer jobs take that time nothing, in every kind of runtime.

    python benchmarks/busy.py [--model DIR] [--data DIR] [--repeats N] [--json FILE]

The same job, 512 images of the small ViT in a deployment, alone and beside a process that spins, in turns. Two cores and
one busy process leave half to each at worst, and threads that wait for each other by spinning far less: before jobs were told to wait passively, a
batch of 32 took 839 ms where it takes 20 alone (docs/decisions/0018).
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from checks import Check, Estimate, finish, stamped
from datasets import Image, load_dataset
from sessions import pool
from workshop import Workshop

from profiling_agent.jobs.tasks import EvaluateTask, ResolveShapeTask, Task
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import ArtifactRef, Deployment, RuntimeName, Scheme, SplitInfo

SHARED = Path(__file__).resolve().parents[2] / "shared"
NUM_IMAGES, BATCH_SIZE, MAX_TIMES = 512, 32, 3.0
DEPLOYMENTS: tuple[tuple[RuntimeName, Scheme], ...] = (
    *(("eager", "float32"), ("eager", "dynamic"), ("onnxruntime", "dynamic"), ("openvino", "static")),
    ("inductor", "static"),
)


@contextmanager
def spinning() -> Iterator[None]:
    """Have a process spin beside."""
    with subprocess.Popen(
        [sys.executable, "-c", "print(flush=True)\nwhile True: pass"], stdout=subprocess.PIPE
    ) as other:
        assert other.stdout is not None
        other.stdout.readline()
        yield
        other.kill()


def drawn(shop: Workshop, data: Path) -> Callable[[], SplitInfo]:
    """Return what draws images that no job has seen, so that none is known."""
    rows = load_dataset("parquet", data_dir=str(data), split="train")
    image, label = rows.column_names[:2]
    rows, rng, number = rows.cast_column(image, Image(decode=False)), np.random.default_rng(0), iter(range(10**6))

    def draw() -> SplitInfo:
        chosen = rows.select(rng.choice(len(rows), NUM_IMAGES, replace=False).tolist())
        return shop.split("search", [one["bytes"] for one in chosen[image]], chosen[label], draw=next(number))

    return draw


def made(shop: Workshop, baseline: ArtifactRef, calibration: SplitInfo) -> dict[str, ArtifactRef]:
    """Return the deployments by name."""
    found: dict[str, ArtifactRef] = {}
    for runtime, scheme in DEPLOYMENTS:
        deployment = Deployment(runtime=runtime, scheme=scheme, recommendations=recommend(scheme))
        if deployment == Deployment():
            found[deployment.name] = baseline
        elif (one := shop.deploy(baseline, deployment, calibration, batch_size=BATCH_SIZE)).deployed:
            found[deployment.name] = one.deployed.model
    return found


def seconds(shop: Workshop, task: Task[Any], *, beside: bool) -> float:
    """Return how long a job takes, its process included where it has its own."""
    if not beside:
        started = time.monotonic()
        shop.jobs.run(task)
        return time.monotonic() - started
    with spinning():
        return seconds(shop, task, beside=False)


def measure(
    shop: Workshop, name: str, model: ArtifactRef, draw: Callable[[], SplitInfo], repeats: int
) -> dict[str, Any]:
    """Return how many times as long a deployment's images take beside a busy process."""
    took: dict[bool, list[float]] = {False: [], True: []}
    # The first of each starts what further processes are copies of, which imports torch once for a run; it is told and not counted.
    for number in range(repeats + 1):
        for beside in (False, True):
            split = draw()
            task = EvaluateTask(
                model=model,
                split=split,
                shard=0,
                batch_size=BATCH_SIZE,
                device="cpu",
                isolated=not name.startswith("eager"),
            )
            # Their preparation isn't what is compared.
            for needs in task.needs(shop.jobs.path).values():
                for need in needs:
                    shop.jobs.run(need)
            held = seconds(shop, task, beside=beside)
            if number:
                took[beside].append(held)
            else:
                print(f"  {name:24} {held:6.2f} s {'beside' if beside else 'alone'}, the first", flush=True)
    ratio = pool([float(np.log(busy / alone)) for alone, busy in zip(took[False], took[True], strict=True)])
    print(
        f"  {name:24} {np.median(took[False]):6.2f} s alone, {np.median(took[True]):6.2f} s beside: {ratio} times",
        flush=True,
    )
    return stamped(
        {
            "deployment": name,
            "alone_s": took[False],
            "beside_s": took[True],
            "times": [ratio.value, ratio.low, ratio.high],
        }
    )


def main() -> int:
    """Measure, print, and return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=SHARED / "models" / "vit-cifar10")
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "cifar10")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    with tempfile.TemporaryDirectory() as root, Workshop(Path(root)) as shop:
        baseline = shop.jobs.run(ResolveShapeTask(model=str(asked.model), device="cpu")).baseline
        draw = drawn(shop, asked.data)
        rows = [measure(shop, name, model, draw, asked.repeats) for name, model in made(shop, baseline, draw()).items()]
    checks = [
        Check.at_most(f"{row['deployment']}: times as long beside a busy process", Estimate(*row["times"]), MAX_TIMES)
        for row in rows
    ]
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
