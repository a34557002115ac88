"""Omissions: what a run left out for want of time, in one list."""

from profiling_agent.records import DeploymentOption, StopReason
from profiling_agent.reporting.report import RunReport


def omissions(report: RunReport) -> tuple[str, ...]:
    """Return what was left out for want of time, by the time budget or in proportion to the model, in the order of the run."""
    options = report.deployment_search.options if report.deployment_search else ()
    untried = [option for option in options if option.wants_time and option.deployed is None]
    unmeasured = [option for option in options if option.wants_time and option.deployed is not None]
    number, most = len(report.attempts), report.request.max_iterations
    seen, heldout = report.heldout.predictions.num_images, report.acquired.heldout.num_images
    accuracy = next(term for term in report.verdict.terms if term.name == "accuracy")
    is_cut = accuracy.holds and accuracy.bound is not None and accuracy.bound > accuracy.required and seen < heldout
    said = (
        (bool(untried), f"deployments that were not tried: {_names(untried)}"),
        (bool(unmeasured), f"deployments that were made and not measured: {_names(unmeasured)}"),
        (report.stopped is StopReason.TIME_SPENT, f"plans: {number} of up to {most} were measured"),
        (is_cut, f"held-out images: {seen:,} of {heldout:,} were looked at"),
    )
    return tuple(text for holds, text in said if holds)


def _names(options: list[DeploymentOption]) -> str:
    return ", ".join(option.deployment.name for option in options)
