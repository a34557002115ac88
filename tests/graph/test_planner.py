"""The planner's subgraph: its steps, models that misuse it, and what is stored of it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, TypedDict

import pytest
from advisors import Scripted, advisor_of, chat_of
from chat_server import Said, chat_server, error
from langchain_core.messages import BaseMessage
from langgraph.graph import END, START, StateGraph
from langgraph.types import Command
from llm_personas import PERSONAS, endless, submits
from sample_records import GOAL, judged

from profiling_agent.errors import AdvisorError
from profiling_agent.graph.checkpoints import RunSaver
from profiling_agent.graph.nodes import pending_question
from profiling_agent.graph.planner import MAX_REPLIES
from profiling_agent.llm.chat import MAX_CALLS
from profiling_agent.llm.transcript import FILE, Transcript
from profiling_agent.planning.llm_planner import MAX_DRAFTS, UNKNOWN, Lab, Planning, Probe, Setting
from profiling_agent.planning.rules import analyse
from profiling_agent.reporting.render import render_text
from profiling_agent.schemas import ApprovalQuestion, Origin, Plan
from profiling_agent.search.planners import first_proposal

FOUND = judged()
RULES = analyse(FOUND, GOAL)
QUARTER = {"target": {"metric": "params", "saving": 0.25}}
Script = Callable[[list[BaseMessage]], Said]


def planned(script: Script | Exception) -> tuple[Scripted, Plan, Origin]:
    chat = Scripted(script)
    return chat, *first_proposal(advisor_of(chat), "llm", FOUND, GOAL, RULES)


def test_what_a_tool_returned_is_in_the_next_request_and_the_calls_in_the_record():
    def script(messages: list[BaseMessage]) -> Said:
        calls = (("details", {"group": "G1"}), ("try_plans", {"plans": [QUARTER]}))
        return Said(tool_calls=calls) if len(messages) == 2 else submits(QUARTER, "as the dry run has it")

    chat, plan, origin = planned(script)

    details, dry = (message.text for message in chat.asked[1][-2:])
    assert details.count("KL by width kept") == 4
    # 25% in widths by steps of 32 channels of 512.
    assert dry.startswith("1: cuts 4 of 4 units, params 26.5% less")
    assert plan.target is not None
    assert (plan.target.saving, origin.by, origin.reason) == (0.25, "scripted", "as the dry run has it")
    calls = chat.transcript.spent.calls
    assert [(call.attempt, call.tool) for call in calls] == [(1, "details"), (1, "try_plans"), (1, "submit")]
    assert (calls[1].answer, calls[2].answer) == (dry[:300], "received")


def test_two_refusals_go_back_and_the_third_leaves_the_plan_to_the_rules():
    chat, plan, origin = planned(lambda _: submits({"target": {"metric": "params", "saving": 0.7}}))

    assert [len(messages) for messages in chat.asked] == [2, 5, 8]
    assert "nats (predicted), where at most 0.06 can keep the accuracy" in chat.asked[1][-1].text
    assert (plan, origin.by) == (RULES, "rules")
    assert (origin.note or "").startswith("scripted: its KL is")
    spent = chat.transcript.spent
    assert (spent.repairs, spent.failures) == (3, (origin.note,))


@pytest.mark.parametrize(
    ("script", "num_requests", "note"),
    [
        # It never submits.
        (
            lambda _: Said(content="I would cut a quarter."),
            3,
            "scripted: no tool was called, which planning needs: call submit",
        ),
        # It calls tools for ever.
        (lambda m: endless({}, 0), MAX_REPLIES, f"scripted submitted no plan in {MAX_REPLIES} replies"),
        # It calls a tool that isn't there, and for ever.
        (lambda _: Said(tool_calls=(("shell", {"command": "ls"}),)), MAX_REPLIES, f"in {MAX_REPLIES} replies"),
        # Its arguments never validate.
        (lambda _: submits({"target": {"saving": 7}}), MAX_REPLIES, f"in {MAX_REPLIES} replies"),
        (AdvisorError("scripted gave no answer"), 1, "gave no answer"),
    ],
    ids=["words", "for ever", "unknown tool", "invalid arguments", "no tools"],
)
def test_whoever_submits_nothing_leaves_the_plan_to_the_rules(script: Any, num_requests: int, note: str):
    chat, plan, origin = planned(script)

    assert (plan, origin.by) == (RULES, "rules")
    assert note in (origin.note or "")
    assert len(chat.asked) == num_requests


def test_what_is_wrong_with_a_call_goes_back_in_words_and_the_next_one_counts():
    script = iter(
        [
            Said(
                tool_calls=(("shell", {"command": "ls"}), ("submit", {"plan": {"target": {"saving": 7}}, "reason": ""}))
            ),
            submits(QUARTER),
        ]
    )
    chat, _, origin = planned(lambda _: next(script))

    unknown, invalid = (message.text for message in chat.asked[1][-2:])
    assert "shell is not a valid tool, try one of [details, " in unknown
    assert invalid.startswith("these arguments can't be used: plan: target.saving: Input should be less than 1")
    assert origin.by == "scripted"


def test_a_server_without_tools_leaves_the_plan_to_the_rules_with_a_line_that_says_so(tmp_path: Path):
    with chat_server(lambda payload, _: error(400, "this model does not support tools")) as server:
        plan, origin = first_proposal(advisor_of(chat_of(server, tmp_path)), "hybrid", FOUND, GOAL, RULES)

    assert plan == RULES
    assert "this model does not support tools" in (origin.note or "")
    assert Transcript(tmp_path / FILE).spent.failures == (origin.note,)


class Parent(TypedDict):
    plan: Annotated[Any, "of the planner"]


def graph_of(analysis: Any, saver: RunSaver) -> Any:
    parent = StateGraph(Parent)
    parent.add_node("analysis", analysis)
    parent.add_edge(START, "analysis")
    parent.add_edge("analysis", END)
    return parent.compile(checkpointer=saver)


class KilledInProbeError(Exception):
    """Stands for a kill."""


def test_a_kill_in_a_probe_repeats_no_request_and_the_checkpoints_hold_every_step(tmp_path: Path):
    probed: list[Plan] = []

    def probe(plan: Plan) -> Probe:
        probed.append(plan)
        if len(probed) == 1:
            raise KilledInProbeError
        return Probe(kl=0.004, num_images=256, num_changed=3, num_lost=1, num_gained=0)

    nothing: Any = None
    lab = Lab({"probe": 7.0}, probe=probe, probe_layers=nothing, time_plan=nothing, known_kl=lambda _: None)
    setting = replace(UNKNOWN, lab=lab)
    (tmp_path / "llm").mkdir()

    def analysis(state: Parent) -> Parent:
        return {"plan": first_proposal(advisor_of(chat), "llm", FOUND, GOAL, RULES, setting=setting)}

    graph = graph_of(analysis, RunSaver(tmp_path / "runs"))
    config: Any = {"configurable": {"thread_id": "t"}}
    with chat_server(PERSONAS["careful"]) as server:
        chat = chat_of(server, tmp_path / "llm")
        with pytest.raises(KilledInProbeError):
            graph.invoke({"plan": None}, config, durability="sync")
        assert len(server.asked) == 2
        steps = [*graph.stream(None, config, stream_mode="updates", subgraphs=True, durability="sync")]
        assert len(server.asked) == 3

    assert [list(step) for _, step in steps] == [["tools"], ["think"], ["tools"], ["check"], ["plan"], ["analysis"]]
    assert "measured KL 0.004 nats" in server.asked[-1]["messages"][-1]["content"]
    stored = [saved.checkpoint["channel_values"] for saved in RunSaver(tmp_path / "runs").list(config)]
    conversations = [values["messages"] for values in stored if "messages" in values]
    # Instructions, evidence, three replies and what their tools returned.
    assert max(map(len, conversations)) == 8
    # Nothing of it is in the state of the run.
    assert set(graph.get_state(config).values) == {"plan"}


def test_the_largest_conversation_makes_small_checkpoints(tmp_path: Path):
    drafts = ("try_plans", {"plans": [QUARTER] * MAX_DRAFTS})
    chat = Scripted(lambda _: Said(tool_calls=(drafts,) * MAX_CALLS))
    saver = RunSaver(tmp_path)
    graph = graph_of(lambda state: {"plan": first_proposal(advisor_of(chat), "llm", FOUND, GOAL, RULES)}, saver)
    config: Any = {"configurable": {"thread_id": "t"}}
    graph.invoke({"plan": None}, config, durability="sync")

    sizes = [len(saver.serde.dumps_typed(saved.checkpoint)[1]) for saved in saver.list(config)]
    assert len(chat.asked) == MAX_REPLIES
    assert max(sizes) < 60_000


def test_a_person_is_asked_where_plans_are_approved_and_answers_in_their_words(tmp_path: Path):
    def script(messages: list[BaseMessage]) -> Said:
        asks = Said(tool_calls=(("ask_user", {"question": "May the last block be cut?"}),))
        return asks if len(messages) == 2 else submits(QUARTER, messages[-1].text)

    chat = Scripted(script)
    advisor = advisor_of(chat, asks=True)
    graph = graph_of(lambda state: {"plan": first_proposal(advisor, "llm", FOUND, GOAL, RULES)}, RunSaver(tmp_path))
    config: Any = {"configurable": {"thread_id": "t"}}

    (waiting,) = graph.invoke({"plan": None}, config)["__interrupt__"]
    question = ApprovalQuestion.model_validate(waiting.value["question"])
    assert (question.question, question.proposed_by) == ("May the last block be cut?", "scripted")
    assert question.choices == ("accept", "reject")
    assert pending_question(graph, config) == question
    assert "May the last block be cut?" in render_text("approval", q=question)
    (again,) = graph.invoke(Command(resume={"decisions": [{"type": "reject"}]}), config)["__interrupt__"]
    assert "a rejection needs a reason" in again.value["question"]["problem"]
    plan, origin = graph.invoke(Command(resume={"decisions": [{"type": "reject", "message": "by a tenth"}]}), config)[
        "plan"
    ]

    assert (origin.by, origin.reason) == ("scripted", "by a tenth")
    assert plan.target is not None
    # The question was asked once.
    assert len(chat.asked) == 2
    assert "ask_user" not in (planned(lambda _: submits(QUARTER))[0].offered)


def test_the_price_of_a_tool_is_in_its_description():
    nothing: Any = None
    lab = Lab({"probe": 7.4}, probe=nothing, probe_layers=nothing, time_plan=nothing, known_kl=nothing)
    chat = Scripted(lambda _: submits(QUARTER))
    described: dict[str, str] = {}
    reply = chat.reply

    def looking(agent: str, messages: Any, tools: Any) -> Any:
        described.update({tool.name: tool.description for tool in tools})
        return reply(agent, messages, tools)

    chat.reply = looking
    advisor_of(chat).find_plan(Planning(FOUND, GOAL, RULES, setting=Setting(lab=lab)))

    assert described["probe"].endswith(" Takes about 7 s of the run's time.")
    assert described["try_plans"].endswith(" Free.")
