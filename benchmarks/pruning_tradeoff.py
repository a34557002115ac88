"""Top-1 against params: ours without training beside uniform pruning and the paper's own baselines.

Ours: evidence, allocation and compensation on 512 images of the train split. Each seed draws its own calibration
images, 2,000 search images of the test split, and reports on the other 8,000. Nothing here looks at the search images:
the share of params is given. Uniform L1 and L2 don't depend on calibration images, and are read on each seed's images.

    python benchmarks/pruning_tradeoff.py [--models DIR...] [--data DIR] [--quick] [--json FILE] [--plot FILE]
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from checks import finish
from torch import nn
from tradeoff_methods import Ours, Subject, paper, uniform
from tradeoff_report import plot, show
from tradeoff_statistics import against, checks, summaries
from transformers import AutoImageProcessor, AutoModelForImageClassification

from profiling_agent.errors import PlanError, PruningError

SHARED = Path(__file__).parents[2] / "shared"
NAMES = ("vit", "deit", "swin", "resnet")
SHARES = (0.05, 0.1, 0.2, 0.3, 0.5)
SEEDS = (0, 1, 2, 3, 4)
# Random pruning is drawn twice; criteria, compensation and allocation are taken away one by one from 30% on.
RANDOM_SEEDS, ABLATED_FROM = (0, 1), 0.3


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
            row: dict[str, Any] = {**key, "saved": float(known["saved"]), "right": known["right"]}
        self.rows.append(row)
        print(
            f"  {share:.0%} {method:14} seed {seed}: saved {row['saved']:.1%}, top-1 {row['right'].mean():.2%}",
            flush=True,
        )


def _saved(subject: Subject, model: nn.Module) -> float:
    return 1 - sum(parameter.numel() for parameter in model.parameters()) / subject.params


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
