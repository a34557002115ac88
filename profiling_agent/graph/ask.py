"""Agent that answers questions about a finished run from its records, and may propose another run.

think <-> tools -> confirm -> think (after a no) or start_run -> think
|
check -> think (once, with the numbers that no record has) or the end
"""

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NotRequired

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AnyMessage, HumanMessage, SystemMessage
from langchain_core.runnables import RunnableConfig
from langchain_core.tools import StructuredTool
from langgraph.checkpoint.memory import InMemorySaver
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.graph.state import CompiledStateGraph
from langgraph.prebuilt import ToolNode
from langgraph.runtime import Runtime
from langgraph.types import Command, interrupt

from profiling_agent.errors import FieldError, ProfilingAgentError, RequestError
from profiling_agent.graph.state import Allowlist, choose_endpoint, key_for, trusted_addresses
from profiling_agent.llm.chat import chat_client, invoke, name_of, with_all_calls
from profiling_agent.llm.numbers import unsupported_numbers
from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.reporting.records import Records, changed_request
from profiling_agent.request import Request

# Replies with tool calls in a row; then the LLM has to answer.
MAX_ROUNDS = 8
TIMEOUT_S = 120.0
# Senders of complaints about numbers, and of what became of a proposed run.
CHECK, RUN = "check", "run"
# Answers to the first valid proposal of a reply, and to its others.
PROPOSED, NOT_PROPOSED = "proposed; the person is asked", "not proposed: one run at a time"


@dataclass(frozen=True)
class AskContext:
    """Which run is asked about, and by which LLM; without `llm` it is the one that planned the run.

    Keys of the environment go to `base_url` only if it is given here or is the environment's.
    """

    run: str = ""
    llm: str | None = None
    base_url: str | None = None


class AskState(MessagesState):
    """The conversation."""

    # Whether the answer to the last question went back for its numbers.
    is_corrected: NotRequired[bool]
    # Changes of a request that a person has confirmed.
    confirmed: NotRequired[dict[str, Any] | None]


def since_question(messages: list[AnyMessage]) -> list[AnyMessage]:
    """Return the messages from the person's last question on."""
    questions = [place for place, message in enumerate(messages) if message.type == "human" and not message.name]
    return messages[questions[-1] :] if questions else messages


def check(state: AskState) -> dict[str, Any]:
    """Send an answer back, once, whose numbers are in no tool's result."""
    turn = since_question(state["messages"])
    sources = [message.text for message in turn[:-1] if message.type in ("human", "tool") and message.name != CHECK]
    missing = unsupported_numbers(turn[-1].text, sources)
    if not missing:
        return {"is_corrected": False}
    numbers = ", ".join(missing)
    if state.get("is_corrected"):
        note = f"{turn[-1].text}\n\n(not in the run's records: {numbers})"
        return {"messages": [turn[-1].model_copy(update={"content": note})], "is_corrected": False}
    complaint = f"No tool returned these numbers: {numbers}. Look them up, or answer without them."
    return {"messages": [HumanMessage(complaint, name=CHECK)], "is_corrected": True}


def route_after_think(state: AskState) -> Literal["tools", "check"]:
    """Carry out the calls of a reply, or check its answer."""
    may_look_up = num_replies(state["messages"]) <= MAX_ROUNDS
    return "tools" if may_look_up and getattr(state["messages"][-1], "tool_calls", None) else "check"


def route_after_tools(state: AskState) -> Literal["confirm", "think"]:
    """Ask the person about a valid proposal."""
    return "confirm" if proposal_in(state["messages"])[0] else "think"


def route_after_confirm(state: AskState) -> Literal["start_run", "think"]:
    """Start what was confirmed."""
    return "start_run" if state.get("confirmed") else "think"


def route_after_check(state: AskState) -> Literal["think", "__end__"]:
    """Let the LLM answer again if its numbers are in no record."""
    return "think" if state.get("is_corrected") else "__end__"


def build_ask_graph(
    start: Callable[[Request], str],
    *,
    allowlist: Allowlist | None = None,
    checkpointer: Any = None,
    model: BaseChatModel | None = None,
) -> CompiledStateGraph[Any, Any, Any, Any]:
    """Return the compiled graph; its input is `{"messages": [...]}`, its context an AskContext.

    `start` begins a run that a person has confirmed, and returns what came of it in words. `model` answers instead of the
    context's. `allowlist` is a server's: the folders and addresses that a context may name.
    """

    def think(state: AskState, runtime: Runtime[AskContext]) -> dict[str, Any]:
        """Let the LLM call tools, or answer."""
        context = runtime.context
        records = open_records(context, allowlist)
        llm = model or client(records, context, allowlist)
        offered = tools(records) if num_replies(state["messages"]) < MAX_ROUNDS else ()
        messages = [SystemMessage(render("ask")), *state["messages"]]
        reply = with_all_calls(invoke(llm, messages, offered, name_of(llm), "ask"))
        return {"messages": [reply]}

    def use_tools(state: AskState, runtime: Runtime[AskContext]) -> dict[str, Any]:
        """Look up what the LLM asked for; a call that can't be made is answered with the reason."""
        results = ToolNode(tools(open_records(runtime.context, allowlist))).invoke(state)["messages"]
        for result in [result for result in results if result.text == PROPOSED][1:]:
            result.content = NOT_PROPOSED
        return {"messages": results}

    def confirm(state: AskState, runtime: Runtime[AskContext]) -> dict[str, Any]:
        """Wait until a person says yes or no to the proposed run."""
        changes, reason = proposal_in(state["messages"])
        request = changed_request(open_records(runtime.context, allowlist).request, changes)
        place = f"model {request.model}, data {request.dataset}, results in {request.output}"
        action = {"name": "propose_run", "args": changes, "description": f"{reason} ({place})"}
        review = {"action_name": "propose_run", "allowed_decisions": ["approve", "reject"]}
        match interrupt({"action_requests": [action], "review_configs": [review]}):
            case "approve" | "accept" | {"decisions": [{"type": "approve" | "accept"}]}:
                return {"confirmed": changes}
            case _:
                return {"confirmed": None, "messages": [HumanMessage("No, don't start it.", name=RUN)]}

    def start_run(state: AskState, runtime: Runtime[AskContext]) -> dict[str, Any]:
        """Start the confirmed run; what came of it is a message."""
        request = changed_request(open_records(runtime.context, allowlist).request, state.get("confirmed") or {})
        try:
            text = start(request)
        except ProfilingAgentError as error:
            text = f"it can't be started: {error}"
        return {"confirmed": None, "messages": [HumanMessage(f"Yes. The run: {text}", name=RUN)]}

    graph = StateGraph(AskState, context_schema=AskContext)
    for node in (think, check, confirm, start_run):
        graph.add_node(node.__name__, node)
    graph.add_node("tools", use_tools)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", route_after_think)
    graph.add_conditional_edges("tools", route_after_tools)
    graph.add_conditional_edges("confirm", route_after_confirm)
    graph.add_edge("start_run", "think")
    graph.add_conditional_edges("check", route_after_check)
    return graph.compile(checkpointer=checkpointer, name="ask")


def open_records(context: AskContext | None, allowlist: Allowlist | None) -> Records:
    """Return the records of the context's run; RequestError if there is none, or a server may not open it."""
    if context is None or not context.run:
        raise RequestError("no run is named: set `run` in the context to the folder of a finished run")
    if allowlist is not None:
        allowlist.check(Request(output=context.run, base_url=context.base_url))
    return Records(Path(context.run).expanduser())


def client(records: Records, context: AskContext, allowlist: Allowlist | None) -> BaseChatModel:
    """Return the client of the context's LLM, else of the run's; RequestError if neither names one, or a server may not ask it."""
    request = records.request
    llm, base_url = (
        (context.llm, context.base_url) if context.llm else (request.llm, context.base_url or request.base_url)
    )
    endpoint = choose_endpoint(llm, base_url)
    if endpoint is None:
        raise RequestError("answers come from an LLM, and the run had none: name one, as in --llm openai:MODEL")
    if allowlist is not None:
        # The address may be from the run's report.
        allowlist.check(Request(llm=llm, base_url=base_url))
    trusted = trusted_addresses(os.environ, *((context.base_url,) if allowlist is None else allowlist.addresses))
    return chat_client(endpoint, key_for(endpoint, trusted), timeout_s=TIMEOUT_S)


def num_replies(messages: list[AnyMessage]) -> int:
    """Return how many replies the LLM has given since the person's last question."""
    return sum(message.type == "ai" for message in since_question(messages))


def tools(records: Records) -> list[StructuredTool]:
    """Return the lookups in a run, and the proposal of another one, which a person has to confirm."""

    def propose_run(changes: dict[str, Any], reason: str) -> str:
        """Propose a new run with changed limits, such as {"max_accuracy_drop": 0.02}; a person confirms it. One at a time."""
        del reason
        if not changes:
            return "no such request: it changes nothing"
        try:
            changed_request(records.request, changes)
        except FieldError as error:
            return f"no such request: {error}"
        return PROPOSED

    return [StructuredTool.from_function(function) for function in (*records.lookups, propose_run)]


def proposal_in(messages: list[AnyMessage]) -> tuple[dict[str, Any], str]:
    """Return the changes and the reason of the valid proposal in the last reply; no changes if there is none."""
    (reply,) = [message for message in messages if message.type == "ai"][-1:]
    calls = {call["id"]: call["args"] for call in getattr(reply, "tool_calls", ()) if call["name"] == "propose_run"}
    for message in messages[messages.index(reply) :]:
        if message.type == "tool" and message.text == PROPOSED and message.tool_call_id in calls:
            arguments = calls[message.tool_call_id]
            return arguments["changes"], arguments["reason"]
    return {}, ""


def answer_question(
    context: AskContext, question: str, confirm: Callable[[dict[str, Any], str], bool]
) -> tuple[str, Request | None]:
    """Return the answer to one question, and the request of the run that the LLM proposed, if `confirm` agreed to it.

    `confirm` is called with the changed fields and the reason. After it has agreed to one run, others are declined.
    """
    confirmed: list[Request] = []

    def start(request: Request) -> str:
        confirmed.append(request)
        return "it starts after this answer"

    graph = build_ask_graph(start, checkpointer=InMemorySaver())
    config = RunnableConfig(configurable={"thread_id": "ask"})
    result = graph.invoke({"messages": [HumanMessage(question)]}, config, context=context)
    while waiting := result.get("__interrupt__"):
        proposed = waiting[0].value["action_requests"][0]
        is_confirmed = not confirmed and confirm(proposed["args"], proposed["description"])
        decision = "approve" if is_confirmed else "reject"
        result = graph.invoke(Command(resume={"decisions": [{"type": decision}]}), config, context=context)
    return result["messages"][-1].text, confirmed[0] if confirmed else None
