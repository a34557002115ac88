"""The table of pruning_tradeoff.py, printed and drawn."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tradeoff_statistics import SIGNIFICANT


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
