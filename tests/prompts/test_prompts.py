"""Prompts: their examples, their numbers, and the texts that the LLM gets."""

import json
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from advisors import advisor_of
from chat_server import Said, chat_server
from full_depth import judged_deep
from prompt_records import (
    CHANGED,
    DEAR,
    FIRST_KL,
    NUM_SEARCHED,
    NUM_UNITS,
    OPERATORS,
    OWN,
    STEPS,
    judged,
    questions,
    searched,
    setting,
    tried,
)
from sample_records import GOAL, attempt, journal, race_result
from scipy import stats
from simulated_runs import best_saving, loop

from profiling_agent.planning.allocation import dry_run, guard, saved_share
from profiling_agent.planning.llm_planner import NextAnswer, PlanAnswer, plan_question
from profiling_agent.planning.rules import analyse
from profiling_agent.prompts import render
from profiling_agent.runtimes.registry import recommend
from profiling_agent.schemas import Deployment, DeploymentSearch, Goal, Journal, ModelProfile, RaceResult
from profiling_agent.search.deployments import PROMISE

AGENTS = {"analysis": PlanAnswer, "iterative_pruning": NextAnswer}
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


# A number as it stands: not in a name, and not within a word such as float32.
NUMBER = re.compile(r"(?<![\w.-])-?\d+(?:\.\d+)?(?:e[-+]?\d+)?%?(?![\w])")
STRING = re.compile(r'"(?:[^"\\]|\\.)*"')
POINT = re.compile(
    r"^(?P<metric>\w+)(?: \(its maximum\))? \| (?P<shares>[\d.%, ]+) \| (?P<kl>[\d.e+-]+) \| G1 (?P<least>\d+)%(?: to (?P<most>\d+)%)?$",
    re.MULTILINE,
)
# Of a unit's 512 channels each owns 10 params and 20 MACs; the norm beside all has 64 params and takes a millisecond of 49.
WIDTH, STEP, PARAMS, MACS = 512, 32, NUM_UNITS * 5120 + 64, NUM_UNITS * 10240
# The units take 10 ms each when they are timed alone, which is 48 of 49 parts of all.
WHOLE_MS = 10 * NUM_UNITS * 49 / 48
# What the texts around the records say: top-1, and of the judge's rule its confidence.
WORDS = {"1": "top-1", "0": "between 0 and 1", "90%": "SEARCH_CONFIDENCE", "50%": "goal.max_size_ratio"}


def numbers(text: str) -> list[str]:
    return NUMBER.findall(STRING.sub('""', text))


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


def bound_of(lost: float, gained: float, num_images: int) -> float:
    """Return Bonett and Price's one-sided 90% bound of a difference of paired proportions."""
    p, q = (lost + 1) / (num_images + 2), (gained + 1) / (num_images + 2)
    return p - q + stats.norm.ppf(0.9) * ((p + q - (p - q) ** 2) / (num_images + 2)) ** 0.5


def largest_loss(changed: float) -> float:
    """Return the largest loss that the search images show to be inside a point, where so many answers change."""
    either = changed * NUM_SEARCHED
    nets = range(-int(either), int(either) + 1)
    shown = [net for net in nets if bound_of((either + net) / 2, (either - net) / 2, NUM_SEARCHED) <= 0.01]
    return max(shown) / NUM_SEARCHED


def traced(agent: str) -> dict[str, str]:
    """Return where each number may come from."""
    found, sources = judged(), dict(WORDS)

    def said(text: str, source: str) -> None:
        sources.update(dict.fromkeys(numbers(text), source))

    said(f"{PARAMS}, {MACS}", "profile.params, macs")
    said(f"{found.batch_size}, {found.headline.latency.median_ms:g}", "profile.batch_size, headline")
    said(f"{OWN.max_accuracy_drop:.2%}, {OWN.min_speedup}", "goal")
    # 6 nats for a whole unit of top-1, and as many for a point as the shared models lost it with.
    said(f"{6 * OWN.max_accuracy_drop}, 0.01, 0.02", "guards")
    said("1.1, 0.5%", "planners.TOLERANCE, STEP")
    changed = 0.03 if agent == "analysis" else CHANGED
    said(f"{NUM_SEARCHED}, {changed:.1%}, {largest_loss(changed):.2%}", "judge.rule_text")
    said(f"{NUM_UNITS} x {WIDTH}, {(PARAMS - 64) / PARAMS:.1%}, 100.0%, {48 / 49:.1%}", "profile.units, layers")
    said(f"{NUM_UNITS * 0.06:.1%}", "journal.deployment_search.unit_times")
    # The bytes are those of 4,000 in all; activations are 4 x 512 a layer.
    said(f"{4000 * (PARAMS - 64) // PARAMS / 1e6:.3g} MB, {24 * 4 * WIDTH / 1e6:.3g} MB", "profile.layers")
    # At half of 512, which is a width, the fifth cheapest of each: eleven units and the dear one.
    kls = [FIRST_KL * 2**step for step in range(STEPS)]
    keeps = [option.keep for option in found.evidence.units[0].options] if found.evidence else []
    half = min(range(STEPS), key=lambda index: abs(keeps[index] / WIDTH - 0.5))
    said(f"{(11 + 8) * kls[half]:.2g}, {shares(NUM_UNITS * (WIDTH - keeps[half]))}", "evidence, at half")
    for cut in (0.25, 0.5, 0.75):
        nearest = min(range(STEPS), key=lambda index: abs(keeps[index] / WIDTH - (1 - cut)))
        said(f"{8 * kls[nearest]:.2g}, {kls[nearest]:.2g}", "evidence.units[3], its group's median")
    time_ms = sum(row.cpu_time_ms for row in OPERATORS)
    for row in OPERATORS:
        said(f"{row.calls} {row.cpu_time_ms / time_ms:.1%} {row.memory_bytes / 1e6:.3g} MB", "profile.operators")
    for side in ("fc1", "fc2"):
        rows = [row for row in found.layers if row.name.endswith(side)]
        said(f"{len(rows)} {sum(row.params for row in rows) / PARAMS:.1%} 50.0% {24 / 49:.1%}", "profile.layers")
    said("0.3", "the rules' plan")
    dry = tried(found)[1].dry_run
    assert dry is not None
    said(predicted(dry.params, dry.kl), "the rules' dry run")
    said(deployed_bytes(dry.params), "deployment_search, the bytes of the one that leads")
    return sources


def predicted(params: int, kl: float | None) -> str:
    gone = (PARAMS - params) // 10
    assert kl is not None
    least = cheapest()[gone]
    assert kl == pytest.approx(least, rel=1e-3)
    return f"{shares(gone)}, {least:.2g}, {least / 0.02 / 100:.2%} {least / 0.01 / 100:.2%}"


def deployed_bytes(params: int) -> str:
    """Return the bytes that a model of so many params is predicted to have: those of the 1,240 of 4,000 that the unpruned one has."""
    return f"{1240 / 4000 * params / PARAMS:.1%}"


def told_of_attempts() -> str:
    """Return the numbers of the attempts, of what they say together, and of those that are left."""
    rows = tried(judged())
    told: list[str] = []
    ratios: list[float] = []
    for row in rows:
        assert row.plan.target is not None
        told.append(f"{row.number} {row.plan.target.saving}")
    for row in rows[:2]:
        assert row.dry_run is not None
        assert row.dry_run.kl is not None
        assert row.calibration_kl is not None
        assert row.deployed is not None
        assert row.deployed.drop is not None
        drop, size = row.deployed.drop, row.deployed.footprint.size_bytes / 4000
        told += [predicted(row.dry_run.params, row.dry_run.kl), deployed_bytes(row.dry_run.params)]
        told += [f"{row.calibration_kl:.2g}", speed(row.race_result)]
        told.append(f"{drop.drop:.2%} {drop.low:.2%} {drop.high:.2%} {drop.num_images} {size:.1%}")
        ratios.append(row.calibration_kl / row.dry_run.kl)
    return " ".join([*told, f"{min(ratios):.2g} {max(ratios):.2g} 2"])


def told_of_deployments() -> str:
    """Return the numbers of the deployments of the unpruned model that were measured, and of the layers of the one that leads."""
    told: list[str] = []
    for option in searched().options[1:]:
        assert option.deployed is not None
        assert option.evaluation is not None
        assert option.evaluation.drop is not None
        drop = option.evaluation.drop
        told.append(
            f"{option.deployed.model.size_bytes / 4000:.1%} {option.deployed.kl:.2g} {speed(option.race_result)}"
        )
        told.append(f"{drop.drop:.2%} {drop.low:.2%} {drop.high:.2%} {drop.num_images}")
    leads = searched().options[-1]
    assert leads.tuned is not None
    told += [f"{row.kl:.2g} {row.macs_share:.1%} {row.latency_share:.1%}" for row in leads.tuned.layers]
    return " ".join(told)


def speed(raced: RaceResult | None) -> str:
    assert raced is not None
    return f"{raced.speedup:.2f} {raced.speedup_low:.2f} {raced.speedup_high:.2f}"


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


@pytest.mark.parametrize("agent", ["analysis", "iterative_pruning"])
def test_each_number_has_its_record(agent: str):
    asked = questions()[agent]
    sources = traced(agent) | dict.fromkeys(numbers(told_of_deployments()), "journal.deployment_search")
    if agent == "iterative_pruning":
        sources |= dict.fromkeys(numbers(told_of_attempts()), "journal.attempts")
    keeps = {f"{keep / WIDTH:.0%}" for keep in range(WIDTH // 4, WIDTH + 1, STEP)}
    # What was traced by the test above, and shares of widths.
    rest = POINT.sub("", asked.evidence)
    untraced = [number for number in numbers(rest) if number not in sources and number not in keeps]

    assert untraced == []
    assert len(numbers(rest)) > 50


def test_a_prompt_is_filled_in():
    text = render("input_shape_resolver", config="{'image_size': 32}", rules="processor: 3x32x32")

    assert "{'image_size': 32}" in text
    assert "$" not in text


def test_a_missing_value_is_an_error():
    with pytest.raises(KeyError, match="rules"):
        render("input_shape_resolver", config="x")


def test_a_value_that_the_prompt_never_mentions_is_an_error():
    with pytest.raises(KeyError, match="never mentions"):
        render("input_shape_resolver", config="x", rules="y", extra="z")
