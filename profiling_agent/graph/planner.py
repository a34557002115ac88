"""Planner: the subgraph in which the LLM finds a plan with tools, for the analysis and the iterative pruning agent.

    brief -> think <-> tools
               |  ^      |
               v  |      |
              check <----+
               |
               v
              plan

`brief` writes the evidence, `think` asks the LLM, `tools` carries its calls out, `check` refuses what a dry run or a probe speaks against, and `plan`
hands over. Without a reply `think` leads to `plan`. Every step is a checkpoint: a run that is killed in a probe repeats no request.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from langchain_core.messages import AIMessage, AnyMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from langgraph.graph import END, START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode
from langgraph.prebuilt.tool_node import ToolInvocationError
from langgraph.runtime import Runtime

from profiling_agent.errors import AdvisorError, PlanError
from profiling_agent.graph.approval import ask_person
from profiling_agent.graph.checkpoints import call_subgraph
from profiling_agent.jobs.runner import Jobs
from profiling_agent.lib.io import clean, first_problem
from profiling_agent.llm.chat import Chat
from profiling_agent.planning.llm_planner import MAX_ANSWER, Planning, Submission
from profiling_agent.schemas import ApprovalQuestion

# Replies of the LLM for one plan, and refusals that go back to it; after one more the rules plan.
MAX_REPLIES, MAX_REFUSALS = 20, 2
# Steps of the subgraph for as many replies, each with its tools and check.
MAX_STEPS = 3 * MAX_REPLIES + 10
HANDOVER = ("submit", "stop")


class Conversation(MessagesState, total=False):
    """State of the subgraph: the messages, and how it ended."""

    num_refused: int
    is_accepted: bool
    spent_s: float
    failure: str
    answer: dict[str, Any]


@dataclass(frozen=True)
class PlannerContext:
    """Context of the subgraph: the LLM, the plan to be found, and the jobs that its tools do.

    With `asks` a person may be asked, which needs a checkpointer.
    """

    chat: Chat
    planning: Planning
    jobs: Jobs
    asks: bool = False

    @property
    def tools(self) -> list[BaseTool]:
        """Return the tools, each with its price in its description."""
        return [self._tool(each) for each in (*self.planning.tools, *([self.ask_user] if self.asks else []))]

    def ask_user(self, question: str) -> str:
        """Ask the person who approves plans; they say yes, or answer in a sentence. The run waits for them."""
        asked = ApprovalQuestion(
            run_id=self.jobs.workspace.root.name,
            attempt=self.planning.attempt,
            proposed_by=self.chat.name,
            question=clean(question),
            choices=("accept", "reject"),
        )
        return ask_person(asked, {}).reason or "yes"

    def _tool(self, function: Callable[..., str]) -> BaseTool:
        lab = self.planning.setting.lab
        price_s = lab.prices.get(function.__name__, 0.0) if lab else 0.0
        price = f"Takes about {price_s:.0f} s of the run's time." if price_s else "Free."
        return StructuredTool.from_function(function, description=f"{function.__doc__} {price}")


def find_plan(planning: Planning, chat: Chat, jobs: Jobs, *, asks: bool = False) -> Submission:
    """Return what the LLM hands over; raises AdvisorError if it fails, or submits nothing that may be measured."""
    ended = call_subgraph(PLANNER, {"messages": []}, PlannerContext(chat, planning, jobs, asks))
    if "answer" not in ended:
        raise AdvisorError(ended["failure"])
    return Submission.model_validate(ended["answer"])


def brief(state: Conversation, runtime: Runtime[PlannerContext]) -> Conversation:
    """Write the instructions and the evidence."""
    del state
    question = runtime.context.planning.question()
    return {"messages": [SystemMessage(question.instructions), HumanMessage(question.evidence)]}


def think(state: Conversation, runtime: Runtime[PlannerContext]) -> Conversation:
    """Ask the LLM for its next step."""
    context, messages = runtime.context, state["messages"]
    chat, number = context.chat, sum(isinstance(message, AIMessage) for message in messages) + 1
    if number > MAX_REPLIES:
        return {"messages": [], "failure": f"{chat.name} submitted no plan in {MAX_REPLIES} replies"}
    context.jobs.progress(f"{chat.name} thinks, reply {number} of {MAX_REPLIES} at most", 0, 0)
    try:
        return {"messages": [chat.reply(context.planning.agent, messages, context.tools)]}
    except AdvisorError as error:
        return {"messages": [], "failure": str(error)}


def use_tools(state: Conversation, runtime: Runtime[PlannerContext]) -> Conversation:
    """Carry out the calls of the last reply, one after the other; probes are jobs, and take of the run's time."""
    context, reply = runtime.context, state["messages"][-1]
    assert isinstance(reply, AIMessage), "only its calls lead here"
    timesheet = context.jobs.timesheet
    timesheet.resume_at(state.get("spent_s", 0.0))
    context.jobs.progress(f"{context.chat.name} calls {', '.join(call['name'] for call in reply.tool_calls)}", 0, 0)
    node: Any = ToolNode(context.tools, handle_tool_errors=_describe)
    answers: list[AnyMessage] = node.invoke({"messages": state["messages"]})["messages"]
    answers = [answer.model_copy(update={"content": answer.text[:MAX_ANSWER]}) for answer in answers]
    for call, answer in zip(reply.tool_calls, answers, strict=True):
        context.chat.transcript.add_call(context.planning.attempt, call["name"], call["args"], answer.text)
    return {"messages": answers, "spent_s": timesheet.spent_s}


def _describe(error: ToolInvocationError | PlanError) -> str:
    if isinstance(error, PlanError):
        return str(error)
    return f"these arguments can't be used: {first_problem(error.source)}"


def check(state: Conversation, runtime: Runtime[PlannerContext]) -> Conversation:
    """Refuse a plan that a dry run or a probe speaks against; the complaint goes back, at most twice."""
    context = runtime.context
    handed = handed_over(state["messages"])
    if handed is None:
        tools = " or ".join(tool.name for tool in context.tools if tool.name in HANDOVER)
        is_mute = not any(isinstance(message, ToolMessage) for message in state["messages"])
        omission = "no tool was called, which planning needs" if is_mute else "nothing was handed over"
        problem = f"{omission}: call {tools}"
    elif handed.plan is None or (problem := context.planning.objection(handed.plan)) is None:
        return {"messages": [], "is_accepted": True}
    context.chat.transcript.add("complaint", agent=context.planning.agent, text=problem)
    number = state.get("num_refused", 0) + 1
    if number > MAX_REFUSALS:
        return {"messages": [], "num_refused": number, "failure": f"{context.chat.name}: {problem}"}
    return {"messages": [HumanMessage(f"Refused: {problem}")], "num_refused": number}


def plan(state: Conversation, runtime: Runtime[PlannerContext]) -> Conversation:
    """Hand over the plan, or why there is none."""
    context, handed = runtime.context, handed_over(state["messages"])
    if failure := state.get("failure"):
        context.chat.transcript.add("failure", agent=context.planning.agent, reason=failure)
    if failure or handed is None:
        return {"messages": []}
    answer = handed.model_copy(update={"repairs": state.get("num_refused", 0)})
    return {"messages": [], "answer": answer.model_dump(mode="json")}


def handed_over(messages: Sequence[BaseMessage]) -> Submission | None:
    """Return what the last reply hands over, by the last of its calls that was valid; None if it only calls other tools, or none."""
    place = max((place for place, message in enumerate(messages) if isinstance(message, AIMessage)), default=0)
    reply, valid = messages[place], set[str]()
    if not isinstance(reply, AIMessage):
        return None
    for answer in messages[place + 1 :]:
        if isinstance(answer, ToolMessage) and answer.status != "error":
            valid.add(answer.tool_call_id)
    calls = [call for call in reply.tool_calls if call["name"] in HANDOVER and call["id"] in valid]
    return Submission.model_validate({"plan": None, **calls[-1]["args"]}) if calls else None


def route_after_think(state: Conversation) -> Literal["tools", "check", "plan"]:
    """Carry out the calls; a reply without any is checked, and complained about."""
    last = state["messages"][-1]
    if state.get("failure"):
        return "plan"
    return "tools" if isinstance(last, AIMessage) and last.tool_calls else "check"


def route_after_tools(state: Conversation) -> Literal["think", "check"]:
    """Check what was handed over, else go on."""
    return "check" if handed_over(state["messages"]) else "think"


def route_after_check(state: Conversation) -> Literal["think", "plan"]:
    """Hand over, or think again about a complaint."""
    return "plan" if state.get("failure") or state.get("is_accepted") else "think"


def build_planner() -> Any:
    """Return the compiled subgraph."""
    graph = StateGraph(Conversation, context_schema=PlannerContext)
    graph.add_node("brief", brief)
    graph.add_node("think", think)
    graph.add_node("tools", use_tools)
    graph.add_node("check", check)
    graph.add_node("plan", plan)
    graph.add_edge(START, "brief")
    graph.add_edge("brief", "think")
    graph.add_conditional_edges("think", route_after_think)
    graph.add_conditional_edges("tools", route_after_tools)
    graph.add_conditional_edges("check", route_after_check)
    graph.add_edge("plan", END)
    # One call at a time: jobs of a run don't run side by side.
    return graph.compile(name="planner").with_config(recursion_limit=MAX_STEPS, max_concurrency=1)


PLANNER = build_planner()
