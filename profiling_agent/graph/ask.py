"""Agent that answers questions about a finished run from its records, and may propose another run.

think <-> tools
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
from pydantic import ValidationError

from profiling_agent.errors import RequestError
from profiling_agent.graph.state import Allowlist, choose_endpoint, key_for, trusted_addresses
from profiling_agent.lib.io import first_problem
from profiling_agent.llm.chat import chat_client, invoke, name_of, with_all_calls
from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install
from profiling_agent.reporting.records import Records, changed_request, unsupported_numbers
from profiling_agent.request import Request

# Replies with tool calls in a row; then the LLM has to answer.
MAX_ROUNDS = 8
TIMEOUT_S = 120.0
# Sender of complaints about numbers.
CHECK = "check"


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


def since_question(messages: list[AnyMessage]) -> list[AnyMessage]:
    """Return the messages from the person's last question on."""
    asked = [place for place, message in enumerate(messages) if message.type == "human" and message.name != CHECK]
    return messages[asked[-1] :] if asked else messages


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
        context, turn = runtime.context, since_question(state["messages"])
        records = open_records(context, allowlist)
        llm = model or client(records, context, allowlist)
        may_look_up = sum(message.type == "ai" for message in turn) < MAX_ROUNDS
        offered = tools(records, start) if may_look_up else ()
        messages = [SystemMessage(render("ask")), *state["messages"]]
        reply = with_all_calls(invoke(llm, messages, offered, name_of(llm), "ask"))
        return {"messages": [reply]}

    def use_tools(state: AskState, runtime: Runtime[AskContext]) -> Any:
        """Look up what the LLM asked for; a call that can't be made is answered with the reason."""
        return ToolNode(tools(open_records(runtime.context, allowlist), start)).invoke(state)

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
        return "tools" if getattr(state["messages"][-1], "tool_calls", None) else "check"

    def route_after_check(state: AskState) -> Literal["think", "__end__"]:
        return "think" if state.get("is_corrected") else "__end__"

    graph = StateGraph(AskState, context_schema=AskContext)
    graph.add_node("think", think)
    graph.add_node("tools", use_tools)
    graph.add_node("check", check)
    graph.add_edge(START, "think")
    graph.add_conditional_edges("think", route_after_think)
    graph.add_edge("tools", "think")
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
    request = records.report.request
    llm, base_url = (
        (context.llm, context.base_url) if context.llm else (request.llm, context.base_url or request.base_url)
    )
    endpoint = choose_endpoint(llm, base_url)
    if endpoint is None:
        raise RequestError("answers come from an LLM, and the run had none: name one, as in --llm openai:MODEL")
    if allowlist is not None:
        # The address may be from the run's report.
        allowlist.check(Request(llm=llm, base_url=base_url))
    trusted = trusted_addresses(os.environ, *((context.base_url,) if allowlist is None else ()))
    return chat_client(endpoint, key_for(endpoint, trusted), timeout_s=TIMEOUT_S)


def tools(records: Records, start: Callable[[Request], str]) -> list[StructuredTool]:
    """Return the lookups in a run, and the proposal of another one, which waits for a person."""

    def propose_run(changes: dict[str, Any], reason: str) -> str:
        """Propose a new run with changed fields of the request, such as {"max_accuracy_drop": 0.02}; a person confirms it."""
        try:
            request = changed_request(records.report.request, changes)
        except ValidationError as error:
            return f"no such request: {first_problem(error)}"
        question = {
            "action_requests": [{"name": "propose_run", "args": changes, "description": reason}],
            "review_configs": [{"action_name": "propose_run", "allowed_decisions": ["approve", "reject"]}],
        }
        answer: Any = interrupt(question)
        decisions = answer.get("decisions", [{}]) if isinstance(answer, dict) else [{"type": answer}]
        return start(request) if decisions[0].get("type") in ("approve", "accept") else "the user declines"

    return [StructuredTool.from_function(function) for function in (*records.lookups, propose_run)]


def answer_question(
    context: AskContext, question: str, confirm: Callable[[dict[str, Any], str], bool]
) -> tuple[str, Request | None]:
    """Return the answer to one question, and the request of the run that the LLM proposed, if `confirm` agreed to it.

    `confirm` is called with the changed fields and the reason.
    """
    confirmed: list[Request] = []

    def start(request: Request) -> str:
        confirmed.append(request)
        return "it starts after this answer"

    graph, config = (
        build_ask_graph(start, checkpointer=InMemorySaver()),
        RunnableConfig(configurable={"thread_id": "ask"}),
    )
    result = graph.invoke({"messages": [HumanMessage(question)]}, config, context=context)
    while waiting := result.get("__interrupt__"):
        proposed = waiting[0].value["action_requests"][0]
        decision = "approve" if confirm(proposed["args"], proposed["description"]) else "reject"
        result = graph.invoke(Command(resume={"decisions": [{"type": decision}]}), config, context=context)
    return result["messages"][-1].text, confirmed[-1] if confirmed else None
