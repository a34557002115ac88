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
RUNS = ("vit", "deit", "swin", "resnet")
sys.path.append(str(FOLDER.parent))

from pruning.families import FAMILIES, TIMM_FAMILIES, spec_of  # noqa: E402


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


def decisions(report: dict[str, Any]) -> dict[str, Any]:
    """Return what a run decided, from its report as JSON: everything that times have no part in."""
    return {
        "outcome": report["verdict"]["outcome"],
        "deployment": report["best"]["deployment"]["runtime"] + " " + report["best"]["deployment"]["scheme"],
        "params": [report["baseline"]["params"], report["best"]["params"]],
        "attempts": [
            {
                "target": [attempt["plan"]["target"]["metric"], attempt["plan"]["target"]["saving"]],
                "kept": {cut["unit"]["name"]: cut["keep"] for cut in attempt["dry_run"]["cuts"]},
                "accepted": attempt["accepted"],
            }
            for attempt in report["attempts"]
        ],
        "keys": sorted(report),
    }


def run(name: str, output: Path) -> dict[str, Any]:
    """Return the decisions of a small run on an embedded model for the smallest file, with one plan."""
    request = Request(
        model=f"reference:{name}",
        runtimes="eager",
        quantize_dtype="none",
        objective="size",
        max_size_ratio=0.9,
        max_accuracy_drop=0.05,
        max_iterations=1,
        num_sessions=2,
        output=str(output),
    )
    return decisions(json.loads(optimize(request).model_dump_json()))


def taken(kind: str) -> Any:
    """Take a snapshot of one kind: `commands`, `public_names`, `units` or `runs`."""
    if kind == "runs":
        with tempfile.TemporaryDirectory() as folder:
            return {name: run(name, Path(folder)) for name in RUNS}
    if kind == "units":
        return {name: units(name) for name in FAMILIES if name not in TIMM_FAMILIES}
    return commands() if kind == "commands" else public_names()


def stored(kind: str) -> Any:
    """Return the snapshot of a kind as it was stored."""
    return json.loads((FOLDER / f"{kind}.json").read_text(encoding="utf-8"))


if __name__ == "__main__":
    for kind in sys.argv[1:] or ("commands", "public_names", "units"):
        (FOLDER / f"{kind}.json").write_text(json.dumps(taken(kind), indent=1) + "\n", encoding="utf-8")
