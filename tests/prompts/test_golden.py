"""Whole prompts as a language model reads them, beside the files in `golden/`.

Where one of them has changed on purpose, delete its file: the next run writes it, and fails so that somebody looks at it.
"""

from dataclasses import replace
from pathlib import Path

import pytest
from asked import questions, searched, setting
from full_depth import judged_deep
from made import GOAL, attempt, journal, race_result

from profiling_agent.planning.allocation import dry_run
from profiling_agent.planning.llm_planner import plan_question
from profiling_agent.planning.rules import analyse
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import Deployment, DeploymentSearch
from profiling_agent.search.deployments import PROMISE

GOLDEN = Path(__file__).parent / "golden"
MAX_PROMPT = 16_000


@pytest.mark.parametrize("agent", ["input_shape_resolver", "analysis", "iterative_pruning"])
def test_a_prompt_reads_as_it_did(agent: str):
    asked = questions()[agent]
    text = f"{asked.instructions}\n=== evidence ===\n\n{asked.evidence}"
    path = GOLDEN / f"{agent}.txt"
    if not path.exists():
        path.write_text(text, encoding="utf-8")
        pytest.fail(f"{path.name} was written: look at it, and commit it")

    assert text == path.read_text(encoding="utf-8")


def searched_everywhere() -> DeploymentSearch:
    """Return a search among all runtimes and schemes that are known, in each of which all was measured."""
    model = searched().options[-1]
    options = tuple(
        model.model_copy(
            update={"deployment": Deployment(runtime=runtime, scheme=scheme, recommendations=recommend(scheme))}
        )
        for runtime, scheme in PROMISE
    )
    return DeploymentSearch(options=options, chosen=options[0].deployment)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["ViT-B/16", "Swin-B", "ResNet-101"])
def test_a_model_of_full_depth_fits(name: str):
    found = judged_deep(name)
    rules = analyse(found, GOAL)
    raced = race_result("both", 2.5, 2.4, 2.6)
    tried = [
        attempt(number, 0.2, accepted=False, correct=861).model_copy(
            update={"plan": rules, "dry_run": dry_run(rules, found), "race_result": raced, "calibration_kl": 0.0123}
        )
        for number in range(1, 5)
    ]
    everywhere = tuple(f"{runtime} {scheme}" for runtime, scheme in PROMISE)
    seen = journal(*tried).model_copy(update={"deployment_search": searched_everywhere()})

    opened = seen.model_copy(update={"attempts": ()})
    first = plan_question(found, GOAL, rules, opened, setting=replace(setting(GOAL, is_first=True), schemes=everywhere))
    later = plan_question(
        found, GOAL, rules, seen, attempts_left=1, setting=replace(setting(GOAL, is_first=False), schemes=everywhere)
    )

    assert len(found.units) >= 24
    assert found.params > 40e6
    for asked in (first, later):
        assert len(asked.instructions) + len(asked.evidence) < MAX_PROMPT
        # The attempts, the deployments, each group's row and what can be reached are there, whatever else had to go.
        assert "were left out" not in asked.evidence.split("Single units")[0]
        assert "(its maximum)" in asked.evidence
    assert later.evidence.count("times as fast as the baseline") >= len(tried)
