"""Runs side by side: what makes their times no comparison is said, and nothing where there is nothing."""

from pathlib import Path
from typing import Any

from profiling_agent.reporting.report import RunReport, differences
from profiling_agent.reporting.results import read_report


def elsewhere(report: RunReport, **changed: Any) -> RunReport:
    return report.model_copy(update={"environment": report.environment.model_copy(update=changed)})


def test_runs_of_one_machine_and_one_installation_differ_in_nothing(finished: Path):
    report = read_report(finished)

    assert differences({"mild": report, "bold": report}) == ()
    assert differences({"alone": report}) == ()


def test_runs_of_two_processors_are_told_apart_by_name(finished: Path):
    report = read_report(finished)
    xeon = elsewhere(report, cpu="Xeon 9000", num_threads=64, cpu_flags=("amx_int8",))

    (line,) = differences({"here": report, "again": report, "there": xeon})

    assert line.startswith("runs of different machines, whose times and speed-ups aren't compared")
    assert f"here, again: {report.environment.machine}" in line
    assert "there: Xeon 9000, 64 threads (amx_int8;" in line
    assert "profiling-agent race" in line


def test_one_name_for_processors_that_can_do_different_things_is_no_one_machine(finished: Path):
    # A cloud calls them all "Intel(R) Xeon(R) Processor".
    report = elsewhere(read_report(finished), cpu="Xeon", cpu_flags=("avx2",))

    (line,) = differences({"old": report, "new": elsewhere(report, cpu_flags=("avx2", "avx512_vnni"))})

    assert "old: Xeon" in line
    assert "(avx2, avx512_vnni;" in line


def test_other_versions_threads_and_batches_are_named_one_a_line(finished: Path):
    report = read_report(finished)
    environment = report.environment
    newer = elsewhere(report, libraries=environment.libraries | {"torch": "99.0"}, runtimes={})
    larger = newer.model_copy(update={"request": report.request.model_copy(update={"batch_size": 77})})

    said = differences({"then": report, "now": larger})

    assert said[0] == f"times are of batches of different sizes: then: {report.request.batch_size}; now: 77"
    assert f"times are of different versions of torch: then: {environment.libraries['torch']}; now: 99.0" in said
    # What is not installed is a difference too.
    assert any(line.endswith("now: none") for line in said) == bool(environment.runtimes)
    assert len(said) == 2 + len(environment.runtimes)
