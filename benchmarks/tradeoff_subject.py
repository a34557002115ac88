"""What pruning_tradeoff.py compares methods on: a model with its test images, and draws of calibration images."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
from datasets import Dataset, load_dataset
from numpy.typing import NDArray
from paper.methods import WIDTHS
from torch import Tensor, nn

from profiling_agent.data.splits import NUM_CALIBRATION
from profiling_agent.errors import PruningError
from profiling_agent.lib.costs import count_complexity
from profiling_agent.lib.inference import quick_products
from profiling_agent.planning.allocation import params_and_macs_saved
from profiling_agent.pruning.criteria import UnitMoments, gather_moments
from profiling_agent.pruning.units import find_units
from profiling_agent.schemas import Cut, InputSpec, LayerProfile, Unit

# Ten leave a step of 0.001 between ratios, less than one channel of most layers.
NUM_HALVINGS = 10
BATCH = 64
Made = TypeVar("Made")


@dataclass(frozen=True)
class Plan:
    """Cuts, and the channels or heads that each cut unit keeps."""

    cuts: tuple[Cut, ...]
    keep: Mapping[str, list[int]]


@dataclass(frozen=True)
class Subject:
    """One model with its images, read once; of the test images the first `num_test` where that is given."""

    name: str
    model: Any
    processor: Any
    data: Path
    num_test: int | None = None

    @cached_property
    def test(self) -> tuple[Tensor, Tensor]:
        """Return the test images as (pixel values, labels)."""
        rows = load_dataset("parquet", data_dir=str(self.data), split="test")
        return self._read(rows.select(range(self.num_test or len(rows))))

    def calibration(self, seed: int) -> tuple[Tensor, Tensor]:
        """Return as many train images as a run calibrates with, drawn by `seed`, as (pixel values, labels)."""
        train = load_dataset("parquet", data_dir=str(self.data), split="train")
        chosen = np.random.default_rng(seed).choice(len(train), NUM_CALIBRATION, replace=False)
        return self._read(train.select(chosen.tolist()))

    def _read(self, rows: Dataset) -> tuple[Tensor, Tensor]:
        image, label = rows.column_names[:2]
        batches = (rows[start : start + 500][image] for start in range(0, len(rows), 500))
        pixels = [self.processor(batch, return_tensors="pt")["pixel_values"] for batch in batches]
        return torch.cat(pixels), torch.tensor(rows[label])

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
    def units(self) -> tuple[Unit, ...]:
        """Return what can be cut."""
        return find_units(self.model, self.spec, {row.name: row.macs for row in self.layers}).units

    @cached_property
    def widths(self) -> tuple[Unit, ...]:
        """Return the MLPs and inner convolutions of what can be cut."""
        return tuple(unit for unit in self.units if unit.kind in WIDTHS)

    def plan(self, keep: Mapping[str, list[int]]) -> Plan:
        """Return the plan that leaves of each unit what `keep` says, by name, and all of those it doesn't name.

        Raises:
            PruningError: that cuts nothing.
        """
        cut = [unit for unit in self.units if len(keep.get(unit.name, range(unit.width))) < unit.width]
        cuts = [Cut(unit=u, keep=len(keep[u.name]), requested_ratio=1 - len(keep[u.name]) / u.width) for u in cut]
        if not cuts:
            raise PruningError("the ratio cuts no channel of any unit; raise it")
        return Plan(tuple(cuts), {unit.name: keep[unit.name] for unit in cut})

    def saved(self, plan: Plan) -> float:
        """Return the share of params that a plan removes."""
        return params_and_macs_saved(plan.cuts, self.layers)[0] / self.params

    def answers(self, model: nn.Module) -> NDArray[np.bool_]:
        """Return which of the test images `model` gets right."""
        pixels, labels = self.test
        with torch.inference_mode(), quick_products():
            found = torch.cat([model(pixel_values=batch).logits.argmax(1) for batch in pixels.split(BATCH)])
        return (found == labels).numpy()


@dataclass(frozen=True)
class Draw:
    """Calibration images of one model, drawn by `seed`, read once."""

    subject: Subject
    seed: int

    @cached_property
    def images(self) -> tuple[Tensor, Tensor]:
        """Return the images as (pixel values, labels)."""
        return self.subject.calibration(self.seed)

    def batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Begin a pass over the images."""
        pixels, labels = self.images
        yield from zip(pixels.split(BATCH), labels.split(BATCH), strict=True)

    @cached_property
    def moments(self) -> dict[str, UnitMoments]:
        """Return the moments of every unit, over all images."""
        subject = self.subject
        return gather_moments(subject.model, subject.units, (pixels for pixels, _ in self.batches()), seed=self.seed)


def nearest(make: Callable[[float], Made], share_of: Callable[[Made], float], share: float) -> Made:
    """Return what `make` makes by the ratio that, of those that halving comes to, removes nearest to `share` of params.

    Raises:
        PruningError: every ratio was refused, as cutting nothing.
    """
    low, high = 0.0, 1.0
    made: list[Made] = []
    for _ in range(NUM_HALVINGS):
        ratio = (low + high) / 2
        try:
            made.append(make(ratio))
        except PruningError:  # it cuts no channel
            low = ratio
            continue
        low, high = (ratio, high) if share_of(made[-1]) < share else (low, ratio)
    if not made:
        raise PruningError("no ratio cuts a channel of any unit; compare another model")
    return min(made, key=lambda one: abs(share_of(one) - share))
