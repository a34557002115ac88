"""Snapshots of what must not change by accident; `python tests/golden/snapshots.py` writes them again."""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import typer

import profiling_agent
from profiling_agent import Request, optimize
from profiling_agent.cli.main import app
from profiling_agent.pruning.units import find_units

FOLDER = Path(__file__).parent
sys.path.append(str(FOLDER.parent))

from pruning.families import FAMILIES, TIMM_FAMILIES, spec_of  # noqa: E402

REFERENCES = ("vit", "deit", "swin", "resnet")


def commands() -> dict[str, list[str]]:
    """Return the option names of every command."""
    group: Any = typer.main.get_command(app)
    return {
        name: sorted(option for parameter in command.params for option in parameter.opts)
        for name, command in sorted(group.commands.items())
    }


def public_names() -> list[str]:
    """Return the names that the package exports."""
    return sorted(profiling_agent.__all__)


def units(family: str) -> dict[str, Any]:
    """Return what can be pruned of a tiny model of a family, and the code of each refusal."""
    model = FAMILIES[family]()
    found = find_units(model, spec_of(model), {})
    return {
        "units": {unit.name: [unit.kind, unit.width, unit.step, unit.params_per_channel] for unit in found.units},
        "refused": {layer: reason.split(":")[0] for layer, reason in found.refusals.items()},
    }


def run(model: str, output: Path) -> dict[str, Any]:
    """Run a reference model to its verdict; return what depends on no clock."""
    report = optimize(
        Request(
            model=f"reference:{model}",
            output=str(output),
            run_id=model,
            runtimes="eager",
            quantize_dtype="none",
            objective="size",
            max_size_ratio=0.9,
            max_accuracy_drop=0.05,
            max_iterations=1,
            num_sessions=2,
        )
    )
    (attempt,) = report.attempts
    return {
        "plan": attempt.plan.model_dump(mode="json"),
        "dry_run": attempt.dry_run and attempt.dry_run.model_dump(mode="json"),
        "accepted": attempt.accepted,
        "outcome": report.verdict.outcome,
        "report_keys": sorted(report.model_dump(mode="json")),
    }


def taken(kind: str) -> Any:
    """Take a snapshot of one kind: `commands`, `public_names`, `units` or `runs`."""
    if kind == "units":
        return {name: units(name) for name in FAMILIES if name not in TIMM_FAMILIES}
    if kind == "runs":
        with tempfile.TemporaryDirectory() as output:
            return {model: run(model, Path(output)) for model in REFERENCES}
    return commands() if kind == "commands" else public_names()


def stored(kind: str) -> Any:
    """Return the snapshot of a kind as it was stored."""
    return json.loads((FOLDER / f"{kind}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    for kind in sys.argv[1:] or ("commands", "public_names", "units", "runs"):
        (FOLDER / f"{kind}.json").write_text(json.dumps(taken(kind), indent=1) + "\n", encoding="utf-8")
