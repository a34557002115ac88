"""`doctor --model`: what can be cut of a model and deployed here, as tables or JSON."""

from collections.abc import Sequence

import typer
from rich.text import Text

from profiling_agent.cli.progress import open_display
from profiling_agent.cli.tables import folded_table
from profiling_agent.cli.terminal import console, echo_json, errors, refusing
from profiling_agent.deployment import registry
from profiling_agent.errors import RequestError
from profiling_agent.records import Deployability, Prunable, RuntimeName
from profiling_agent.reporting.units import count, percent
from profiling_agent.request import Request
from profiling_agent.support.look import Look

# It compiles for a minute or two in each scheme: whoever wants it asks for it by name.
NOT_UNASKED: frozenset[RuntimeName] = frozenset({"inductor"})


def look_at_model(model: str, *, revision: str | None, runtimes: str, json_: bool) -> None:
    """Cut a model, deploy what comes of it in every way, and show what worked; ends with 1 where no deployment did."""
    with refusing():
        request = Request.model_validate({"model": model, "revision": revision, "runtimes": runtimes})
        names, left_out = _installed(request)
        with open_display(errors) as display, Look(display.stage("doctor")) as look:
            prunable = look.prunable(model, revision)
            rows = list(look.deployable(look.forms[-1], names))
    if json_:
        echo_json(
            {
                "prunable": prunable.model_dump(mode="json"),
                "deployable": [row.model_dump(mode="json") for row in rows],
                "left_out": left_out,
            }
        )
    else:
        _show(prunable, rows, left_out)
    raise typer.Exit(0 if any(not row.refused for row in rows) else 1)


def _installed(request: Request) -> tuple[list[RuntimeName], list[str]]:
    """Return the runtimes to try, and a line for each that isn't."""
    names, left_out = list[RuntimeName](), list[str]()
    for name in request.runtime_names:
        line = registry.missing(name)
        if line and request.names_runtimes:
            raise RequestError(f"runtimes asks for {name}, but {line}")
        if line:
            left_out.append(f"{name}: {line}")
        elif name in NOT_UNASKED and not request.names_runtimes:
            left_out.append(f"{name}: it compiles for minutes; --runtimes {name} tries it")
        else:
            names.append(name)
    return names, left_out


def _show(prunable: Prunable, rows: Sequence[Deployability], left_out: Sequence[str]) -> None:
    spec = prunable.input
    console.print(
        Text(
            f"{prunable.architecture}, {count(prunable.params)} params, images of {spec.channels}x{spec.height}x{spec.width}"
        )
    )
    table = folded_table("what can be cut", "kind or reason", "number", "of it")
    for kind, number in prunable.units.items():
        table.add_row(kind, str(number), Text("can be cut"))
    for kind, reason in prunable.absent.items():
        table.add_row(kind, "none", Text(reason))
    for code, number in prunable.refused.items():
        table.add_row(code, str(number), Text(f"stay, as {prunable.examples[code]}"))
    console.print(table)
    cut = f"a quarter off every unit: {percent(prunable.cut_share)} of the params"
    console.print(Text(cut if prunable.units else "no unit can be cut; it is deployed whole"))
    deployed = folded_table(
        "what can be deployed here", "deployment", "works", "bytes", "distance", "layers not in float32"
    )
    for row in rows:
        if row.refused:
            deployed.add_row(row.deployment.name, "no", "", "", Text(row.refused))
        else:
            distance = f"{row.distance:.1g}"
            deployed.add_row(row.deployment.name, "yes", percent(row.size_ratio), distance, str(row.num_layers))
    console.print(deployed)
    console.print(
        Text("bytes: of the unpruned float32 model's; distance: of the logits from float32's, relative, on noise")
    )
    for line in left_out:
        console.print(Text(f"not tried: {line}"))
