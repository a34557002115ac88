"""Planners of all kinds behind the real client: what is taken of their plans is always something that may be measured."""

from pathlib import Path

import pytest
from advisors import advisor_of
from chat_server import chat_server
from loops import NUM_ATTEMPTS, best_saving, loop
from made import GOAL, evidence, profile
from personas import PERSONAS, drawn, uniform

from profiling_agent.planning.allocation import allowed_kl
from profiling_agent.schemas import ModelProfile
from profiling_agent.search.planners import Planner


def judged() -> ModelProfile:
    """Return six MLPs whose KLs double with each step, each unit a little dearer than the one before; time is saved too."""
    found = profile(6)
    kls = {
        unit.name: tuple(0.0002 * (1 + index) * 2**step for step in range(12)) for index, unit in enumerate(found.units)
    }
    return found.model_copy(
        update={"evidence": evidence(found.units, kls, latency=lambda keep: 8 * (512 - keep) / 512)}
    )


@pytest.mark.parametrize("planner", ["hybrid", "llm"])
@pytest.mark.parametrize("name", [name for name in PERSONAS if name != "silent"])
def test_whoever_plans_nothing_beyond_the_evidence_is_measured(tmp_path: Path, name: str, planner: Planner):
    found = judged()
    with chat_server(PERSONAS[name]) as server:
        attempts = loop(advisor_of(server, tmp_path), planner, found)

    assert 1 <= len(attempts) <= NUM_ATTEMPTS
    assert all(a.dry_run is not None and (a.dry_run.kl or 0.0) <= allowed_kl(GOAL) * 1.001 for a in attempts)
    if planner == "hybrid":
        assert best_saving(attempts, found) >= 0.9 * best_saving(loop(None, "rules", found), found)


def test_the_careful_one_is_at_least_as_good_as_the_rules(tmp_path: Path):
    found = judged()
    with chat_server(PERSONAS["careful"]) as server:
        attempts = loop(advisor_of(server, tmp_path), "llm", found)

    assert best_saving(attempts, found) >= best_saving(loop(None, "rules", found), found) - 1e-9
    assert all(a.plan.target is not None and a.plan.target.metric == "macs" for a in attempts)


@pytest.mark.parametrize("script", [drawn(), uniform])
def test_the_baselines_plan_by_ratios(tmp_path: Path, script):
    with chat_server(script) as server:
        attempts = loop(advisor_of(server, tmp_path), "llm", judged())

    assert all(attempt.plan.pruning and attempt.plan.target is None for attempt in attempts)
    assert len({attempt.plan.model_dump_json() for attempt in attempts}) == len(attempts)
