"""Every family in every deployment: what can be cut, made, opened elsewhere, and how far it is from float32; docs/support.md is made of it.

    python benchmarks/support.py [--families NAME...] [--runtimes NAME...] [--forms whole pruned] [--json FILE] [--table FILE...]

Tiny models of each architecture with random weights, whole and with a quarter off every unit, as in the tests. Distances are
||logits - float32 logits|| / ||float32 logits|| on noise: they say that a deployment computes the same function, not what it costs.
With --table the page is written anew from the files alone. timm's families are looked at where it is installed: of `make test-timm`,
with PYTHONPATH=.venv/timm:tests.
"""

import argparse
import json
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from checks import ROOT, Check, finish, stamped
from workshop import Made, Workshop, deployments

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.jobs.tasks import EvaluateTask
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.pruning.widths import snap
from profiling_agent.runtimes import registry
from profiling_agent.schemas import RUNTIMES, Cut, RuntimeName, Scheme, SplitInfo, by_cause

sys.path.append(str(ROOT / "tests"))

from pruning.families import FAMILIES, TIMM_FAMILIES, processor_of, spec_of

RESULTS, TIMM_RESULTS = (ROOT / "benchmarks" / "results" / name for name in ("support.json", "support_timm.json"))
PAGE = ROOT / "docs" / "support.md"
SHORT: dict[Scheme, str] = {
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "dynamic": "int8 dynamic",
    "static": "int8 static",
    "static_nncf": "int8 NNCF",
}
UNTRIED = "-"
EXPECTED = ("computes something else", "the model has no nn.Linear")
HERE = [name for name in FAMILIES if name not in TIMM_FAMILIES or find_spec("timm")]
KINDS = {"heads": "heads", "mlp": "MLP", "conv_inner": "convolution", "inverted_residual": "inverted residual"}


def measured(
    families: Sequence[str], runtimes: Sequence[RuntimeName], wanted: Sequence[str]
) -> Iterator[dict[str, Any]]:
    """Give a row for each family: what can be cut, and every deployment of these forms."""
    for family in families:
        model = FAMILIES[family]()
        spec, params = spec_of(model), num_params(model)
        found = find_units(model, spec, {})
        cuts = [Cut(unit=unit, keep=snap(unit, 0.25), requested_ratio=0.25) for unit in found.units]
        cuts = [cut for cut in cuts if cut.keep < cut.unit.width]
        forms: dict[str, Any] = {"whole": (model, ())}
        if cuts:
            forms["pruned"] = (prune_model(model, cuts, spec=spec).model, cuts)
        row: dict[str, Any] = {
            "family": family,
            "architecture": type(model).__name__,
            "units": Counter(unit.kind.value for unit in found.units),
            "refused": {code: len(layers) for code, layers in by_cause(found.refusals).items()},
            "cut_share": 1 - num_params(forms["pruned"][0]) / params if cuts else 0.0,
            "deployable": [],
        }
        with TemporaryDirectory() as folder, Workshop(Path(folder)) as workshop:
            images = workshop.noise(16, spec.height)
            for form in [form for form in wanted if form in forms]:
                module, its = forms[form]
                saved = workshop.add(module, form, spec=spec, processor=processor_of(spec), cuts=its)
                for deployment in [each for each in deployments() if each.runtime in runtimes]:
                    made = workshop.deploy(saved, deployment, images, batch_size=8)
                    told: dict[str, Any] = {"form": form, "runtime": deployment.runtime, "scheme": deployment.scheme}
                    told["num_layers"] = len(made.deployed.layers) if made.deployed else 0
                    told["distance"] = made.deployed.distance if made.deployed else 0.0
                    row["deployable"].append(told | {"refused": made.reason or opening_error(workshop, made, images)})
        refused = [each for each in row["deployable"] if each["refused"]]
        print(
            f"  {family}: {len(row['deployable']) - len(refused)} of {len(row['deployable'])} deployments", flush=True
        )
        yield row


def num_params(model: Any) -> int:
    """Return the number of a model's parameters."""
    return sum(parameter.numel() for parameter in model.parameters())


def opening_error(workshop: Workshop, made: Made, images: SplitInfo) -> str:
    """Return why a process that did not make a deployment can't run it, or an empty string."""
    assert made.deployed is not None, "only what was made is opened"
    task = EvaluateTask(isolated=True, model=made.deployed.model, split=images, shard=0, batch_size=8, device="cpu")
    try:
        workshop.jobs.run(task)
    except ProfilingAgentError as error:
        return str(error)
    return ""


def joined(files: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the rows of all files, those of a family as one with the deployments of all."""
    rows = dict[str, dict[str, Any]]()
    for file in files:
        for row in json.loads(file.read_text(encoding="utf-8"))["rows"]:
            if known := rows.get(row["family"]):
                known["deployable"] += row["deployable"]
            else:
                rows[row["family"]] = row
    return list(rows.values())


def page(files: Sequence[Path]) -> str:
    """Return docs/support.md, as these files of results say it; what several say of one family is one row."""
    rows = joined(files)
    furthest = max((each["distance"] for row in rows for each in row["deployable"] if not each["refused"]), default=0.0)
    columns = list(dict.fromkeys((each["runtime"], each["scheme"]) for row in rows for each in row["deployable"]))
    lines = [
        "# What can be cut and deployed",
        "",
        "Made by `benchmarks/support.py` from "
        + " and ".join(f"`benchmarks/results/{file.name}`" for file in files)
        + ".",
        "",
        "Tiny models of each architecture with random weights. A number is the distance of the logits from float32's, relative, on noise: whole / with a quarter off "
        "every unit. It says that the deployment can be made, and computes the model's function as near as its numbers can: the logits of random weights on noise lie close together, so that int8, whose ranges are of "
        f"16 images here, is up to {furthest:.1g} of them away, and no measure of what it costs a trained model, which a run measures. Each was opened by a process that had not made it; "
        f"{UNTRIED} is what was not tried: torch.compile (inductor) takes up to minutes for each, so of timm's it has those that are cut.",
        "",
        "| | units | " + " | ".join(f"{runtime} {SHORT[scheme]}" for runtime, scheme in columns) + " |",
        "|---|---|" + "---|" * len(columns),
    ]
    notes: list[str] = []
    for row in rows:
        units = (
            ", ".join(f"{number} {KINDS.get(kind, kind)}" for kind, number in sorted(row["units"].items())) or "none"
        )
        cells = [_cell(row, runtime, scheme, notes) for runtime, scheme in columns]
        lines.append(f"| {row['family']} | {units} | " + " | ".join(cells) + " |")
    lines += ["", *(f"{number}. {note}" for number, note in enumerate(notes, 1))]
    lines += ["", "Layers that stay, by the code of the reason:", "", "| | layers |", "|---|---|"]
    for row in rows:
        codes = ", ".join(f"{number} {code}" for code, number in sorted(row["refused"].items())) or "none"
        lines.append(f"| {row['family']} | {codes} |")
    return "\n".join(lines) + "\n"


def _cell(row: dict[str, Any], runtime: str, scheme: str, notes: list[str]) -> str:
    tried = {each["form"]: each for each in row["deployable"] if (each["runtime"], each["scheme"]) == (runtime, scheme)}
    forms = dict.fromkeys(each["form"] for each in row["deployable"])
    return " / ".join(_told(tried[form], notes) if form in tried else UNTRIED for form in forms)


def _told(deployed: dict[str, Any], notes: list[str]) -> str:
    if not deployed["refused"]:
        return f"{deployed['distance']:.1g}"
    note = deployed["refused"]
    if note not in notes:
        notes.append(note)
    return f"no ({notes.index(note) + 1})"


def main() -> int:
    """Look at families; return 1 where a check does not hold."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", nargs="*", default=HERE)
    parser.add_argument("--runtimes", nargs="*", default=[name for name in RUNTIMES if not registry.missing(name)])
    parser.add_argument("--forms", nargs="*", choices=("whole", "pruned"), default=["whole", "pruned"])
    parser.add_argument("--json", type=Path, default=RESULTS)
    parser.add_argument(
        "--table", type=Path, nargs="+", help="write docs/support.md from these results, and measure nothing"
    )
    asked = parser.parse_args()
    if asked.table:
        PAGE.write_text(page(asked.table), encoding="utf-8")
        return 0
    rows = [stamped(row) for row in measured(asked.families, asked.runtimes, asked.forms)]
    every = [each for row in rows for each in row["deployable"]]
    checks = [
        Check.at_most("families without a unit", sum(not row["units"] for row in rows), 0),
        Check.at_most(
            "deployments refused for another reason than that OpenVINO computes something else, or that there is no layer of the kind",
            sum(not any(words in each["refused"] for words in EXPECTED) for each in every if each["refused"]),
            0,
        ),
    ]
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
