"""Machines of runs: which times stand beside each other, and which don't since something other than the model differs."""

from collections.abc import Mapping

from profiling_agent.records import Environment
from profiling_agent.reporting.report import RunReport


def differences(reports: Mapping[str, RunReport]) -> tuple[str, ...]:
    """Return a line for each thing that makes the times of these runs incomparable; none where one machine took all alike."""
    lines: list[str] = []
    places = {name: place(report.environment) for name, report in reports.items()}
    if _differ(places):
        lines.append(
            f"runs of different machines, whose times and speed-ups aren't compared: {_each(places)}; "
            "race their models on one of them (profiling-agent race)"
        )
    sizes = {name: f"{report.request.batch_size}" for name, report in reports.items()}
    if _differ(sizes):
        lines.append(f"times are of batches of different sizes: {_each(sizes)}")
    versions = {name: report.environment.versions for name, report in reports.items()}
    for library in sorted({library for held in versions.values() for library in held}):
        held = {name: each.get(library, "none") for name, each in versions.items()}
        if _differ(held):
            lines.append(f"times are of different versions of {library}: {_each(held)}")
    return tuple(lines)


def place(environment: Environment) -> str:
    """Return all that times depend on but software, in words."""
    flags = ", ".join(environment.cpu_flags) or "no vector extensions of note"
    return f"{environment.machine} ({flags}; {environment.system}, {environment.device})"


def _differ(held: Mapping[str, str]) -> bool:
    return len({*held.values()}) > 1


def _each(held: Mapping[str, str]) -> str:
    """Return what is held, each said once with the runs that have it."""
    runs: dict[str, list[str]] = {}
    for name, value in held.items():
        runs.setdefault(value, []).append(name)
    return "; ".join(f"{', '.join(names)}: {value}" for value, names in runs.items())
