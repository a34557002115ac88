"""The table of planners.py: a run's line, the race of all best models, and what must hold."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from checks import Check, Estimate, stamped
from sessions import Sessions

from profiling_agent.lib.io import file_sha256
from profiling_agent.measure.session import SessionLimits, worker_command
from profiling_agent.measure.worker import WorkerSetup
from profiling_agent.reporting.report import RunReport
from profiling_agent.schemas import Spent

MAX_POINTS = 1.0
# A run may take this many times what the rules' own takes, which also makes what all share, and a minute.
MAX_TIMES, GRACE_S = 2.0, 60.0
LIMITS = SessionLimits(seconds_per_turn=0.2, min_repeats=8, seconds_per_model=3.0)
# Two different models can't be shown to be equally fast; this much slower than the rules', at worst, is near enough.
MIN_OVER_RULES = 0.95


def row_of(model: str, persona: str, planner: str, report: RunReport, seconds: float) -> dict[str, Any]:
    """Return a run's line of the table."""
    race_result = report.race_result
    drop, spent = report.heldout.drop, report.spent
    origins = [attempt.origin for attempt in report.attempts]
    row = {
        "model": model,
        "persona": persona,
        "planner": planner,
        "points": [100 * value for value in (drop.drop, drop.low, drop.high)] if drop else [0.0] * 3,
        "speedup": [race_result.speedup, race_result.speedup_low, race_result.speedup_high]
        if race_result
        else [1.0] * 3,
        "params_saved": 1 - report.best.params / report.baseline.params,
        "macs_saved": 1 - report.best.macs / report.baseline.macs,
        "size": report.best.size_bytes / report.baseline.size_bytes,
        "attempts": len(report.attempts),
        "by_model": sum(origin.by not in ("rules", "user") for origin in origins),
        "rejected": sum(len(origin.dropped) + bool(origin.cut_back) for origin in origins),
        "noted": sum(origin.note is not None for origin in origins),
        **costs_of(spent),
        "repairs": spent.repairs if spent else 0,
        "stopped": str(report.stopped),
        "seconds": seconds,
    }
    return stamped(row)


def costs_of(spent: Spent | None) -> dict[str, Any]:
    """Return what a language model cost: requests, and tokens where its server counted them."""
    if spent is None:
        return {"requests": 0, "tokens": 0}
    read, written = spent.input_tokens, spent.output_tokens
    return {"requests": spent.requests, "tokens": None if read is None or written is None else read + written}


HEAD = (
    f"  {'who':<22}{'planner':<8}{'points lost, held out':<24}{'times as fast':<20}{'params':>7}{'MACs':>8}  "
    f"tries (its own)  requests  tokens  repairs  rejected  seconds"
)


def tell(row: dict[str, Any]) -> None:
    """Print a line."""
    points, fast = row["points"], row["speedup"]
    lost, sped = (f"{one[0]:+.2f} [{one[1]:+.2f}, {one[2]:+.2f}]" for one in (points, fast))
    tokens = "unknown" if row["tokens"] is None else row["tokens"]
    print(
        f"  {row['persona']:<22}{row['planner']:<8}{lost:<24}{sped.replace('+', ''):<20}{-row['params_saved']:>7.1%}{-row['macs_saved']:>8.1%}  "
        f"{row['attempts']:>5} ({row['by_model']}){row['requests']:>15}{tokens:>8}{row['repairs']:>9}"
        f"{row['rejected']:>10}{row['seconds']:>9.0f}",
        flush=True,
    )


def race_the_best(folders: Sequence[Path], batch_size: int, sessions: int) -> list[list[float]]:
    """Return each run's best model over the first run's: times as fast with its 95% interval, all in the same sessions.

    Models of the same bytes are raced once.
    """
    models = [(folder / "best").resolve() for folder in folders]
    prints = ["".join(file_sha256(file) for file in sorted(model.glob("*.safetensors"))) for model in models]
    places = {sha256: place for place, sha256 in enumerate(dict.fromkeys(prints))}
    commands = [worker_command(models[prints.index(sha256)]) for sha256 in places]
    if len(commands) == 1:
        return [[1.0] * 3 for _ in models]
    field = Sessions(commands, WorkerSetup(batch_size=batch_size, device="cpu"), LIMITS)
    for _ in range(sessions):
        field.hold()
    over = [field.over(place) for place in range(len(commands))]
    return [[one.value, one.low, one.high] for one in (over[places[sha256]] for sha256 in prints)]


def checks_of(rows: Sequence[dict[str, Any]]) -> list[Check]:
    """Return what must hold of one model's rows."""
    checks: list[Check] = []
    for row in rows:
        who = f"{row['model']}, {row['persona']}, {row['planner']}"
        bound = MAX_TIMES * rows[0]["seconds"] + GRACE_S
        checks.append(Check.at_most(f"{who}: seconds", row["seconds"], bound))
        if row["planner"] == "hybrid":
            over = Estimate(*row["over_rules"])
            checks.append(Check.at_least(f"{who}: speed over the rules'", over, MIN_OVER_RULES))
    return checks


def told_over_rules(rows: Sequence[dict[str, Any]]) -> None:
    """Print each run's best model beside the rules', raced directly."""
    print("  the best models of all runs in the same races, over the rules' (below 1: slower):")
    for row in rows[1:]:
        ratio, low, high = row["over_rules"]
        verdict = "faster" if low > 1 else "slower" if high < 1 else "the same model" if low == high else "within noise"
        print(f"  {row['persona']:<22}{row['planner']:<8}{ratio:.3f} [{low:.3f}, {high:.3f}]  {verdict}", flush=True)
