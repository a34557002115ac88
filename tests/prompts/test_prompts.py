"""Prompts: their examples, their numbers, and the texts that the LLM gets."""

import json
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from advisors import Scripted, advisor_of
from chat_server import Said
from deployments import all_deployments
from full_depth import judged_deep
from prompt_records import questions, searched, setting
from sample_records import GOAL, attempt, journal, race_result
from simulated_runs import best_saving, loop

from profiling_agent.planning.allocation import allowed_kl, dry_run, saved_share
from profiling_agent.planning.llm_planner import Planning, Submission
from profiling_agent.planning.rules import analyse
from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import DeploymentSearch, Goal, Journal, ModelProfile

# What was measured of a ViT and a ResNet on CIFAR-10, whose numbers the examples have: a profile, a journal and a goal each.
RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "prompt_examples.json"
SEEN = [
    SimpleNamespace(
        profile=ModelProfile.model_validate(row["profile"]),
        journal=Journal.model_validate(row["journal"]),
        goal=Goal.model_validate(row["goal"]),
    )
    for row in map(json.loads, RECORD.read_text(encoding="utf-8").splitlines())
]
# What a nat costs of the images in the world of each model; in the second one's a bold first plan is refused.
WORLDS = ((0, 0.6), pytest.param(1, 1.2, marks=pytest.mark.slow))


def answers(text: str) -> list[dict]:
    return [json.loads(line) for line in re.findall(r"^\{.*\}$", text, re.MULTILINE)]


def examples(agent: str) -> list[Submission]:
    """Return the arguments of the calls that a prompt has as examples; without a plan they are of stop."""
    return [Submission.model_validate({"plan": None, **one}) for one in answers(render(f"{agent}_examples"))]


def test_the_first_plan_does_what_its_example_says_and_the_bad_one_costs_more_than_the_allocators():
    seen, (good, bad) = SEEN[0], examples("analysis")
    assert good.plan is not None
    assert bad.plan is not None
    dry, cost = dry_run(good.plan, seen.profile), dry_run(bad.plan, seen.profile)

    assert dry.kl is not None
    assert cost.kl is not None
    assert f"{saved_share(dry.cuts, seen.profile, 'macs'):.1%} of the MACs for {dry.kl:.2g} nats" in good.reason
    # At worst it loses what may be lost.
    assert dry.kl / 0.01 / 100 <= seen.goal.max_accuracy_drop
    assert f"predicted to cost {cost.kl:.2g} nats" in render("analysis_examples")
    assert cost.kl > allowed_kl(seen.goal)


def test_the_next_plan_lies_between_what_was_accepted_and_what_was_refused():
    seen, (good, stop, bad) = SEEN[-1], examples("iterative_pruning")
    shares = {
        row.number: saved_share(row.dry_run.cuts, seen.profile, "macs") for row in seen.journal.attempts if row.dry_run
    }
    told = [int(number) for number in re.findall(r"ttempt (\d+)", good.reason)]
    accepted, refused = (next(row for row in seen.journal.attempts if row.number == number) for number in told[:2])

    assert accepted.accepted
    assert not refused.accepted
    assert good.plan is not None
    assert good.plan.target is not None
    assert shares[accepted.number] < good.plan.target.saving < shares[refused.number]
    assert f"at a measured {accepted.calibration_kl:.2g} nats" in good.reason
    assert stop.plan is None
    assert bad.plan is not None
    assert bad.plan.target is not None
    assert bad.plan.target.saving < shares[accepted.number]


def as_the_examples_do(messages: list) -> Said:
    """Give the first plan's example, then the next one's, and stop as the last one does."""
    system, prompt = messages[0].text, messages[1].text
    found, tried = answers(system), len(re.findall(r"^attempt \d+ ", prompt, re.MULTILINE))
    arguments = found[1] if tried >= 3 else found[0]
    return Said(tool_calls=(("submit" if "plan" in arguments else "stop", arguments),))


@pytest.mark.slow
@pytest.mark.parametrize(("number", "lost_per_nat"), WORLDS)
def test_who_answers_as_the_examples_do_makes_the_first_plan_and_is_no_worse_than_the_rules(
    number: int, lost_per_nat: float
):
    found = SEEN[number].profile
    attempts = loop(advisor_of(Scripted(as_the_examples_do)), "hybrid", found, lost_per_nat)

    # On the other model the first example's plan would cost too much.
    assert (attempts[0].origin.by == "scripted") is (number == 0)
    assert best_saving(attempts, found) >= 0.95 * best_saving(loop(None, "rules", found, lost_per_nat), found)


GOLDEN = Path(__file__).parent / "golden"
MAX_PROMPT = 16_000


@pytest.mark.parametrize("agent", ["input_shape_resolver", "analysis", "iterative_pruning"])
def test_a_prompt_reads_as_it_did(agent: str):
    asked = questions()[agent]

    text = f"{asked.instructions}\n=== evidence ===\n\n{asked.evidence}"
    assert text == (GOLDEN / f"{agent}.txt").read_text(encoding="utf-8")


def searched_everywhere() -> DeploymentSearch:
    """Return a search among all runtimes and schemes that are known, in each of which all was measured."""
    model = searched().options[-1]
    options = tuple(
        model.model_copy(update={"deployment": each.model_copy(update={"recommendations": recommend(each.scheme)})})
        for each in all_deployments()
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
    everywhere = tuple(each.name for each in all_deployments())
    seen = journal(*tried).model_copy(update={"deployment_search": searched_everywhere()})

    opened = seen.model_copy(update={"attempts": ()})
    first, later = (
        Planning(
            found, GOAL, rules, each, left, replace(setting(GOAL, is_first=left is None), schemes=everywhere)
        ).question()
        for each, left in ((opened, None), (seen, 1))
    )

    assert len(found.units) >= 24
    assert found.params > 40e6
    for asked in (first, later):
        assert len(asked.instructions) + len(asked.evidence) < MAX_PROMPT
        # The attempts, the deployments, each group's row and what can be reached are there, whatever else had to go.
        assert "were left out" not in asked.evidence
        assert "(its maximum)" in asked.evidence
    assert later.evidence.count("times as fast as the baseline") >= len(tried)
