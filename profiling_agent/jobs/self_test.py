"""Self-test of a device: `python -m profiling_agent.jobs.self_test DEVICE` profiles, prunes and evaluates a small model there.

It prints each step's name before it and its result after it, so that a crash of the process shows which step failed.
"""

import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from profiling_agent.data.models import resolve_device
from profiling_agent.errors import ArtifactError, QuantizationError
from profiling_agent.measure.latency_table import time_units
from profiling_agent.measure.throughput import measure_headline
from profiling_agent.modules.inference import on_device, random_batch
from profiling_agent.profiling.evidence import measure_sensitivity
from profiling_agent.profiling.profile import profile_model
from profiling_agent.pruning.compensation import MIN_IMAGES, compensate
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.artifact import model_bytes
from profiling_agent.runtimes.probe import SPEC, write_tiny
from profiling_agent.runtimes.registry import Batch, Source, noise_batch, open_session, runtime
from profiling_agent.runtimes.save import save_deployed
from profiling_agent.runtimes.torch_artifact import load_module, load_processor, load_recipe, save_derived
from profiling_agent.schemas import Cut, Deployment, ModelProfile, RuntimeName

BATCH = 8
# Another device adds float32 numbers in another order.
MAX_DISTANCE = 1e-3


class SelfTest:
    """The steps, in their order; each returns its result in words, or raises."""

    def __init__(self, device: str, folder: Path) -> None:
        self.device, self.folder = device, folder
        self.model, self.pruned = folder / "model", folder / "pruned"
        self._profile: ModelProfile | None = None

    @property
    def steps(self) -> dict[str, Callable[[], str]]:
        """Return each step by its name."""
        return {"find": self.find, "profile": self.profile, "prune": self.prune, "evaluate": self.evaluate}

    def find(self) -> str:
        """Find the device."""
        device = resolve_device(self.device)
        return torch.cuda.get_device_name() if device == "cuda" else "the CPU"

    def profile(self) -> str:
        """Profile a small model, with units and evidence."""
        write_tiny(self.model, hidden_size=64, intermediate_size=256)
        headline = measure_headline(open_session(self.model, device=self.device), SPEC, batch_size=BATCH)
        model = on_device(load_module(self.model), self.device)
        profiled = profile_model(
            model,
            SPEC,
            batch_size=BATCH,
            device=self.device,
            headline=headline,
            size_bytes=model_bytes(self.model),
            architecture=load_recipe(self.model).architecture,
        )
        batch = random_batch(SPEC, BATCH).to(self.device)
        table = time_units(model, profiled.units, batch, file=self.folder / "latency.json")
        evidence = measure_sensitivity(model, profiled.units, _calibration, table=table)
        self._profile = profiled.model_copy(update={"evidence": evidence})
        memory_mb = headline.peak_memory_bytes / 1e6
        return f"{headline.latency.median_ms:.2f} ms a batch of {BATCH}, {memory_mb:.0f} MB at most, {len(profiled.units)} units"

    def prune(self) -> str:
        """Cut half of every unit, compensate and save the result."""
        assert self._profile is not None, "the profile comes first"
        model = on_device(load_module(self.model), self.device)
        units = self._profile.units
        halved = [Cut(unit=unit, keep=snap(unit, 0.5), requested_ratio=0.5) for unit in units]
        cuts = [cut for cut in halved if cut.keep < cut.unit.width]
        pruned = prune_model(model, cuts, spec=SPEC)
        compensated = compensate(model, pruned.model, cuts, pruned.keep, _calibration)
        save_derived(compensated.model.cpu(), self.model, self.pruned, cuts=cuts)
        return f"KL {compensated.kl_before:.2g} nats, {compensated.kl_after:.2g} after compensation"

    def evaluate(self) -> str:
        """Compare both models' logits with the CPU's, and deploy the pruned one in every scheme of the device."""
        images = noise_batch(SPEC, BATCH)
        distances = [_distance(folder, self.device, images) for folder in (self.model, self.pruned)]
        if not max(distances) <= MAX_DISTANCE:
            raise ArtifactError(
                f"logits are {max(distances):.2g} from the CPU's (relative), {MAX_DISTANCE:g} is allowed"
            )
        names: tuple[RuntimeName, ...] = ("eager", "graphed")
        deployments = [
            Deployment(runtime=name, scheme=scheme) for name in names for scheme in runtime(name).schemes(self.device)
        ]
        outcomes: list[str] = []
        for deployment in deployments[1:]:
            folder = self.folder / f"{deployment.runtime}-{deployment.scheme}"
            try:
                save_deployed(self._source(images), deployment, folder)
            except QuantizationError as error:
                # A GPU may have no float8.
                outcomes.append(f"{deployment.name} doesn't ({error})")
                continue
            open_session(folder, device=self.device).run(images)
            outcomes.append(deployment.name)
        return f"float32 is {max(distances):.1g} from the CPU's; what works: {', '.join(outcomes)}"

    def _source(self, images: Batch) -> Source:
        return Source(
            module=load_module(self.pruned),
            recipe=load_recipe(self.pruned),
            processor=load_processor(self.pruned),
            calibration=images,
            batch_size=BATCH,
            device=self.device,
        )


def _distance(folder: Path, device: str, images: Batch) -> float:
    logits, expected = (open_session(folder, device=name).run(images) for name in (device, "cpu"))
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))


def _calibration() -> Iterator[tuple[Tensor, Tensor]]:
    for images in random_batch(SPEC, 2 * MIN_IMAGES).split(BATCH):
        yield images, torch.zeros(len(images), dtype=torch.int64)


def main(device: str) -> None:
    """Run the steps, printing JSON before and after each; `auto` is CUDA, and without CUDA runs none."""
    chosen = "cuda" if device == "auto" and torch.cuda.is_available() else device
    if chosen == "auto":
        print(json.dumps({"device": None}), flush=True)  # noqa: T201 - the protocol
        return
    print(json.dumps({"device": chosen}), flush=True)  # noqa: T201
    with tempfile.TemporaryDirectory(prefix="profiling-agent-") as scratch:
        for name, step in SelfTest(chosen, Path(scratch)).steps.items():
            print(json.dumps({"begun": name}), flush=True)  # noqa: T201
            print(json.dumps({"seen": step()}), flush=True)  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1])
