"""Top-1 against params: ours without training beside the paper's baselines and stronger ones, all at the same size.

Ours: evidence, allocation and compensation on 256 images of the train split, as a run draws them. Every draw of images is
reported on the 9,000 test images that nobody looked at while this was written, so that an interval is over draws and images
(tradeoff_statistics.py). Others are cut to the params that ours has on average over the draws: uniform L1, L2 and random
cuts, with ours' compensation too; the paper's own, where it isn't the uniform one; Torch-Pruning's Taylor and Hessian
importance, ranked globally and isomorphically, with ours' compensation; and FLAP and VBP with theirs and with ours.

    python benchmarks/pruning_tradeoff.py [--models DIR...] [--data DIR] [--quick] [--methods NAME...] [--json FILE] [--plot FILE]
"""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from checks import TRAINED, finish, parser_of, stamped
from torch import nn
from tradeoff_methods import Ours, cut, folded, per_draw, per_subject
from tradeoff_statistics import SIGNIFICANT, against, checks, summaries
from tradeoff_subject import Draw, Subject
from transformers import AutoImageProcessor, AutoModelForImageClassification

from profiling_agent.errors import PlanError, PruningError

SHARES, QUICK_SHARES = (0.2, 0.3, 0.5), (0.3,)
DRAWS, QUICK_DRAWS = (0, 1, 2), (0, 1)
QUICK_TEST = 1000
# From 30% on others are cut too, and criterion, compensation and allocation taken away one by one: milder cuts hardly tell them apart.
COMPARED_FROM = 0.3


class Notebook:
    """What has been measured, in a folder, so that a benchmark that was stopped goes on where it was."""

    def __init__(self, folder: Path, methods: Sequence[str] | None = None) -> None:
        """Use `folder`, made where it isn't there, for what is in `methods`, by default all."""
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._methods = folder, methods
        self.rows: list[dict[str, Any]] = []

    def note(
        self, subject: Subject, share: float, method: str, seed: int | None, make: Callable[[], nn.Module]
    ) -> None:
        """Measure the model that `make` makes, unless that is known; what can't be made is said and left out."""
        if self._methods is not None and method not in ("baseline", "ours", *self._methods):
            return
        key = {"model": subject.name, "share": share, "method": method, "seed": seed}
        path = self._folder / f"{'-'.join(str(value).replace(' ', '_') for value in key.values())}.npz"
        if not path.exists():
            try:
                model = make()
            except (PlanError, PruningError) as error:
                print(f"  {share:.0%} {method}: {error}", flush=True)
                return
            held = {name: np.array(value) for name, value in stamped({"saved": _saved(subject, model)}).items()}
            np.savez(path, allow_pickle=False, right=subject.answers(model), **held)
        with np.load(path) as known:
            stamp = {name: str(known[name]) for name in ("commit", "measured_at")}
            row: dict[str, Any] = {**key, **stamp, "saved": float(known["saved"]), "right": known["right"]}
        self.rows.append(row)
        print(
            f"  {share:.0%} {method:28} draw {seed}: saved {row['saved']:.1%}, top-1 {row['right'].mean():.2%}",
            flush=True,
        )

    def saved_by_ours(self, subject: Subject, share: float) -> float:
        """Return the mean share of params that ours really removed, what was asked for where there is no ours."""
        own = [row["saved"] for row in self.rows if _key(row) == (subject.name, share, "ours")]
        return float(np.mean(own)) if own else share


def _key(row: dict[str, Any]) -> tuple[str, float, str]:
    return row["model"], row["share"], row["method"]


def _saved(subject: Subject, model: nn.Module) -> float:
    return 1 - sum(parameter.numel() for parameter in model.parameters()) / subject.params


def study(subject: Subject, shares: Sequence[float], seeds: Sequence[int], book: Notebook) -> None:
    """Measure ours, then all else at the size that ours came to."""
    book.note(subject, 0.0, "baseline", None, lambda: subject.model)
    draws = [Draw(subject, seed) for seed in seeds]

    @cache
    def ours(seed: int, *, by_weights: bool = False) -> Ours:
        return Ours.prepare(draws[seeds.index(seed)], by_weights=by_weights)

    for draw, share in product(draws, shares):
        book.note(subject, share, "ours", draw.seed, lambda d=draw, s=share: folded(d, ours(d.seed).allocated(s)))
    compared = [share for share in shares if share >= COMPARED_FROM]
    for share in compared:
        size = book.saved_by_ours(subject, share)
        for name, make in per_subject(subject).items():
            book.note(subject, share, name, None, partial(make, size))
    for draw, share in product(draws, compared):
        for name, make in of_draw(draw, share, book.saved_by_ours(subject, share), ours).items():
            book.note(subject, share, name, draw.seed, make)


def of_draw(draw: Draw, share: float, size: float, ours: Callable[..., Ours]) -> dict[str, Callable[[], nn.Module]]:
    """Return what makes each model of a draw, by name: others, and ours without one part of it.

    `share` is what ours was asked for, `size` what it came to.
    """
    found: dict[str, Callable[[], nn.Module]] = {name: partial(make, size) for name, make in per_draw(draw).items()}
    found["ours, L2 order"] = lambda: folded(draw, ours(draw.seed, by_weights=True).allocated(share))
    found["ours, the same ratio"] = lambda: folded(draw, ours(draw.seed).uniform(size))
    found["ours, no compensation"] = lambda: cut(draw.subject, ours(draw.seed).allocated(share))
    return found


def _asked() -> argparse.Namespace:
    parser = parser_of(__doc__, TRAINED)
    parser.add_argument("--quick", action="store_true", help="one share, two draws, 1,000 test images")
    parser.add_argument("--methods", nargs="*", help="others to compare with, by name; by default all")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--answers", type=Path, help="folder that keeps what was measured, to go on from")
    return parser.parse_args()


def show(table: Sequence[dict[str, Any]]) -> None:
    """Print points lost, by model and share, a column for each method."""
    methods = list(dict.fromkeys(row["method"] for row in table))
    for model in dict.fromkeys(row["model"] for row in table):
        print(f"\n{model}: points of top-1 lost (95% interval over draws and images), params really gone")
        for method in methods:
            cells = [row for row in table if (row["model"], row["method"]) == (model, method)]
            told = [
                f"{100 * c['drop']:6.2f} [{100 * c['low']:.2f}, {100 * c['high']:.2f}] {c['saved']:.1%}" for c in cells
            ]
            print(f"  {method:28} " + " | ".join(told))


def not_won(tests: Sequence[dict[str, Any]]) -> None:
    """Print where ours is not shown to be above another method, and where one is shown to be above ours."""
    print("Where ours doesn't win (points that ours is above, 95% interval; Holm-corrected p):")
    for test in tests:
        if test["gain"] > 0 and test["p_holm"] < SIGNIFICANT:
            continue
        said = "it is above ours" if test["gain"] < 0 and test["p_holm"] < SIGNIFICANT else "can't be told apart"
        told = (
            f"{100 * test['gain']:+.2f} [{100 * test['low']:+.2f}, {100 * test['high']:+.2f}], p {test['p_holm']:.2g}"
        )
        print(f"  {test['model']} at {test['share']:.0%}, {test['method']}: {told}: {said}")


def plot(table: Sequence[dict[str, Any]], path: Path) -> None:
    """Draw points lost against params gone."""
    from matplotlib import pyplot  # pyright: ignore[reportMissingImports] - of the extra `bench`

    models = list(dict.fromkeys(row["model"] for row in table))
    figure, axes = pyplot.subplots(1, len(models), figsize=(5 * len(models), 4), squeeze=False)
    methods = list(dict.fromkeys(row["method"] for row in table))
    for axis, model in zip(axes[0], models, strict=True):
        axis.set_prop_cycle(color=pyplot.get_cmap("tab20").colors)
        for method in methods:
            cells = [row for row in table if (row["model"], row["method"]) == (model, method)]
            style = {"linewidth": 2.5, "color": "black"} if method == "ours" else {"linewidth": 1, "alpha": 0.8}
            axis.plot(
                [100 * c["saved"] for c in cells], [100 * c["drop"] for c in cells], marker="o", label=method, **style
            )
        axis.set(title=model, xlabel="params gone, %", ylabel="points of top-1 lost", yscale="symlog")
    # Beside the axes: there are more methods than a corner has room for.
    figure.tight_layout()
    figure.legend(*axes[0][0].get_legend_handles_labels(), fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> int:
    """Run the benchmark."""
    asked = _asked()
    shares, seeds = (QUICK_SHARES, QUICK_DRAWS) if asked.quick else (SHARES, DRAWS)
    book = Notebook(asked.answers or Path(tempfile.mkdtemp(prefix="pruning-tradeoff-")), asked.methods)
    for folder in asked.models:
        name = folder.name.removesuffix("-cifar10")
        print(name, flush=True)
        model: Any = AutoModelForImageClassification.from_pretrained(folder, use_safetensors=True)
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        num_test = QUICK_TEST if asked.quick else None
        subject = Subject(name, model.eval(), processor, asked.data, num_test)
        study(subject, shares, seeds, book)
    table, tests = summaries(book.rows), against(book.rows)
    show(table)
    if asked.plot:
        plot(table, asked.plot)
    not_won(tests)
    return finish(checks(table, tests), [*table, *tests], asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
