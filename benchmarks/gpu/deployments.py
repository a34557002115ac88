"""Every deployment of the paper's models on a GPU, next to torch's defaults, torchao, and the paper's own column.

    python benchmarks/gpu/deployments.py --json FILE [--models NAME ...] [--batch-sizes N ...] [--turns N] [--device cuda|cpu]

Random weights: only times, bytes and the distance of the logits to float32's mean something. Each deployment is a process of its own; all of
a model load at once and then take turns in a shuffled order. The file is written anew after every model and batch size.
"""

import argparse
import json
import random
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from checks import environment, stamped
from full_size import MODELS, SPEC, build
from timed import PEERS
from transformers import ViTImageProcessorPil

from profiling_agent.runtimes.artifact import load_recipe, model_bytes
from profiling_agent.runtimes.registry import Source, missing, noise_batch, recommend, runtime
from profiling_agent.runtimes.torch_artifact import save_deployed, save_model
from profiling_agent.schemas import Deployment, RuntimeName

RUNTIMES: Sequence[RuntimeName] = ("eager", "graphed", "inductor")
LOAD_S, ANSWER_S = 150.0, 60.0
TURN_S, NUM_CALIBRATION = 0.05, 16


class Racer:
    """A child process that times one deployment; `error` is why it left."""

    def __init__(self, name: str, folder: Path, batch_size: int, device: str) -> None:
        """Start to load."""
        self.name, self.folder, self.error = name, folder, ""
        self.turns: list[list[float]] = []
        command = [sys.executable, str(Path(__file__).with_name("timed.py")), name, str(folder)]
        self._stderr = tempfile.TemporaryFile("w+")  # noqa: SIM115 (as long as the child lives)
        self._child = subprocess.Popen(
            [*command, str(batch_size), device],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._stderr,
            text=True,
        )

    def answer(self, request: str = "", timeout_s: float = ANSWER_S) -> Any:
        """Return what the child answers, None where it fails, with the reason in `error`."""
        if self.error:
            return None
        assert self._child.stdin is not None, "it is a pipe"
        assert self._child.stdout is not None, "it is a pipe"
        timer = threading.Timer(timeout_s, self._child.kill)
        timer.start()
        try:
            if request:
                print(request, file=self._child.stdin, flush=True)
            return json.loads(self._child.stdout.readline())
        except (OSError, ValueError):
            self._child.wait()
            self._stderr.seek(0)
            lines = [line.strip() for line in self._stderr if line.strip()]
            self.error = f"exit code {self._child.returncode}: {' | '.join(lines[-3:])[-600:]}"
            return None
        finally:
            timer.cancel()

    def end(self) -> None:
        """End the child."""
        self._child.kill()
        self._child.wait()
        self._stderr.close()


def made(name: str, root: Path, device: str) -> tuple[dict[str, Path], dict[str, str]]:
    """Return the saved folder of each deployment of a model by name, and why others could not be made."""
    base = root / "float32"
    model, processor = build(name), ViTImageProcessorPil(size={"height": SPEC.height, "width": SPEC.width})
    save_model(model, base, spec=SPEC, processor=processor, base_model=name)
    source = Source(
        module=model,
        recipe=load_recipe(base),
        processor=processor,
        calibration=noise_batch(SPEC, NUM_CALIBRATION),
        batch_size=NUM_CALIBRATION,
        device=device,
    )
    folders, refused = {"eager float32": base}, dict[str, str]()
    for each in RUNTIMES:
        if line := missing(each, device):
            refused[each] = line
        for scheme in runtime(each).schemes(device):
            deployment = Deployment(runtime=each, scheme=scheme, recommendations=recommend(scheme))
            if deployment.name in folders or line:
                continue
            try:
                # The compiled and captured form needn't be opened to be saved: the weights are eager's.
                save_deployed(source, deployment, root / deployment.name.replace(" ", "-"))
                folders[deployment.name] = root / deployment.name.replace(" ", "-")
            except Exception as error:  # noqa: BLE001 (a row of the table)
                refused[deployment.name] = f"{type(error).__name__}: {error}"[:600]
    return folders | dict.fromkeys(PEERS, base), refused


def race(name: str, folders: dict[str, Path], batch_size: int, turns: int, device: str) -> list[dict[str, Any]]:
    """Return the row of each deployment."""
    racers = [Racer(each, folder, batch_size, device) for each, folder in folders.items()]
    try:
        first = {racer.name: racer.answer(timeout_s=LOAD_S) for racer in racers}
        alive = [racer for racer in racers if not racer.error]
        shuffle = random.Random(0)
        for _ in range(turns):
            shuffle.shuffle(alive)
            for racer in alive:
                times = racer.answer(f"turn {TURN_S}")
                racer.turns += [times] if times else []
        reference = np.array(first["eager float32"]["logits"])
        return [_row(name, racer, first[racer.name], batch_size, reference, racers[0]) for racer in racers]
    finally:
        for racer in racers:
            racer.end()


def _row(
    model: str, racer: Racer, ready: dict[str, Any] | None, batch_size: int, reference: Any, baseline: Racer
) -> dict[str, Any]:
    row: dict[str, Any] = {"model": model, "batch_size": batch_size, "deployment": racer.name}
    passes = 50 if batch_size == 1 else 20
    throughput, memory = racer.answer(f"throughput {passes}"), racer.answer("memory")
    if racer.error or ready is None:
        return row | {"error": racer.error}
    medians = [float(np.median(turn)) for turn in racer.turns]
    ratios = [float(np.median(own)) / other for own, other in zip(baseline.turns, medians, strict=False)]
    distance = np.linalg.norm(np.array(ready["logits"]) - reference) / np.linalg.norm(reference)
    return row | {
        "latency_ms": float(np.median(medians)),
        "speedup": float(np.median(ratios)),
        "speedup_of_turns": ratios,
        "throughput_images_s": None if throughput is None else 1e3 * batch_size / throughput,
        "bytes": model_bytes(racer.folder) if racer.name not in PEERS else None,
        "allocated_bytes": memory[0],
        "reserved_bytes": memory[1],
        "ready_s": ready["ready_s"],
        "logits_distance": float(distance),
    }


def main() -> None:
    """Make, race, print and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=["ViT-B/16", "Swin-B", "ResNet-101"], choices=list(MODELS))
    parser.add_argument("--batch-sizes", nargs="+", type=int, default=[1, 64])
    parser.add_argument("--turns", type=int, default=7)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--json", type=Path, required=True)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in asked.models:
        with tempfile.TemporaryDirectory() as scratch:
            began = time.monotonic()
            folders, refused = made(name, Path(scratch), asked.device)
            print(f"{name}: {len(folders)} deployments made in {time.monotonic() - began:.0f} s", flush=True)
            for batch_size in asked.batch_sizes:
                found = race(name, folders, batch_size, asked.turns, asked.device)
                rows += [stamped(row) for row in found]
                for row in found:
                    print(
                        json.dumps({key: value for key, value in row.items() if key != "speedup_of_turns"}), flush=True
                    )
                asked.json.write_text(
                    json.dumps({"rows": rows, "refused": refused, "environment": environment()}, indent=1)
                )


if __name__ == "__main__":
    main()
