"""Chat model: one reply at a time by LangChain's clients, with tools, recorded in the transcript or replayed from one."""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolCall, ToolMessage
from langchain_core.tools import BaseTool, StructuredTool
from pydantic import SecretStr, ValidationError

from profiling_agent.errors import AdvisorError, FieldError, RequestError, ShapeUnresolvedError
from profiling_agent.lib.io import clean, first_line, first_problem
from profiling_agent.llm.transcript import Question, Transcript, redacted
from profiling_agent.schemas import Record

OPENAI_URL, DEFAULT_MODEL = "https://api.openai.com/v1", "gpt-5.5"
# Retries of a request, and calls of tools in one reply: more are left out.
MAX_RETRIES, MAX_CALLS = 2, 8
# Replies to a question with a form to fill in: a refused answer goes back once.
MAX_ANSWERS = 2

FormT = TypeVar("FormT", bound=Record)
AcceptedT = TypeVar("AcceptedT")


class Endpoint(Record):
    """A model on an OpenAI-compatible server, without its key; OpenAI's own server without an address."""

    model: str
    base_url: str | None = None

    @property
    def name(self) -> str:
        """Return the name for reports."""
        return f"openai:{self.model}"


def chat_client(endpoint: Endpoint, key: str, *, timeout_s: float) -> BaseChatModel:
    """Return the LangChain client of an endpoint; makes no request. `timeout_s` limits each request."""
    # Importing it takes seconds.
    from langchain_openai import ChatOpenAI

    return ChatOpenAI(
        model=endpoint.model,
        # Always passed, so that the client takes no other address from the environment.
        base_url=endpoint.base_url or OPENAI_URL,
        api_key=SecretStr(key),
        timeout=timeout_s,
        max_retries=MAX_RETRIES,
        stream_usage=True,
    )


def name_of(model: Any) -> str:
    """Return a chat model's name for reports; raises RequestError for any other object."""
    if not isinstance(model, BaseChatModel):
        raise RequestError(f"advisor is of type {type(model).__name__}: pass a LangChain chat model")
    model_name = getattr(model, "model_name", None) or getattr(model, "model", None)
    return f"{type(model).__name__}:{model_name}" if isinstance(model_name, str) else type(model).__name__


def check_endpoint(endpoint: Endpoint, key: str, *, timeout_s: float) -> None:
    """Request one word; raises RequestError if the server, the key or the model doesn't work."""
    address, model = endpoint.base_url or OPENAI_URL, chat_client(endpoint, key, timeout_s=timeout_s)
    try:
        invoke(model, [HumanMessage("Answer with the word: ready")], (), f"{endpoint.name} at {address}", "check")
    except AdvisorError as error:
        raise RequestError(f"{error}: check the address, the model's name and the key, or use llm=none") from error


def invoke(
    model: BaseChatModel, messages: Sequence[BaseMessage], tools: Sequence[BaseTool], name: str, agent: str
) -> AIMessage:
    """Return the reply of a chat model called `name` in errors; AdvisorError if there is none."""
    try:
        runnable: Any = model.bind_tools(tools) if tools else model
        return runnable.invoke(list(messages), {"run_name": agent})
    # Third-party models, clients and servers raise anything.
    except Exception as error:
        text = f"{type(error).__name__}: {clean(redacted(first_line(error)))[:200]}"
        raise AdvisorError(f"{name} gave no answer ({text})") from error


class Chat:
    """A LangChain chat model that calls tools; every request is in the transcript, and counts for its budget."""

    def __init__(self, model: BaseChatModel, name: str, transcript: Transcript) -> None:
        self.name, self.transcript, self._model = name, transcript, model

    def reply(self, agent: str, messages: Sequence[BaseMessage], tools: Sequence[BaseTool]) -> AIMessage:
        """Return the LLM's next message, and record it with the messages since its last one.

        Raises:
            AdvisorError: no reply came, or the budget is spent.
        """
        self.transcript.check_budget()
        num_known = max((place for place, each in enumerate(messages, 1) if isinstance(each, AIMessage)), default=0)
        turn: dict[str, Any] = {"agent": agent, "model": self.name}
        turn["asked"] = [{"role": each.type, "text": each.text} for each in messages[num_known:]]
        try:
            reply = with_all_calls(invoke(self._model, messages, tools, self.name, agent))
        except AdvisorError as error:
            self.transcript.add("turn", **turn, error=str(error), input_tokens=0, output_tokens=0)
            raise
        counts = {name: (reply.usage_metadata or {}).get(name) for name in ("input_tokens", "output_tokens")}
        counts["characters"] = sum(len(each.text) for each in (*messages, reply))
        self.transcript.add("turn", **turn, text=reply.text, calls=reply.tool_calls, **counts)
        return reply

    def fill_in(
        self, question: Question, tool: str, form: type[FormT], accept: Callable[[FormT], AcceptedT]
    ) -> AcceptedT:
        """Return what `accept` makes of the form that the LLM fills in as the arguments of `tool`.

        Why a form is refused, by FieldError or ShapeUnresolvedError, goes back to the LLM once.

        Raises:
            AdvisorError: no reply came, or no form was accepted.
        """
        offered = StructuredTool(name=tool, description="Hand the answer over.", args_schema=form)
        messages: list[BaseMessage] = [SystemMessage(question.instructions), HumanMessage(question.evidence)]
        problem = ""
        for _ in range(MAX_ANSWERS):
            reply = self.reply(question.agent, messages, [offered])
            problem = f"call {tool}"
            messages.append(reply)
            for call in reply.tool_calls:
                try:
                    return accept(form.model_validate(call["args"]))
                except ValidationError as error:
                    problem = first_problem(error)
                except (FieldError, ShapeUnresolvedError) as error:
                    problem = str(error)
                messages.append(ToolMessage(problem, tool_call_id=call["id"] or ""))
            if not reply.tool_calls:
                messages.append(HumanMessage(problem))
            self.transcript.add("complaint", agent=question.agent, text=problem)
        raise AdvisorError(f"{self.name}: {problem}")


class Recorded(Chat):
    """A transcript in place of a language model: each agent gets its recorded replies in order."""

    def __init__(self, recording: Transcript, transcript: Transcript) -> None:
        self._recording = recording
        self.name, self.transcript = f"{recording.of('turn')[-1].get('model')}, recorded", transcript

    def reply(self, agent: str, messages: Sequence[BaseMessage], tools: Sequence[BaseTool]) -> AIMessage:
        """Return the next recorded reply; AdvisorError if it failed then, or there is none."""
        del messages, tools
        turns, number = self._recording.of("turn", agent=agent), len(self.transcript.of("turn", agent=agent))
        if number >= len(turns):
            raise AdvisorError(f"{self.name}: its {len(turns)} replies for {agent} are used up")
        turn = {name: value for name, value in turns[number].items() if name != "kind"}
        self.transcript.add("turn", **turn | {"mode": "recorded", "input_tokens": 0, "output_tokens": 0})
        if error := turn.get("error"):
            raise AdvisorError(f"{self.name}: {error}")
        return with_all_calls(AIMessage(str(turn.get("text")), tool_calls=turn.get("calls", [])))


def with_all_calls(reply: AIMessage) -> AIMessage:
    """Return a reply with at most MAX_CALLS calls of tools, each with an id, also those whose arguments are no JSON."""
    calls = [
        *reply.tool_calls,
        *(ToolCall(name=c["name"] or "", args={"text": c["args"]}, id=c["id"]) for c in reply.invalid_tool_calls),
    ]
    named = [{**call, "id": call["id"] or f"call_{number}"} for number, call in enumerate(calls[:MAX_CALLS])]
    return reply.model_copy(update={"tool_calls": named, "invalid_tool_calls": []})
