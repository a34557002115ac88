"""`sweep.html`: one file that loads nothing, with the front of all runs, a table that sorts and filters, and what failed."""

from collections import defaultdict
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from markupsafe import Markup

from profiling_agent.reporting.charts import ACCENT, MUTED, add_front, add_points, chart, library, new_figure
from profiling_agent.reporting.html import environment, source
from profiling_agent.sweep.results import RunResult

PACKAGE = "profiling_agent.sweep"


def render_sweep(results: Sequence[RunResult], number: int) -> str:
    """Return the page of what was done so far, of `number` runs."""
    jinja = environment(PACKAGE)
    done = [result for result in results if not result.failure]
    fronts = {
        title: Markup(chart(front(rows), f"chart-front-{index}"))
        for index, (title, rows) in enumerate(comparable(done).items())
    }
    return jinja.get_template("sweep.html.jinja").render(
        results=done,
        failures=[result for result in results if result.failure],
        number=number,
        num_met=sum(result.is_met for result in done),
        fronts=fronts,
        library=Markup(library()),
        style=Markup(source("report.css")),
        script=Markup(source("report.js")),
    )


def comparable(results: Sequence[RunResult]) -> Mapping[str, list[RunResult]]:
    """Return the results that may stand on one picture: of one data set and one machine, as times of two are never compared."""
    found: defaultdict[str, list[RunResult]] = defaultdict(list)
    for result in results:
        found[f"{result.data}, on {result.machine}"].append(result)
    return found


def front(results: Sequence[RunResult]) -> go.Figure:
    """Return top-1 on held-out images against milliseconds an image: what was returned, and the models as they came."""
    figure = new_figure("Accuracy against latency", "milliseconds an image", "top-1, held-out images")
    before = {
        (result.request.model, result.request.batch_size): (result.ms_before, result.top1_before, result.request.model)
        for result in results
    }
    returned = [
        (
            result.ms,
            result.top1,
            f"{result.request.model}, {result.deployment}, {'MET' if result.is_met else str(result.outcome)}",
        )
        for result in results
    ]
    add_points(
        figure,
        "as it came, eager float32",
        MUTED,
        list(before.values()),
        symbol="circle-open",
        line={"width": 2, "color": MUTED},
    )
    add_points(figure, "returned", ACCENT, returned)
    figure.update_xaxes(type="log")
    return add_front(figure, returned)
