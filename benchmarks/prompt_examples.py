"""Good and bad answers for the prompts of the agents that plan, computed from what was measured of real models.

    python benchmarks/prompt_examples.py [--models DIR...] [--data DIR] [--evidence FILE] [--measure]

With `--measure` each model (the ViT and the ResNet on CIFAR-10) goes through the graph with the rules until NUM_ATTEMPTS plans were measured, and what was
found is written down: minutes. Without, the examples are made again from that record, and written into `prompts/`; seconds. Times are no part of them, as they
are of one machine.
"""

import argparse
import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from checks import use_own_ledger

from profiling_agent import Request, build_graph
from profiling_agent.errors import PlanError
from profiling_agent.jobs.runner import Jobs, read_profile
from profiling_agent.planning.allocation import METRICS, NATS_A_POINT, dry_run, frontier, saved_share
from profiling_agent.planning.digest import named_groups, plan_text
from profiling_agent.schemas import Attempt, DryRun, Goal, Journal, ModelProfile, Plan, PruningRecommendation, Target
from profiling_agent.workspace import Workspace

ROOT = Path(__file__).resolve().parents[1]
SHARED = ROOT.parent / "shared"
EVIDENCE = ROOT / "benchmarks" / "results" / "prompt_examples.json"
PROMPTS = ROOT / "prompts"
NUM_ATTEMPTS, NUM_IMAGES, NUM_DIGITS = 5, 1000, 4
# MACs, which are the same everywhere.
METRIC = "macs"


@dataclass(frozen=True)
class Seen:
    """What was measured of one model."""

    profile: ModelProfile
    journal: Journal
    goal: Goal


def measure(model: Path, data: Path) -> Seen:
    """Take a model through the graph until enough plans were measured."""
    with tempfile.TemporaryDirectory() as folder:
        request = Request(
            model=str(model),
            dataset=str(data),
            output=folder,
            run_id="examples",
            runtimes="eager",
            quantize_dtype="none",
            num_samples=NUM_IMAGES,
            max_iterations=NUM_ATTEMPTS + 1,
            fresh_ledger="a benchmark: no held-out image is opened",
        )
        for state in build_graph().stream(request, stream_mode="values"):
            journal: Journal | None = state.get("journal")
            if journal and (len(journal.attempts) >= NUM_ATTEMPTS or state.get("stopped")):
                profile = read_profile(Jobs(Workspace(Path(folder) / "examples")), state["profiled"])
                return Seen(_short(profile), journal, request.goal)
    raise SystemExit(f"{model.name} came to an end before a plan was measured")


def _short(profile: ModelProfile) -> ModelProfile:
    """Return a profile without what no prompt reads."""
    assert profile.evidence is not None, "calibration images were given"
    rows = tuple(row.model_copy(update={"order": ()}) for row in profile.evidence.units)
    headline = profile.headline.latency.model_copy(update={"samples_ms": ()})
    return profile.model_copy(
        update={
            "evidence": profile.evidence.model_copy(update={"units": rows}),
            "operators": (),
            "headline": profile.headline.model_copy(update={"latency": headline}),
            "trace": None,
        }
    )


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return float(f"{value:.{NUM_DIGITS}g}")
    if isinstance(value, dict):
        return {name: _rounded(held) for name, held in value.items()}
    return [_rounded(held) for held in value] if isinstance(value, list) else value


def write_evidence(seen: Sequence[Seen], path: Path) -> None:
    """Write down what was measured, a line for each model."""
    rows = [
        {name: getattr(one, name).model_dump(mode="json") for name in ("profile", "journal", "goal")} for one in seen
    ]
    path.write_text("\n".join(json.dumps(_rounded(row)) for row in rows) + "\n", encoding="utf-8")


def read_evidence(path: Path = EVIDENCE) -> list[Seen]:
    """Read what was written down."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [
        Seen(
            ModelProfile.model_validate(row["profile"]),
            Journal.model_validate(row["journal"]),
            Goal.model_validate(row["goal"]),
        )
        for row in rows
    ]


def analysis_examples(seen: Seen) -> str:
    """Return a good and a bad first answer."""
    profile, goal = seen.profile, seen.goal
    points = [point for point in frontier(profile, goal) if point.metric == METRIC]
    # What is expected to be lost at worst is what may be.
    inside = [point for point in points if point.kl <= 100 * goal.max_accuracy_drop * NATS_A_POINT[0]]
    saving, beyond = _down(inside[-1].saving), points[len(inside)]
    good = dry_run(_target(saving), profile)
    assert good.kl is not None, "there is evidence"
    few, many = (good.kl / nats / 100 for nats in reversed(NATS_A_POINT))
    groups = [
        f"{name} ({group.kind}) {_shares(halved, profile)} for {halved.kl:.2g} nats"
        for name, group in named_groups(profile).items()
        if (halved := _halved(group.pattern, group.kind, profile))
    ]
    reason = (
        f"The frontier saves {_saved(good, profile):.1%} of the MACs for {good.kl:.2g} nats, about {few:.2%} to {many:.2%} of top-1 where "
        f"{goal.max_accuracy_drop:.2%} may go; the next point, {beyond.macs:.1%} for {beyond.kl:.2g}, is likely to be refused."
    )
    justification = f"{saved_share(good.cuts, profile, 'params'):.1%} of the params go with it"
    answer = {
        "reason": reason,
        "target": {"metric": METRIC, "saving": saving, "justification": justification},
        "caps": [],
        "pruning": [],
        "quantization": None,
    }
    half = _everything(0.5)
    cost = dry_run(half, profile)
    assert cost.kl is not None, "there is evidence"
    return (
        f"A good answer, for a {profile.architecture} of {profile.params} params, whose groups cut by half save {'; '.join(groups)}:\n"
        f"{json.dumps(answer)}\n\n"
        f"A bad answer for the same model, one ratio for everything: it is predicted to cost {cost.kl:.2g} nats for {_shares(cost, profile)}, where the "
        f"allocator saves as much for {_least(cost, profile):.2g}, and would be sent back.\n"
        f"{json.dumps({'reason': 'wide layers are redundant', **_document(half)})}\n"
    )


def iteration_examples(seen: Seen) -> str:
    """Return an answer that learns from an attempt, one that stops well, and a bad one."""
    profile, journal = seen.profile, seen.journal
    low, high = _first_bracket(journal, profile)
    below, above = (dry for row in (low, high) if (dry := row.dry_run))
    factor = max(_over(row) for row in (low, high))
    wanted = (_measured(low) * _measured(high)) ** 0.5 / factor
    saving = _saving_at(wanted, profile, _saved(below, profile), _saved(above, profile))
    dry = dry_run(_target(saving), profile)
    reason = (
        f"Attempt {low.number} saved {_saved(below, profile):.1%} of the MACs at a measured {_measured(low):.2g} nats and was accepted, attempt {high.number} "
        f"{_saved(above, profile):.1%} at {_measured(high):.2g}, up to {factor:.2g} times what was predicted, and was refused. Between them, at about "
        f"{wanted * factor:.2g} measured, {dry.kl:.2g} may be predicted."
    )
    answer = {
        "stop": False,
        "reason": reason,
        "target": {"metric": METRIC, "saving": saving, "justification": f"{dry.kl:.2g} nats predicted"},
        "caps": [],
        "pruning": [],
        "quantization": None,
    }
    accepted, refused = _last_bracket(journal, profile)
    stop = {
        "stop": True,
        "reason": f"{accepted:.1%} of the MACs was accepted and {refused:.1%} refused: what lies between, {refused - accepted:.1%}, isn't worth another attempt.",
    }
    again = {
        "stop": False,
        "reason": "a little less, to be sure",
        **_document(_target(_down(_saved(below, profile) * 0.9))),
    }
    return (
        f"A good answer, for a {profile.architecture} of {profile.params} params after {max(low.number, high.number)} attempts:\n{json.dumps(answer)}\n\n"
        f"A good answer after {len(journal.attempts)} attempts on the same model:\n{json.dumps(stop)}\n\n"
        f"A bad answer, as attempt {low.number} was bolder and accepted: whatever it does, it can't win.\n{json.dumps(again)}\n"
    )


def _first_bracket(journal: Journal, profile: ModelProfile) -> tuple[Attempt, Attempt]:
    """Return the accepted and the refused attempt that were there when there were both."""
    for number in range(2, len(journal.attempts) + 1):
        found = [row for row in journal.attempts[:number] if row.dry_run and row.calibration_kl]
        accepted, refused = ([row for row in found if row.accepted is which] for which in (True, False))
        if accepted and refused:
            return max(accepted, key=lambda row: _saved_by(row, profile)), min(
                refused, key=lambda row: _saved_by(row, profile)
            )
    raise SystemExit("no attempt was accepted, or none refused: nothing can be learned from them")


def _last_bracket(journal: Journal, profile: ModelProfile) -> tuple[float, float]:
    accepted = max(_saved_by(row, profile) for row in journal.attempts if row.accepted)
    refused = [_saved_by(row, profile) for row in journal.attempts if not row.accepted and row.dry_run]
    return accepted, min(share for share in refused if share > accepted)


def _saved_by(row: Attempt, profile: ModelProfile) -> float:
    return _saved(row.dry_run, profile) if row.dry_run else 0.0


def _measured(row: Attempt) -> float:
    assert row.calibration_kl is not None, "it was measured"
    return row.calibration_kl


def _over(row: Attempt) -> float:
    assert row.dry_run is not None, "it was predicted"
    assert row.dry_run.kl, "it costs something"
    return _measured(row) / row.dry_run.kl


def _saving_at(nats: float, profile: ModelProfile, low: float, high: float) -> float:
    """Return the largest saving between two, to a thousandth, that is predicted to cost no more than so many nats."""
    best = low
    for step in range(round(low * 1000) + 1, round(high * 1000)):
        try:
            kl = dry_run(_target(step / 1000), profile).kl
        except PlanError:
            break
        if kl is None or kl > nats:
            break
        best = step / 1000
    return round(best, 3)


def _halved(pattern: str, kind: str, profile: ModelProfile) -> DryRun | None:
    plan = Plan(pruning=(_cut(pattern, 0.5, kind),))
    try:
        dry = dry_run(plan, profile)
    except PlanError:
        return None
    return dry if dry.kl is not None else None


def _cut(pattern: str, ratio: float, kind: str = "structured") -> PruningRecommendation:
    return PruningRecommendation(
        layer=pattern, pruning_type="head" if kind == "heads" else "structured", pruning_ratio=ratio
    )


def _everything(ratio: float) -> Plan:
    return Plan(pruning=(_cut(".*", ratio),))


def _target(saving: float) -> Plan:
    return Plan(target=Target(metric=METRIC, saving=saving))


def _least(dry: DryRun, profile: ModelProfile) -> float:
    kl = dry_run(_target(_saved(dry, profile) - 1e-6), profile).kl
    assert kl is not None, "there is evidence"
    return kl


def _saved(dry: DryRun, profile: ModelProfile) -> float:
    return saved_share(dry.cuts, profile, METRIC)


def _shares(dry: DryRun, profile: ModelProfile) -> str:
    params, macs = (saved_share(dry.cuts, profile, metric) for metric in METRICS[:2])
    return f"{params:.1%} of the params and {macs:.1%} of the MACs"


def _down(share: float) -> float:
    """Return a share to a thousandth, no larger."""
    return int(share * 1000) / 1000


def _document(plan: Plan) -> dict[str, Any]:
    return json.loads(plan_text(plan))


def write_prompts(seen: Sequence[Seen], folder: Path = PROMPTS) -> None:
    """Write both agents' examples: a first plan for the first model, another one for the last."""
    for name, text in texts(seen).items():
        (folder / name).write_text(text, encoding="utf-8")


def texts(seen: Sequence[Seen]) -> dict[str, str]:
    """Return the files of `prompts/` by name; what a template would fill in is doubled."""
    found = {
        "analysis_examples.md": analysis_examples(seen[0]),
        "iterative_pruning_examples.md": iteration_examples(seen[-1]),
    }
    return {name: text.replace("$", "$$") for name, text in found.items()}


def main() -> int:
    """Measure where that is asked for, and write the examples."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", nargs="+", type=Path, default=[SHARED / "models" / f"{name}-cifar10" for name in ("vit", "resnet")]
    )
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "cifar10")
    parser.add_argument("--evidence", type=Path, default=EVIDENCE, help="what was measured")
    parser.add_argument("--measure", action="store_true", help="measure again before")
    asked = parser.parse_args()
    if asked.measure:
        use_own_ledger()
        write_evidence([measure(model, asked.data) for model in asked.models], asked.evidence)
    seen = read_evidence(asked.evidence)
    write_prompts(seen)
    for name, text in texts(seen).items():
        print(f"{name}\n\n{text}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
