"""The methods that pruning_tradeoff.py compares, and what they are applied to."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, load_dataset
from numpy.typing import NDArray
from torch import Tensor, nn

from profiling_agent.analysis.allocation import allocate
from profiling_agent.analysis.dry_run import params_and_macs_saved
from profiling_agent.errors import PlanError, PruningError
from profiling_agent.modules.complexity import count_complexity
from profiling_agent.profiling.sensitivity import measure_sensitivity
from profiling_agent.pruning.compensation import compensate
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.rivals import RivalPruned, paper_prune, uniform_prune
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.records import Cut, Evidence, InputSpec, LayerProfile, Target, UnitKind

NUM_CALIBRATION = 512
# Twelve leave a step of 0.0002 between ratios, less than one channel of most layers.
NUM_HALVINGS = 12


@dataclass(frozen=True)
class Subject:
    """One model with its images, read once."""

    name: str
    model: Any
    processor: Any
    data: Path

    @cached_property
    def test(self) -> tuple[Tensor, NDArray[np.int64]]:
        """Return all test images as (pixel values, labels)."""
        return self._read(load_dataset("parquet", data_dir=str(self.data), split="test"))

    def calibration(self, seed: int) -> Tensor:
        """Return 512 train images, drawn by `seed`."""
        train = load_dataset("parquet", data_dir=str(self.data), split="train")
        chosen = np.random.default_rng(seed).choice(len(train), NUM_CALIBRATION, replace=False)
        return self._read(train.select(chosen.tolist()))[0]

    def _read(self, rows: Dataset) -> tuple[Tensor, NDArray[np.int64]]:
        image, label = rows.column_names[:2]
        batches = (rows[start : start + 500][image] for start in range(0, len(rows), 500))
        pixels = [self.processor(batch, return_tensors="pt")["pixel_values"] for batch in batches]
        return torch.cat(pixels), np.array(rows[label])

    @cached_property
    def spec(self) -> InputSpec:
        """Return the input shape."""
        _, channels, height, width = self.test[0].shape
        return InputSpec(channels=channels, height=height, width=width, source="benchmark")

    @cached_property
    def layers(self) -> tuple[LayerProfile, ...]:
        """Return what every layer owns and does, untimed."""
        rows = count_complexity(self.model, self.spec)
        return tuple(
            LayerProfile(name=n, kind=r.kind, params=r.params, macs=r.macs, latency_ms=0.0, activation_bytes=0)
            for n, r in rows.items()
        )

    @cached_property
    def params(self) -> int:
        """Return the model's params."""
        return sum(row.params for row in self.layers)

    @cached_property
    def units(self) -> tuple[Any, ...]:
        """Return what can be cut."""
        return find_units(self.model, self.spec, {row.name: row.macs for row in self.layers}).units

    def answers(self, model: nn.Module) -> NDArray[np.bool_]:
        """Return which of all test images `model` gets right."""
        pixels, labels = self.test
        with torch.inference_mode():
            found = torch.cat([model(pixel_values=batch).logits.argmax(1) for batch in pixels.split(250)])
        return found.numpy() == labels


@dataclass(frozen=True)
class Ours:
    """The engine on one draw of calibration images; parts of it can be left out for the ablation."""

    subject: Subject
    images: Tensor
    evidence: Evidence

    @classmethod
    def prepare(cls, subject: Subject, seed: int, criterion: str = "auto") -> "Ours":
        """Gather the evidence."""
        images = subject.calibration(seed)
        read = partial(_batches, images)
        return cls(
            subject, images, measure_sensitivity(subject.model, subject.units, read, criterion=criterion, seed=seed)
        )

    def allocated(self, share: float) -> tuple[Cut, ...]:
        """Return the allocator's cuts."""
        subject = self.subject
        return allocate(
            subject.units,
            self.evidence,
            Target(metric="params", saving=share),
            whole=float(subject.params),
            saved=lambda cuts: params_and_macs_saved(cuts, subject.layers)[0] / subject.params,
        )

    def uniform(self, share: float) -> tuple[Cut, ...]:
        """Return the mildest uniform cut of all MLPs and inner convolutions that saves `share`, heads where that isn't enough."""
        subject = self.subject
        widths = [unit for unit in subject.units if unit.kind is not UnitKind.HEADS]
        for units in (widths, list(subject.units)):
            for ratio in np.arange(0.02, 0.76, 0.01):
                kept = {unit.name: snap(unit, float(ratio)) for unit in units}
                cuts = [
                    Cut(unit=unit, keep=kept[unit.name], requested_ratio=float(ratio))
                    for unit in units
                    if kept[unit.name] < unit.width
                ]
                if cuts and params_and_macs_saved(cuts, subject.layers)[0] >= share * subject.params:
                    return tuple(cuts)
        raise PlanError(f"no uniform ratio saves {share:.0%}")

    def pruned(self, cuts: Sequence[Cut], *, compensated: bool = True) -> nn.Module:
        """Return the model with `cuts` made in the evidence's order."""
        subject = self.subject
        orders = {row.unit: row.order for row in self.evidence.units}
        keep = {cut.unit.name: sorted(orders[cut.unit.name][cut.unit.width - cut.keep :]) for cut in cuts}
        made = prune_model(subject.model, cuts, spec=subject.spec, keep=keep)
        if not compensated:
            return made.model
        return compensate(subject.model, made.model, cuts, keep, partial(_batches, self.images)).model


def _batches(images: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    for batch in images.split(64):
        yield batch, torch.zeros(len(batch))


def nearest_to_share(prune: Callable[[float], RivalPruned], share: float) -> RivalPruned:
    """Return what `prune` makes by the ratio that, of those that halving comes to, removes nearest to `share` of params."""
    low, high = 0.0, 1.0
    made: list[RivalPruned] = []
    for _ in range(NUM_HALVINGS):
        ratio = (low + high) / 2
        try:
            made.append(prune(ratio))
        except PruningError:  # it cuts no channel
            low = ratio
            continue
        low, high = (ratio, high) if made[-1].share < share else (low, ratio)
    if not made:
        raise PruningError("no ratio cuts a channel of any unit; compare another model")
    return min(made, key=lambda pruned: abs(pruned.share - share))


def uniform(subject: Subject, share: float, *, criterion: str, seed: int) -> nn.Module:
    """Return the model with every width cut by the same ratio, once."""

    def prune(ratio: float) -> RivalPruned:
        return uniform_prune(subject.model, subject.units, subject.spec, ratio, criterion, seed=seed)

    return nearest_to_share(prune, share).model


def paper(subject: Subject, share: float, *, criterion: str, seed: int) -> nn.Module:
    """Return the model cut as the paper's baselines were."""

    def prune(ratio: float) -> RivalPruned:
        return paper_prune(subject.model, subject.spec, ratio, criterion, seed=seed)

    return nearest_to_share(prune, share).model
