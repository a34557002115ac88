"""Prompts: their examples, their numbers, and the texts that the LLM gets."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import prompt_examples
import pytest
from advisors import advisor_of
from chat_server import Said, chat_server
from full_depth import judged_deep
from prompt_records import (
    DEAR,
    FIRST_KL,
    NUM_UNITS,
    STEPS,
    questions,
    searched,
    setting,
)
from sample_records import GOAL, attempt, journal, race_result
from simulated_runs import best_saving, loop

from profiling_agent.planning.allocation import dry_run, guard, saved_share
from profiling_agent.planning.llm_planner import NextAnswer, PlanAnswer, plan_question
from profiling_agent.planning.rules import analyse
from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import Deployment, DeploymentSearch
from profiling_agent.search.deployments import PROMISE

AGENTS = {"analysis": PlanAnswer, "iterative_pruning": NextAnswer}
SEEN = prompt_examples.read_evidence()
# What a nat costs of the images in the world of each model; in the second one's a bold first plan is refused.
WORLDS = ((0, 0.6), pytest.param(1, 1.2, marks=pytest.mark.slow))


def answers(text: str) -> list[dict]:
    return [json.loads(line) for line in re.findall(r"^\{.*\}$", text, re.MULTILINE)]


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("number", "lost_per_nat"), WORLDS)
def test_who_answers_as_the_examples_do_makes_the_first_plan_and_is_no_worse_than_the_rules(
    number: int, lost_per_nat: float, tmp_path: Path
):
    found = SEEN[number].profile
    with chat_server(as_the_examples_do) as server:
        attempts = loop(advisor_of(server, tmp_path), "hybrid", found, lost_per_nat)

    assert attempts[0].origin.by == "openai:scripted"
    assert best_saving(attempts, found) >= 0.95 * best_saving(loop(None, "rules", found, lost_per_nat), found)


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
    # All runtimes and schemes that are known, in each of which all was measured.
    everywhere = tuple(f"{runtime} {scheme}" for runtime, scheme in PROMISE)
    deployments = [
        Deployment(runtime=runtime, scheme=scheme, recommendations=recommend(scheme)) for runtime, scheme in PROMISE
    ]
    options = tuple(searched().options[-1].model_copy(update={"deployment": each}) for each in deployments)
    search = DeploymentSearch(options=options, chosen=deployments[0])
    seen = journal(*tried).model_copy(update={"deployment_search": search})
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


POINT = re.compile(
    r"^(?P<metric>\w+)(?: \(its maximum\))? \| (?P<shares>[\d.%, ]+) \| (?P<kl>[\d.e+-]+) \| G1 (?P<least>\d+)%(?: to (?P<most>\d+)%)?$",
    re.MULTILINE,
)
# Of a unit's 512 channels each owns 10 params and 20 MACs; the norm beside all has 64 params and takes a millisecond of 49.
WIDTH, STEP, PARAMS, MACS = 512, 32, NUM_UNITS * 5120 + 64, NUM_UNITS * 10240
# The units take 10 ms each when they are timed alone, which is 48 of 49 parts of all.
WHOLE_MS = 10 * NUM_UNITS * 49 / 48


def cheapest() -> dict[int, float]:
    """Return, for each number of channels that can go from all units together, the least KL at which so many do."""
    keeps = [WIDTH - STEP * (index + 1) for index in range(15) if WIDTH - STEP * (index + 1) >= WIDTH // 4]
    chosen = [keeps[(index + 1) * len(keeps) // STEPS - 1] for index in range(STEPS)]
    best = {0: 0.0}
    for unit in range(NUM_UNITS):
        options = [(0, 0.0)] + [
            (WIDTH - keep, FIRST_KL * (8 if unit == DEAR else 1) * 2**step) for step, keep in enumerate(chosen)
        ]
        after: dict[int, float] = {}
        for gone, kl in best.items():
            for more, cost in options:
                if kl + cost < after.get(gone + more, float("inf")):
                    after[gone + more] = kl + cost
        best = after
    return best


def shares(gone: int) -> str:
    """Return what so many channels are of params, MACs and time: a channel takes a 64th of a millisecond."""
    return f"{gone * 10 / PARAMS:.1%}, {gone * 20 / MACS:.1%}, {gone / 64 / WHOLE_MS:.1%}"


@pytest.mark.parametrize("agent", ["analysis", "iterative_pruning"])
def test_what_can_be_reached_is_the_least_that_the_evidence_allows(agent: str):
    least = cheapest()
    evidence = questions()[agent].evidence
    points = list(POINT.finditer(evidence))

    assert [row["metric"] for row in points].count("params") == 6
    for row in points:
        gone = round(float(row["shares"].split("%")[0]) / 100 * PARAMS / 10 / STEP) * STEP
        assert row["shares"] == shares(gone)
        assert row["kl"] == f"{least[gone]:.2g}"
        # Nothing that is cheaper saves more.
        assert all(kl >= least[gone] * 0.999 for more, kl in least.items() if more > gone)
    assert float(points[5]["kl"]) == float(f"{least[max(least)]:.2g}")
    assert all(float(one["kl"]) < float(other["kl"]) for one, other in pairwise(points[:6]))


def test_a_prompt_is_filled_in():
    text = render("input_shape_resolver", config="{'image_size': 32}", rules="processor: 3x32x32")

    assert "{'image_size': 32}" in text
    assert "$" not in text


@pytest.mark.parametrize(
    ("values", "message"), [({"config": "x"}, "rules"), ({"config": "x", "rules": "y", "extra": "z"}, "never mentions")]
)
def test_a_value_that_is_missing_or_never_mentioned_is_an_error(values: dict[str, str], message: str):
    with pytest.raises(KeyError, match=message):
        render("input_shape_resolver", **values)
