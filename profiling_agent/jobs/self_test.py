"""Self-tests with a tiny model, each in its own process, which a runtime or driver built for other hardware may crash.

`python -m profiling_agent.jobs.self_test runtime NAME` runs it there; `... device DEVICE` profiles, prunes and evaluates it, printing each step first.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import cast

import numpy as np
import torch
from torch import Tensor
from transformers import ViTConfig, ViTForImageClassification
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil

from profiling_agent.data.models import resolve_device
from profiling_agent.errors import ArtifactError, QuantizationError
from profiling_agent.lib.modules import on_device, random_batch
from profiling_agent.measure.worker import measure_headline
from profiling_agent.profiling.evidence import measure_sensitivity
from profiling_agent.profiling.profile import profile_model, time_units
from profiling_agent.pruning.compensation import MIN_IMAGES, compensate
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes.artifact import model_bytes, open_session
from profiling_agent.runtimes.onnx_export import export_onnx
from profiling_agent.runtimes.registry import Batch, noise_batch, reads_onnx, runtime
from profiling_agent.runtimes.torch_artifact import (
    load_module,
    load_recipe,
    read_source,
    save_deployed,
    save_derived,
    save_model,
)
from profiling_agent.schemas import Cut, Deployment, InputSpec, ModelProfile, RuntimeName

SPEC = InputSpec(channels=3, height=32, width=32, source="probe")
NUM_RUNS = 20
BATCH = 8
# Another device adds float32 numbers in another order.
MAX_DISTANCE = 1e-3


def probe(name: RuntimeName, folder: Path) -> float:
    """Return the milliseconds of one image in a tiny model on runtime `name`, or raise what prevents that."""
    model, deployment, onnx = write_tiny(folder / "float32"), Deployment(runtime=name), None
    if reads_onnx(deployment):
        onnx = folder / "model.onnx"
        export_onnx(model, onnx, spec=SPEC)
    source = read_source(folder / "float32", noise_batch(SPEC, 4), batch_size=1, onnx=onnx)
    save_deployed(source, deployment, folder / "deployed")
    session = open_session(folder / "deployed")
    images = noise_batch(SPEC, session.fixed_size or 1)
    session.run(images)
    started = time.perf_counter()
    for _ in range(NUM_RUNS):
        session.run(images)
    return (time.perf_counter() - started) * 1000 / NUM_RUNS


def write_tiny(folder: Path, *, hidden_size: int = 32, intermediate_size: int = 64) -> ViTForImageClassification:
    """Save a ViT of two layers with random weights to `folder`; return it."""
    torch.manual_seed(0)
    config = ViTConfig(
        hidden_size=hidden_size,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=intermediate_size,
        image_size=SPEC.height,
        patch_size=8,
    )
    model = ViTForImageClassification(config).eval()
    processor = ViTImageProcessorPil(size={"height": SPEC.height, "width": SPEC.width})
    save_model(model, folder, spec=SPEC, processor=processor, base_model="probe")
    return model


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
        table = time_units(model, profiled.units, batch)
        evidence = measure_sensitivity(model, profiled.units, _calibration, table=table)
        self._profile = profiled.model_copy(update={"evidence": evidence})
        cost = (
            f"{headline.latency.median_ms:.2f} ms a batch of {BATCH}, {headline.peak_memory_bytes / 1e6:.0f} MB at most"
        )
        return f"{cost}, {len(profiled.units)} units"

    def prune(self) -> str:
        """Cut half of every unit, compensate and save the result."""
        assert self._profile is not None, "the profile comes first"
        model = on_device(load_module(self.model), self.device)
        halved = [Cut(unit=unit, keep=snap(unit, 0.5), requested_ratio=0.5) for unit in self._profile.units]
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
                source = read_source(self.pruned, images, batch_size=BATCH, device=self.device)
                save_deployed(source, deployment, folder)
            except QuantizationError as error:
                # A GPU may have no float8.
                outcomes.append(f"{deployment.name} doesn't ({error})")
                continue
            open_session(folder, device=self.device).run(images)
            outcomes.append(deployment.name)
        return f"float32 is {max(distances):.1g} from the CPU's; what works: {', '.join(outcomes)}"


def _distance(folder: Path, device: str, images: Batch) -> float:
    logits, expected = (open_session(folder, device=name).run(images) for name in (device, "cpu"))
    return float(np.linalg.norm(logits - expected) / np.linalg.norm(expected))


def _calibration() -> Iterator[tuple[Tensor, Tensor]]:
    for images in random_batch(SPEC, 2 * MIN_IMAGES).split(BATCH):
        yield images, torch.zeros(len(images), dtype=torch.int64)


def main(device: str) -> None:
    """Run the steps, printing JSON before and after each; `auto` is CUDA, and without CUDA runs none."""
    chosen = "cuda" if device == "auto" and torch.cuda.is_available() else device
    _print(device=None if chosen == "auto" else chosen)
    if chosen == "auto":
        return
    with tempfile.TemporaryDirectory(prefix="profiling-agent-") as scratch:
        for name, step in SelfTest(chosen, Path(scratch)).steps.items():
            _print(begun=name)
            _print(seen=step())


def _print(**fields: object) -> None:
    print(json.dumps(fields), flush=True)  # noqa: T201 - the protocol with `doctor`


if __name__ == "__main__":
    kind, subject = sys.argv[1:]
    if kind == "device":
        main(subject)
    else:
        with tempfile.TemporaryDirectory(prefix="profiling-agent-") as scratch:
            _print(latency_ms=probe(cast("RuntimeName", subject), Path(scratch)))
