"""The examples in the prompts: computed from what was measured of real models, and good advice where somebody follows them."""

import json
import re
from pathlib import Path

import prompt_examples
import pytest
from advisors import advisor_of
from chat_server import Said, chat_server
from loops import best_saving, loop

from profiling_agent.planning.allocation import dry_run, guard, saved_share
from profiling_agent.planning.llm_planner import NextAnswer, PlanAnswer
from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install

AGENTS = {"analysis": PlanAnswer, "iterative_pruning": NextAnswer}
SEEN = prompt_examples.read_evidence()
# What a nat costs of the images in the world of each model; in the second one's a bold first plan is refused.
WORLDS = ((0, 0.6), pytest.param(1, 1.2, marks=pytest.mark.slow))


def answers(text: str) -> list[dict]:
    return [json.loads(line) for line in re.findall(r"^\{.*\}$", text, re.MULTILINE)]


def test_the_examples_are_those_of_the_record():
    for name, text in prompt_examples.texts(SEEN).items():
        assert (prompt_examples.PROMPTS / name).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("agent", AGENTS)
def test_each_example_is_an_answer(agent: str):
    found = [AGENTS[agent].model_validate(answer) for answer in answers(render(f"{agent}_examples"))]
    assert len(found) == (2 if agent == "analysis" else 3)


def test_the_first_plan_does_what_its_example_says_and_the_bad_one_is_sent_back():
    seen, (good, bad) = SEEN[0], [PlanAnswer.model_validate(one) for one in answers(render("analysis_examples"))]
    dry = dry_run(good.plan, seen.profile)

    assert dry.kl is not None
    assert f"{saved_share(dry.cuts, seen.profile, 'macs'):.1%} of the MACs for {dry.kl:.2g} nats" in good.reason
    assert guard(good.plan, seen.profile, seen.goal).complaint is None
    # At worst it loses what may be lost.
    assert dry.kl / 0.01 / 100 <= seen.goal.max_accuracy_drop
    assert guard(bad.plan, seen.profile, seen.goal).complaint is not None
    cost = dry_run(bad.plan, seen.profile)
    assert f"predicted to cost {cost.kl:.2g} nats" in render("analysis_examples")


def test_the_next_plan_lies_between_what_was_accepted_and_what_was_refused():
    seen, (good, stop, bad) = (
        SEEN[-1],
        [NextAnswer.model_validate(one) for one in answers(render("iterative_pruning_examples"))],
    )
    shares = {
        row.number: saved_share(row.dry_run.cuts, seen.profile, "macs") for row in seen.journal.attempts if row.dry_run
    }
    told = [int(number) for number in re.findall(r"ttempt (\d+)", good.reason)]
    accepted, refused = (next(row for row in seen.journal.attempts if row.number == number) for number in told[:2])

    assert accepted.accepted
    assert not refused.accepted
    assert good.plan.target is not None
    assert shares[accepted.number] < good.plan.target.saving < shares[refused.number]
    assert f"at a measured {accepted.calibration_kl:.2g} nats" in good.reason
    assert stop.stop
    assert bad.plan.target is not None
    assert bad.plan.target.saving < shares[accepted.number]


def as_the_examples_do(payload: dict, number: int) -> Said:
    """Give the first plan's example, then the next one's, and stop as the last one does."""
    system, prompt = payload["messages"][0]["content"], payload["messages"][1]["content"]
    found, tried = answers(system), len(re.findall(r"^attempt \d+ ", prompt, re.MULTILINE))
    return Said(content=json.dumps(found[1] if tried >= 3 else found[0]))


@pytest.mark.parametrize(("number", "lost_per_nat"), WORLDS)
def test_who_answers_as_the_examples_do_makes_the_first_plan_and_is_no_worse_than_the_rules(
    number: int, lost_per_nat: float, tmp_path: Path
):
    found = SEEN[number].profile
    with chat_server(as_the_examples_do) as server:
        attempts = loop(advisor_of(server, tmp_path), "hybrid", found, lost_per_nat)

    assert attempts[0].origin.by == "openai:scripted"
    assert best_saving(attempts, found) >= 0.95 * best_saving(loop(None, "rules", found, lost_per_nat), found)
