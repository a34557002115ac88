"""Benchmarks' pages: checks, tables, support and pictures."""

import json
import math
from pathlib import Path

import full_run
import planners
import pytest
import questions
from checks import Check, Estimate, commit, finish, stamped
from deployments import all_deployments, deployment
from PIL import Image
from pruning.families import FAMILIES, TIMM_FAMILIES
from report_picture import MAX_BYTES, WIDTH
from sessions import Sessions, entries, pool
from support import PAGE, RESULTS, TIMM_RESULTS, joined, page

from profiling_agent.measure.intervals import latency_stats
from profiling_agent.reporting.records import Records
from profiling_agent.schemas import DeploymentOption, Race, RaceResult


def test_a_check_holds_at_the_worse_end():
    wide, narrow = Estimate(1.16, 1.05, 1.27), Estimate(1.16, 1.15, 1.17)

    assert not Check.at_least("over the peer", wide, 1.15).holds
    assert Check.at_least("over the peer", narrow, 1.15).holds
    assert not Check.at_most("points lost", Estimate(0.5, 0.1, 1.1), 1.0).holds
    assert Check.at_most("points lost", Estimate(0.5, 0.1, 0.9), 1.0).holds
    assert Check.at_most("bytes", 3, 3).holds
    assert str(Check.at_least("over the peer", wide, 1.15)) == "FAILS  over the peer: 1.16, at worst 1.05 (bound 1.15)"


def test_sessions_are_pooled_by_students_t():
    # Mean 0.2, standard deviation 0.1, of three: 4.303 * 0.1 / sqrt(3) = 0.2484.
    pooled = pool([0.1, 0.2, 0.3])

    assert pooled.value == pytest.approx(math.exp(0.2))
    assert (pooled.low, pooled.high) == pytest.approx((math.exp(0.2 - 0.24841), math.exp(0.2 + 0.24841)), rel=1e-4)
    with pytest.raises(ValueError, match="at least 2"):
        pool([0.1])


def raced(*times_ms: list[float]) -> Race:
    """Return one session of models with these times in its turns."""
    results = [
        RaceResult(
            model=model,
            latency=latency_stats(own_ms, 1),
            speedup=1,
            speedup_low=1,
            speedup_high=1,
            turns=(tuple(first / own for first, own in zip(times_ms[0], own_ms, strict=False)),),
        )
        for model, own_ms in zip(entries(["a", "b", "c"]), times_ms, strict=True)
    ]
    return Race(results=tuple(results), num_sessions=1)


def test_models_are_compared_within_sessions_over_the_repeats_that_both_were_in():
    held = [raced([4.0, 4.0, 4.0], [2.0, 2.0], [1.0, 1.0, 9.0]), raced([8.0, 8.0], [4.0, 4.0], [2.0, 2.0])]
    sessions = Sessions([["a"], ["b"], ["c"]], 1, 1.0, held=held)

    assert sessions.over(1) == Estimate(2.0, 2.0, 2.0)
    assert sessions.over(2, 1).value == pytest.approx(2.0)
    assert sessions.over(0) == Estimate(1.0, 1.0, 1.0)


def test_rows_say_what_they_were_measured_with(tmp_path):
    path = tmp_path / "rows.json"
    own = stamped({"speedup": 2.0}, session=4)

    assert finish([Check.at_most("one", 2, 1)], [own, {"a": 1, "commit": "abc1234"}], path) == 1

    first, second = json.loads(path.read_text())["rows"]
    assert first == own
    assert (first["session"], first["commit"]) == (4, commit())
    assert first["measured_at"].endswith("+00:00")
    assert (second["session"], second["commit"]) == (1, "abc1234")


def test_a_planner_may_not_be_slower_than_the_rules_at_the_lower_end():
    def row(planner: str, *over: float) -> dict:
        return {"model": "vit", "persona": "careful", "planner": planner, "seconds": 60.0, "over_rules": list(over)}

    rows = [row("rules", 1.0, 1.0, 1.0), row("hybrid", 1.0, 0.9, 1.1), row("llm", 0.7, 0.6, 0.8)]
    found = {check.name: check.holds for check in planners.checks_of(rows)}

    assert found["vit, careful, hybrid: speed over the rules'"] is False
    assert "vit, careful, llm: speed over the rules'" not in found
    assert [name for name, holds in found.items() if not holds] == ["vit, careful, hybrid: speed over the rules'"]


def failed(name: str, reason: str) -> DeploymentOption:
    return DeploymentOption(deployment=deployment(name), reason=reason)


def test_a_deployment_that_failed_is_missed_where_the_tiny_model_has_it():
    options = [
        failed("openvino static", "could not be made: why"),
        failed("inductor static", "dropped out of the race"),
        failed("eager bfloat16", "loses 3.0 points"),
    ]

    assert full_run.missed(options, "vit") == [
        "openvino static: could not be made: why",
        "inductor static: dropped out of the race",
    ]
    # docs/support.md has it among what OpenVINO computes otherwise.
    assert full_run.missed(options[:1], "levit") == []


def test_every_popular_model_has_a_tiny_one_that_was_taken_through_all_deployments():
    every = {(each.runtime, each.scheme) for each in all_deployments()}

    assert {model.family for model in full_run.POPULAR.values()} <= set(FAMILIES)
    assert full_run.can_do("vit") == every


def test_the_runs_of_the_questions_can_be_read_and_have_every_answer():
    runs = {name: Records(questions.RUNS / name) for name in ("met", "missed")}
    reports = {name: records.report.model_dump(mode="json") for name, records in runs.items()}

    for question in questions.QUESTIONS:
        assert questions.field_of(reports[question.run], question.field) is not None, question
    for records in runs.values():
        assert "first_plan" in json.loads(records.what_if(max_size_ratio=0.5))


ROOT = Path(__file__).parents[2]
PICTURE = ROOT / "docs" / "report.png"


def test_the_picture_is_small_enough_for_a_readme():
    assert PICTURE.stat().st_size <= MAX_BYTES
    with Image.open(PICTURE) as picture:
        assert picture.width == WIDTH
    assert f"({PICTURE.relative_to(ROOT)})" in (ROOT / "README.md").read_text(encoding="utf-8")


def test_the_page_is_that_of_the_results():
    assert PAGE.read_text(encoding="utf-8") == page([RESULTS, TIMM_RESULTS])


def test_every_family_was_taken_through_every_deployment():
    rows = joined([RESULTS, TIMM_RESULTS])
    every = {(form, each.runtime, each.scheme) for form in ("whole", "pruned") for each in all_deployments()}
    # Its compiler takes as long for timm's as for all others, and compiles nothing else of them.
    compiled = {(form, runtime, scheme) for form, runtime, scheme in every if (form, runtime) == ("whole", "inductor")}

    assert {row["family"] for row in rows} == set(FAMILIES)
    for row in rows:
        done = {(each["form"], each["runtime"], each["scheme"]) for each in row["deployable"]}
        assert done == (every - compiled if row["family"] in TIMM_FAMILIES else every), row["family"]
