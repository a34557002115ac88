"""Questions about a finished run: a scripted LLM on a real server, a real run's records."""

import json
from pathlib import Path
from typing import Any

import pytest
from chat_server import Said, Server, chat_server, in_turn
from commands import call as command
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.types import Command

from profiling_agent.errors import RequestError, RunError
from profiling_agent.graph.ask import NOT_PROPOSED, PROPOSED, AskContext, answer_question, build_ask_graph
from profiling_agent.graph.state import Allowlist
from profiling_agent.llm.numbers import unsupported_numbers
from profiling_agent.reporting.records import Records, changed_request
from profiling_agent.reporting.report import read_report
from profiling_agent.request import Request

CONFIG: Any = {"configurable": {"thread_id": "a"}}


def call(name: str, **arguments: Any) -> Said:
    return Said(tool_calls=((name, arguments),))


def started(request: Request) -> str:
    return f"it runs with a drop of {request.max_accuracy_drop}"


def asked(run: Path, server: Server, *answers: Any, start: Any = started) -> Any:
    """Return the state after a question, or after each answer to its interrupts as well."""
    graph = build_ask_graph(start, checkpointer=InMemorySaver())
    context = AskContext(str(run), "openai:scripted", server.url)
    inputs = [{"messages": [("user", "why?")]}, *(Command(resume=answer) for answer in answers)]
    states = [graph.invoke(each, CONFIG, context=context) for each in inputs]
    return states if answers else states[0]


def results_of(result: dict[str, Any]) -> list[str]:
    return [message.text for message in result["messages"] if message.type == "tool"]


def test_an_answer_is_looked_up_in_the_runs_records(finished: Path):
    report = read_report(finished)
    top1 = f"{report.baseline.top1:.1%}"

    with chat_server(in_turn(call("overview"), Said(content=f"Top-1 was {top1} before."))) as server:
        result = asked(finished, server)

    assert result["messages"][-1].text == f"Top-1 was {top1} before."
    assert json.loads(results_of(result)[0])["before"]["params"] == report.baseline.params
    assert {tool["function"]["name"] for tool in server.asked[0]["tools"]} >= {"overview", "what_if", "propose_run"}


def test_an_invented_number_goes_back_once_and_is_marked_if_it_stays(finished: Path):
    invented = Said(content="It is 77.123 times as fast.")

    with chat_server(in_turn(call("overview"), invented, Said(content="The records don't tell."))) as server:
        mended = asked(finished, server)
    with chat_server(in_turn(call("overview"), invented)) as server:
        marked = asked(finished, server)

    assert mended["messages"][-1].text == "The records don't tell."
    assert "77.123" in server.asked[2]["messages"][-1]["content"]
    assert marked["messages"][-1].text.endswith("(not in the run's records: 77.123)")
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (call("layers", pattern="("), "pattern"),
        (call("delete_everything"), "not a valid tool"),
        (call("what_if", max_accuracy_drop="much"), "max_accuracy_drop"),
        (call("what_if", max_accuracy_drop=7.0), "no such limits"),
        (call("read", path="heldout.nothing"), "there is no 'nothing'"),
        (call("propose_run", changes={"max_acuracy_drop": 0.02}, reason="x"), "did you mean 'max_accuracy_drop'"),
    ],
)
def test_a_call_that_cannot_be_made_is_answered_with_the_reason(finished: Path, said: Said, expected: str):
    with chat_server(in_turn(said, Said(content="I don't know."))) as server:
        result = asked(finished, server)

    assert expected in results_of(result)[0]


def test_an_llm_that_calls_tools_for_ever_has_to_answer(finished: Path):
    def script(payload: dict[str, Any], number: int) -> Said:
        return call("overview") if "tools" in payload else Said(content="enough")

    with chat_server(script) as server:
        assert asked(finished, server)["messages"][-1].text == "enough"


@pytest.mark.parametrize(
    ("types", "expected"),
    [(["approve"], "it runs with a drop of 0.02"), (["reject"], "No, don't start it."), ([], "No, don't start it.")],
)
def test_another_run_starts_only_after_a_persons_yes(finished: Path, types: list[str], expected: str):
    proposal = call("propose_run", changes={"max_accuracy_drop": 0.02}, reason="two points allow a deeper cut")
    with chat_server(in_turn(proposal, Said(content="done"))) as server:
        waiting, result = asked(finished, server, {"decisions": [{"type": each} for each in types]})

    assert waiting["__interrupt__"][0].value["action_requests"][0]["args"] == {"max_accuracy_drop": 0.02}
    (answer,) = [message.text for message in result["messages"] if message.name == "run"]
    assert expected in answer


def proposal_of(*drops: float) -> Said:
    """Return a reply that proposes a run for each drop."""
    calls = [("propose_run", {"changes": {"max_accuracy_drop": drop}, "reason": "deeper"}) for drop in drops]
    return Said(tool_calls=tuple(calls))


def test_of_several_proposals_the_person_is_asked_about_the_first_and_only_that_one_starts(finished: Path):
    runs: list[Request] = []
    with chat_server(in_turn(proposal_of(0.02, 0.03), Said(content="done"))) as server:
        waiting, result = asked(finished, server, "approve", start=lambda request: str(runs.append(request)))

    assert waiting["__interrupt__"][0].value["action_requests"][0]["args"] == {"max_accuracy_drop": 0.02}
    assert results_of(result) == [PROPOSED, NOT_PROPOSED]
    (run,) = runs
    assert run.max_accuracy_drop == 0.02
    # Nothing that leads elsewhere is taken over from the report, which may be somebody else's.
    assert (run.llm, run.base_url, run.plan, run.approve) == ("none", None, None, "never")
    assert run.output == str(finished.resolve().parent)


def test_the_command_starts_one_confirmed_run_and_declines_others(finished: Path):
    with chat_server(in_turn(proposal_of(0.02), proposal_of(0.03), Said(content="done"))) as server:
        context = AskContext(str(finished), "openai:scripted", server.url)
        _, run = answer_question(context, "go on", lambda *_: True)

    assert run is not None
    assert run.max_accuracy_drop == 0.02
    assert server.asked[-1]["messages"][-1]["content"] == "No, don't start it."


@pytest.mark.parametrize("field", ["base_url", "output", "plan", "llm", "model"])
def test_a_proposal_changes_limits_only(finished: Path, field: str):
    with pytest.raises(ValueError, match=f"unknown term '{field}'"):
        changed_request(read_report(finished).request, {field: "elsewhere"})


def test_other_limits_are_answered_by_measured_candidates_and_a_dry_run(finished: Path):
    found = json.loads(Records(finished).what_if(max_accuracy_drop=0.5, max_size_ratio=1.0))

    assert {row["number"] for row in found["measured_candidates_within_them"]} >= {0}
    assert "params" in found["predicted"]
    assert found["limits"]["max_accuracy_drop"] == 0.5


def test_a_server_asks_no_address_that_only_the_run_or_a_client_names(finished: Path):
    question: Any = {"messages": [("user", "why?")]}
    graph = build_ask_graph(started, allowlist=Allowlist(folders=(finished,), addresses=frozenset()))

    with chat_server(in_turn(Said(content="never"))) as server:
        with pytest.raises(RequestError, match="no address of this server's"):
            graph.invoke(question, context=AskContext(str(finished), "openai:scripted", server.url))
        assert not server.asked


@pytest.mark.parametrize("lookup", ["overview", "deployments", "attempts", "candidates"])
def test_a_lookup_fits_into_a_prompt(finished: Path, lookup: str):
    text = getattr(Records(finished), lookup)()

    assert json.loads(text)
    assert len(text) < 8000


def test_any_part_of_the_report_can_be_read(finished: Path):
    records, report = Records(finished), read_report(finished)

    assert "verdict" in records.read("")
    assert json.loads(records.read("heldout.predictions.num_images")) == report.heldout.predictions.num_images
    assert json.loads(records.read("attempts.0.reason")) == report.attempts[0].reason


def test_what_is_not_there_is_refused_in_one_line(finished: Path, tmp_path: Path):
    graph = build_ask_graph(started)
    question: Any = {"messages": [("user", "why?")]}

    with pytest.raises(RequestError, match="no run is named"):
        graph.invoke(question)
    with pytest.raises(RunError, match="is no run folder"):
        graph.invoke(question, context=AskContext(str(tmp_path)))
    with pytest.raises(RequestError, match="answers come from an LLM"):
        graph.invoke(question, context=AskContext(str(finished)))
    guarded = build_ask_graph(started, allowlist=Allowlist(folders=(tmp_path,), addresses=frozenset()))
    with pytest.raises(RequestError, match="outside of the folders of this server"):
        guarded.invoke(question, context=AskContext(str(finished)))


def test_the_command_prints_the_answer(finished: Path):
    with chat_server(in_turn(call("overview"), Said(content="The verdict is in the report."))) as server:
        options = ("--llm", "openai:scripted", "--base-url", server.url)
        done = command("ask", str(finished), "what came of it?", *options)

    assert (done.exit_code, done.stdout.strip()) == (0, "The verdict is in the report.")
    refused = command("ask", str(finished / "jobs"), "why?")
    assert refused.exit_code == 2
    assert len(refused.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("answer", "missing"),
    [
        ("31% of the bytes, so 69% less, 2.6 times as fast", []),
        ("It has 1,234,567 params and 4.9 MB", []),
        ("31,2 % der Bytes, 2,6-mal so schnell, 1,234,567 Parameter", []),
        ("1. yes 2. no", []),
        ("2.75 times", ["2.75"]),
        ("42% fewer", ["42"]),
        ("\u5feb\u4e862.6\u500d\uff0c\u53ea\u670931%\u7684\u5b57\u8282", []),
        ("\u5feb\u4e862.75\u500d", ["2.75"]),
        ("2,6-mal so schnell, 4,9 MB", []),
    ],
)
def test_a_number_is_known_in_other_units_and_rounded(answer: str, missing: list[str]):
    source = '{"share_of_bytes": 0.312, "times_as_fast": 2.6123, "params": 1234567, "size_bytes": 4912345}'

    assert unsupported_numbers(answer, [source]) == missing
