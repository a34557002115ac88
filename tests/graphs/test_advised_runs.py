"""Runs that a language model plans for: the real client, a real server, the whole product."""

import json
import re
from pathlib import Path

import pytest
from chat_server import Said, chat_server, error
from conftest import World
from langchain_openai import ChatOpenAI
from pydantic import SecretStr

from profiling_agent import optimize, resume
from profiling_agent.errors import RunError
from profiling_agent.llm.transcript import FILE

TARGETS = (0.2, 0.35, 0.5)


def careful(payload: dict, number: int) -> Said:
    """Ask for a little more each time, as the prompt's own numbers of attempts say."""
    prompt = payload["messages"][-1]["content"]
    tried = len(re.findall(r"^attempt \d+ ", prompt, re.MULTILINE))
    target = {"metric": "params", "saving": TARGETS[min(tried, 2)], "justification": "the next step"}
    return Said(content=json.dumps({"reason": f"{tried} plans were measured", "target": target}))


@pytest.mark.slow
def test_a_model_that_plans_alone_is_measured_with_its_wishes_and_its_words_are_in_the_report(
    world: World, tmp_path: Path
):
    def wishes(payload: dict, number: int) -> Said:
        found = json.loads(careful(payload, number).content or "")
        if found["reason"].startswith("1 "):
            found["quantization"] = [{"layer": "all", "quantization_type": "cast", "dtype": "bfloat16"}]
        return Said(content=json.dumps(found))

    with chat_server(wishes) as server:
        request = world.request(tmp_path, llm="openai:scripted", base_url=server.url, planner="llm")
        report = optimize(request)

    origins = [attempt.origin for attempt in report.attempts]
    assert {origin.by for origin in origins} == {"openai:scripted"}
    assert [origin.reason for origin in origins] == [f"{index} plans were measured" for index in range(len(origins))]
    # One more to see that it answers.
    assert len(server.asked) == len(origins) + 1
    kept = [json.loads(line) for line in (tmp_path / "quick" / FILE).read_text().splitlines()]
    assert sum(entry["kind"] == "answer" for entry in kept) == len(origins)
    assert report.attempts[0].plan.target is not None
    assert report.attempts[0].plan.target.saving == 0.2
    # A wish for quantization counts in the attempt that has it.
    names = [attempt.deployed.deployment.name for attempt in report.attempts if attempt.deployed]
    assert names == ["eager dynamic", "eager bfloat16", "eager dynamic"]


@pytest.mark.slow
def test_an_object_plans_as_well_is_needed_again_and_the_rules_go_on_without_its_server(world: World, tmp_path: Path):
    class CutError(Exception):
        """Stands for a kill."""

    def cut(event) -> None:
        if event.stage == "iterative_pruning":
            raise CutError

    def dies(payload: dict, number: int) -> Said:
        return error(401) if number else careful(payload, number)

    with chat_server(dies) as server:
        model = ChatOpenAI(model="scripted", base_url=server.url, api_key=SecretStr("EMPTY"), max_retries=0)
        with pytest.raises(CutError):
            optimize(world.request(tmp_path, planner="llm", max_iterations=2), cut, advisor=model)
        with pytest.raises(RunError, match=r"pass it again, as build_graph\(advisor=\.\.\.\)"):
            resume(tmp_path / "quick")
        report = resume(tmp_path / "quick", advisor=model)

    # The first plan was asked for once, by the process that was cut.
    assert [attempt.origin.by for attempt in report.attempts] == ["ChatOpenAI:scripted", "rules"]
    assert len(server.asked) == 2
    assert report.spent is not None
    assert "ChatOpenAI:scripted gave no answer" in report.spent.failures[-1]
    text = (tmp_path / "quick" / "report.md").read_text()
    assert "left to the rules, the last because ChatOpenAI:scripted gave no answer" in text
