"""What a run left out for want of time is said in one list, in both reports."""

from pathlib import Path

from profiling_agent.reporting.render import render_html, render_markdown
from profiling_agent.reporting.report import omissions
from profiling_agent.reporting.results import read_report
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import Deployment, DeploymentOption, DeploymentSearch, StopReason

UNTRIED = DeploymentOption(
    deployment=Deployment(runtime="inductor", scheme="static", recommendations=recommend("static")),
    reason="not tried: a conversion takes minutes",
    wants_time=True,
)


def test_what_wanted_time_is_listed_in_the_order_of_the_run(finished: Path):
    report = read_report(finished)
    seen = report.heldout.predictions.num_images
    search = DeploymentSearch(options=(UNTRIED, UNTRIED.model_copy(update={"wants_time": False})), chosen=None)
    accuracy, *others = report.verdict.terms
    undecided = (accuracy.model_copy(update={"holds": True, "bound": accuracy.required + 0.01}), *others)
    hurried = report.model_copy(
        update={
            "deployment_search": search,
            "stopped": StopReason.TIME_SPENT,
            "verdict": report.verdict.model_copy(update={"terms": undecided}),
            "request": report.request.model_copy(update={"max_iterations": 4}),
            "acquired": report.acquired.model_copy(
                update={"heldout": report.acquired.heldout.model_copy(update={"num_images": seen + 1000})}
            ),
        }
    )

    said = omissions(hurried)

    assert said == (
        "deployments that were not tried: inductor static",
        f"plans: {len(report.attempts)} of up to 4 were measured",
        f"held-out images: {seen:,} of {seen + 1000:,} were looked at",
    )
    page, text = render_html(hurried), render_markdown(hurried)
    for line in said:
        assert f"<li>{line}</li>" in page
        assert f"\n- {line}\n" in text


def test_a_run_that_left_nothing_out_has_no_list(finished: Path):
    report = read_report(finished)
    whole = report.model_copy(
        update={
            "deployment_search": None,
            "stopped": StopReason.CONVERGED,
            "request": report.request.model_copy(update={"time_budget": None}),
        }
    )

    assert omissions(whole) == ()
    assert "want of time" not in render_html(whole)
    assert "want of time" not in render_markdown(whole)
