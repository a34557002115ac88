"""The main job on real models: a verdict for each, under the default contract, from measurements alone.

    python benchmarks/verdicts.py [--models DIR…] [--data DIR] [--quick] [--json FILE] [--output DIR]

Calibration images come from the train split, search and held-out images from the test split, which the models were not trained on.
Below each verdict is what pruning and quantization brought, each alone and both: every variant that was timed.
"""

import tempfile
from contextlib import suppress
from pathlib import Path

from checks import TRAINED, Check, Estimate, finish, parser_of, stamped, use_own_ledger

from profiling_agent import Request
from profiling_agent.api import complete
from profiling_agent.measure.race import compare
from profiling_agent.reporting.report import RunReport
from profiling_agent.schemas import ArtifactRef
from profiling_agent.workspace import slug

TRANSFORMERS = ("vit", "deit", "swin")
MIN_PRUNED = 0.05
# The best of the paper's Table 4.
MIN_SPEEDUP = 1.74


def row_of(name: str, report: RunReport) -> dict[str, object]:
    """Return one model's line of the table."""
    base, best, drop = report.baseline, report.best, report.heldout.drop
    race_result = report.race_result
    return {
        "model": name,
        "verdict": report.verdict.outcome + (" certified" if report.verdict.certified else ""),
        "binds": report.verdict.binding or "",
        "best": str(best.variant),
        "top1 before": f"{base.top1:.4f}",
        "points lost": f"{drop.drop * 100:+.2f} [{drop.low * 100:+.2f}, {drop.high * 100:+.2f}]" if drop else "0",
        "params saved": f"{1 - best.params / base.params:.1%}",
        "bytes": f"{best.size_bytes / base.size_bytes:.1%}",
        "times as fast": f"{race_result.speedup:.2f} [{race_result.speedup_low:.2f}, {race_result.speedup_high:.2f}]"
        if race_result
        else "1",
        "attempts": len(report.attempts),
        "deepest measured prune": f"{deepest(report):.1%}",
    }


def variants_of(name: str, report: RunReport) -> list[dict[str, object]]:
    """Return a line for each variant that was timed: which of pruning and quantization it has, and what they brought."""
    return [
        {
            "model": name,
            "variant": str(row.evaluation.variant),
            "deployment": row.evaluation.deployment.name,
            "points lost on search images": 100 * row.evaluation.drop.drop if row.evaluation.drop else 0.0,
            "bytes": row.evaluation.footprint.size_bytes / report.baseline.size_bytes,
            "over_fp32": [row.race_result.speedup, row.race_result.speedup_low, row.race_result.speedup_high],
        }
        for row in report.variants
        if row.race_result
    ]


def deepest(report: RunReport) -> float:
    """Return the largest share of params that a measured attempt removed."""
    saved = [1 - a.deployed.footprint.params / report.baseline.params for a in report.attempts if a.deployed]
    return max(saved, default=0.0)


def beating(report: RunReport) -> list[str]:
    """Return which measured candidates are shown faster than what is returned, though no less accurate and no larger than allowed.

    Both of the same sessions: what one session says of a candidate and five others of the returned model says as much of the sessions. Accuracy
    is that on the search images, on which all were measured; nothing is beaten where it was not timed.
    """
    returned = next((row.evaluation for row in report.variants if row.evaluation.model == report.heldout.model), None)
    if returned is None:
        return []
    lost = returned.drop.drop if returned.drop else 0.0
    allowed = report.goal.max_size_ratio * report.baseline.size_bytes
    return [
        f"{row.evaluation.variant} {row.evaluation.deployment.name}"
        for row in report.variants
        if (row.evaluation.drop.drop if row.evaluation.drop else 0.0) <= lost
        and row.evaluation.footprint.size_bytes <= allowed
        and _is_shown_faster(report, row.evaluation.model, returned.model)
    ]


def _is_shown_faster(report: RunReport, one: ArtifactRef, other: ArtifactRef) -> bool:
    """Say whether the sessions that both were in, the several before the one, show it."""
    for race in (report.race, report.screening):
        with suppress(LookupError):
            if race is not None:
                return compare(race.result_of(one), race.result_of(other)).low > 1
    return False


def checks_of(name: str, report: RunReport) -> list[Check]:
    """Return what must hold for one model, and what a run may come out without: it returns no model that shows otherwise.

    A run refuses what loses more than the contract has by point estimate, is shown slower or is larger than the baseline.
    """
    race_result, drop = report.race_result, report.heldout.drop
    speed = Estimate(race_result.speedup, race_result.speedup_low, race_result.speedup_high) if race_result else 1.0
    lost = Estimate(100 * drop.drop, 100 * drop.low, 100 * drop.high) if drop else 0.0
    contract = Request.model_fields
    size, points = contract["max_size_ratio"].default, 100 * contract["max_accuracy_drop"].default
    checks = [
        Check.at_most(f"{name}: points lost on held-out images", lost, points),
        Check.at_least(f"{name}: times as fast", speed, MIN_SPEEDUP),
        Check.at_most(f"{name}: bytes, of the baseline's", report.best.size_bytes / report.baseline.size_bytes, size),
        Check.at_most(f"{name}: measured candidates that beat what is returned", len(beating(report)), 0),
        Check.at_least(f"{name}: params removed by the deepest measured attempt", deepest(report), MIN_PRUNED),
    ]
    if name.startswith(TRANSFORMERS):
        made = float(report.best.variant != "baseline")
        checks.append(Check.at_least(f"{name}: best is a model we made", made, 1.0))
    return checks


def main() -> int:
    """Run every model; return 1 where a check does not hold."""
    parser = parser_of(__doc__, TRAINED)
    parser.add_argument("--quick", action="store_true", help="400 search images")
    parser.add_argument("--output", type=Path, help="keep the run folders here, and read what is complete of them")
    asked = parser.parse_args()
    use_own_ledger()
    rows, checks = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for model in asked.models:
            request = Request(
                model=str(model),
                dataset=str(asked.data),
                output=str(asked.output or scratch),
                run_id=slug(model.name),
                num_samples=400 if asked.quick else None,
            )
            report = complete(request)
            told = [stamped(row) for row in (row_of(model.name, report), *variants_of(model.name, report))]
            checks += checks_of(model.name, report)
            print(*told, sep="\n", flush=True)
            rows += told
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
