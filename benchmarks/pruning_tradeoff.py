"""Top-1 against params: ours without training beside uniform pruning and the paper's own baselines.

Ours: evidence, allocation and compensation on 512 images of the train split. Each seed draws its own calibration
images, 2,000 search images of the test split, and reports on the other 8,000. Nothing here looks at the search images:
the share of params is given. Uniform L1 and L2 don't depend on calibration images, and are read on each seed's images.

    python benchmarks/pruning_tradeoff.py [--models DIR...] [--data DIR] [--quick] [--json FILE] [--plot FILE]
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checks import finish
from datasets import Dataset, load_dataset
from numpy.typing import NDArray
from torch import Tensor, nn
from tradeoff_report import plot, show
from tradeoff_statistics import against, checks, summaries
from transformers import AutoImageProcessor, AutoModelForImageClassification

from profiling_agent.analysis.allocation import allocate
from profiling_agent.analysis.savings import params_and_macs_saved
from profiling_agent.errors import PlanError, PruningError
from profiling_agent.profiling.complexity import count_complexity
from profiling_agent.profiling.sensitivity import measure_sensitivity
from profiling_agent.pruning.baselines import paper_to_params, uniform_to_params
from profiling_agent.pruning.compensation import compensate
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.records import Cut, Evidence, InputSpec, LayerProfile, Target, UnitKind

SHARED = Path(__file__).parents[2] / "shared"
NAMES = ("vit", "deit", "swin", "resnet")
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
SEEDS = (0, 1, 2, 3, 4)
NUM_CALIBRATION = 512
# Random pruning is drawn twice; criteria, compensation and allocation are taken away one by one from 30% on.
RANDOM_SEEDS, ABLATED_FROM = (0, 1), 0.3


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


def _saved(subject: Subject, model: nn.Module) -> float:
    return 1 - sum(parameter.numel() for parameter in model.parameters()) / subject.params


class Notebook:
    """What has been measured, in a folder, so that a benchmark that was stopped goes on where it was."""

    def __init__(self, folder: Path) -> None:
        """Use `folder`, made where it isn't there."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder = folder
        self.rows: list[dict[str, Any]] = []

    def note(
        self, subject: Subject, share: float, method: str, seed: int | None, make: Callable[[], nn.Module]
    ) -> None:
        """Measure the model that `make` makes, unless that is known; what can't be made is said and left out."""
        key = {"model": subject.name, "share": share, "method": method, "seed": seed}
        path = self._folder / f"{'-'.join(str(value).replace(' ', '_') for value in key.values())}.npz"
        if not path.exists():
            try:
                model = make()
            except (PlanError, PruningError) as error:
                print(f"  {share:.0%} {method}: {error}", flush=True)
                return
            np.savez(path, right=subject.answers(model), saved=_saved(subject, model))
        with np.load(path) as known:
            row = {**key, "saved": float(known["saved"]), "right": known["right"]}
        self.rows.append(row)
        print(
            f"  {share:.0%} {method:14} seed {seed}: saved {row['saved']:.1%}, top-1 {row['right'].mean():.2%}",
            flush=True,
        )


def study(subject: Subject, shares: Sequence[float], seeds: Sequence[int], book: Notebook) -> None:
    """Measure ours, what is left when parts of it are taken away, and the baselines."""
    book.note(subject, 0.0, "baseline", None, lambda: subject.model)
    prepared = cache(partial(Ours.prepare, subject))

    def ours(
        seed: int, share: float, *, criterion: str = "auto", uniform: bool = False, folded: bool = True
    ) -> nn.Module:
        engine = prepared(seed, criterion)
        return engine.pruned(engine.uniform(share) if uniform else engine.allocated(share), compensated=folded)

    for seed, share in product(seeds, shares):
        book.note(subject, share, "ours", seed, partial(ours, seed, share))
    for share in (share for share in shares if share >= ABLATED_FROM):
        book.note(subject, share, "ours, L2 order", seeds[0], partial(ours, seeds[0], share, criterion="l2"))
        book.note(subject, share, "ours, uniform", seeds[0], partial(ours, seeds[0], share, uniform=True))
        book.note(subject, share, "ours, no fold", seeds[0], partial(ours, seeds[0], share, folded=False))
    for share, criterion in product(shares, ("l1", "l2", "random")):
        for seed in RANDOM_SEEDS if criterion == "random" else (None,):
            drawn = {"criterion": criterion, "seed": seed or 0}
            book.note(subject, share, f"uniform {criterion}", seed, partial(uniform, subject, share, **drawn))
            book.note(subject, share, f"paper {criterion}", seed, partial(paper, subject, share, **drawn))


def uniform(subject: Subject, share: float, *, criterion: str, seed: int) -> nn.Module:
    """Return the model with every width cut by the same ratio, once."""
    return uniform_to_params(subject.model, subject.units, subject.spec, share, criterion, seed=seed).model


def paper(subject: Subject, share: float, *, criterion: str, seed: int) -> nn.Module:
    """Return the model cut as the paper's baselines were."""
    return paper_to_params(subject.model, subject.spec, share, criterion, seed=seed).model


def main() -> int:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[str(SHARED / "models" / f"{name}-cifar10") for name in NAMES])
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "cifar10")
    parser.add_argument("--quick", action="store_true", help="two shares, two seeds")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--answers", type=Path, help="folder that keeps what was measured, to go on from")
    asked = parser.parse_args()
    shares, seeds = ((0.1, 0.3), SEEDS[:2]) if asked.quick else (SHARES, SEEDS)
    book = Notebook(asked.answers or Path(tempfile.mkdtemp(prefix="pruning-tradeoff-")))
    for folder in asked.models:
        name = Path(folder).name.removesuffix("-cifar10")
        print(name, flush=True)
        model: Any = AutoModelForImageClassification.from_pretrained(folder, use_safetensors=True)
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        study(Subject(name, model.eval(), processor, asked.data), shares, seeds, book)
    rows = book.rows
    table, tests = summaries(rows, seeds), against(rows, seeds, shares)
    show(table)
    if asked.plot:
        plot(table, asked.plot)
    return finish(checks(table, tests), [*table, *tests], asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
