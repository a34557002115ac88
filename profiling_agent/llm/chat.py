"""Chat model: requests by LangChain's clients, and parsing of answers from replies."""

import json
import re
import time
from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from typing import Any, cast

from langchain_core.exceptions import ContextOverflowError
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolCall, ToolMessage
from langchain_core.tools import StructuredTool
from pydantic import SecretStr, ValidationError

from profiling_agent.errors import AdvisorError, ContextTooLongError, RequestError
from profiling_agent.lib.io import clean, first_line, first_problem
from profiling_agent.llm import transcript
from profiling_agent.llm.transcript import Advice, Answer, Check, Question, Tool, Transcript
from profiling_agent.schemas import Record

OPENAI_URL, DEFAULT_MODEL = "https://api.openai.com/v1", "gpt-5.5"
# Status codes of servers that don't support tools or a response format.
UNSUPPORTED_STATUS = (400, 404, 422, 501)
TOO_LONG = re.compile(r"context (length|window|size)|context_length|prompt is too long", re.IGNORECASE)
MAX_RETRIES, MAX_TOOL_ROUNDS, MAX_CALLS, MAX_QUOTED = 2, 4, 8, 4000
TAGS = r"(?:think|thinking|thought|reasoning)"
OPENING = re.compile(rf"<{TAGS}>|\[THINK\]|<\|channel\|>analysis", re.IGNORECASE)
CLOSING = re.compile(rf"</{TAGS}>|\[/THINK\]|<\|channel\|>final", re.IGNORECASE)


class Endpoint(Record):
    """A model on an OpenAI-compatible server, without its key; OpenAI's own server without an address."""

    model: str
    base_url: str | None = None

    @property
    def name(self) -> str:
        """Return the name for reports."""
        return f"openai:{self.model}"


def chat_client(endpoint: Endpoint, key: str, *, timeout_s: float) -> BaseChatModel:
    """Return the LangChain client of an endpoint; makes no request."""
    # Importing it takes seconds.
    from langchain_openai import ChatOpenAI

    class ReasoningChatOpenAI(ChatOpenAI):
        """ChatOpenAI that keeps the reasoning which servers send next to the content."""

        def _create_chat_result(self, response: Any, generation_info: dict[str, Any] | None = None) -> Any:
            result = super()._create_chat_result(response, generation_info)
            document = response if isinstance(response, dict) else response.model_dump(warnings=False)
            for generation, choice in zip(result.generations, document["choices"], strict=True):
                reasoning = choice["message"].get("reasoning_content") or choice["message"].get("reasoning")
                generation.message.additional_kwargs["reasoning_content"] = reasoning
            return result

    return ReasoningChatOpenAI(
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
        _invoke(model, [HumanMessage("Answer with the word: ready")], f"{endpoint.name} at {address}", "check")
    except AdvisorError as error:
        raise RequestError(f"{error}: check the address, the model's name and the key, or use llm=none") from error


class _UnsupportedError(AdvisorError):
    """The server doesn't support the response format, or tools."""


def _invoke(model: Any, messages: Sequence[BaseMessage], name: str, agent: str) -> AIMessage:
    try:
        reply = model.invoke(list(messages), {"run_name": agent})
    # Third-party models, clients and servers raise anything; the rules plan without them.
    except Exception as error:
        text = f"{name} gave no answer ({type(error).__name__}: {clean(transcript.redacted(first_line(error)))[:200]})"
        if isinstance(error, ContextOverflowError) or TOO_LONG.search(str(error)):
            raise ContextTooLongError(text) from error
        if getattr(error, "status_code", None) in UNSUPPORTED_STATUS or isinstance(error, NotImplementedError):
            raise _UnsupportedError(text) from error
        raise AdvisorError(text) from error
    return cast("AIMessage", reply["raw"] if isinstance(reply, dict) else reply)


class Chat(transcript.LanguageModel):
    """A LangChain chat model that answers typed questions by the response formats and tools that its server supports."""

    def __init__(self, model: BaseChatModel, name: str, written: Transcript, *, timeout_s: float) -> None:
        """`timeout_s` limits a question: no request begins after it."""
        super().__init__(name, written)
        self._model, self._timeout_s, self._deadline = model, timeout_s, 0.0
        self._methods, self._knows_tools = ["json_schema", "json_mode", "plain"], True

    def _answer(
        self, question: Question, answer_type: type[Answer], check: Check[Answer], tools: Sequence[Tool]
    ) -> Advice[Answer]:
        """Ask, and ask again up to MAX_REPAIRS times; return the last valid answer, even if `check` rejects it."""
        self._deadline, agent = time.monotonic() + self._timeout_s, question.agent
        messages: list[BaseMessage] = [SystemMessage(question.instructions), HumanMessage(question.evidence)]
        reply = self._use_tools(messages, tools, agent) if tools else None
        usable: Advice[Answer] | None = None
        complaint: str | None = None
        for repair in range(transcript.MAX_REPAIRS + 1):
            try:
                reply = reply or self._request_json(messages, answer_type.model_json_schema(), agent)
            except AdvisorError:
                if usable is None:
                    raise
                return usable
            value, complaint = read_answer(reply, answer_type)
            if value is not None:
                complaint = check(value)
                usable = Advice(value, complaint, repair)
                if complaint is None:
                    return usable
            self._transcript.add("complaint", agent=agent, text=complaint)
            repair_prompt = f"That can't be used: {complaint}\nAnswer again, with one JSON object of the same schema and nothing else."
            messages += [AIMessage(reply.text[:MAX_QUOTED]), HumanMessage(repair_prompt)]
            reply = None
        if usable is None:
            raise AdvisorError(f"{self.name} gave no valid answer in {transcript.MAX_REPAIRS + 1} turns ({complaint})")
        return usable

    def _request_json(self, messages: Sequence[BaseMessage], schema: dict[str, Any], agent: str) -> AIMessage:
        """Request JSON of this schema; a method that the server doesn't support is not used again."""
        while True:
            model: Any = self._model
            try:
                if (method := self._methods[0]) != "plain":
                    model = model.with_structured_output(schema, method=method, include_raw=True)
                return self._request(model, messages, agent, method)
            except (NotImplementedError, ValueError, _UnsupportedError):
                if len(self._methods) == 1:
                    raise
                self._methods.pop(0)

    def _use_tools(self, messages: list[BaseMessage], tools: Sequence[Tool], agent: str) -> AIMessage | None:
        """Let the LLM call tools; return its reply without calls, or add the results to the evidence and return None."""
        tools_by_name = {
            tool.__name__: StructuredTool.from_function(tool, handle_validation_error=first_problem) for tool in tools
        }
        history, results = list(messages), list[str]()
        for _ in range(MAX_TOOL_ROUNDS if self._knows_tools else 0):
            try:
                reply = self._request(self._model.bind_tools([*tools_by_name.values()]), history, agent, "tools")
            except (NotImplementedError, _UnsupportedError):
                self._knows_tools = False
                break
            calls = (reply.tool_calls or calls_in(reply.text, tools_by_name))[:MAX_CALLS]
            if not calls:
                return reply
            history.append(reply.model_copy(update={"tool_calls": calls}))
            for call in calls:
                tool = tools_by_name.get(call["name"])
                text = str(tool.invoke(call["args"])) if tool else f"no such tool; there are {', '.join(tools_by_name)}"
                history.append(ToolMessage(text[:MAX_QUOTED], tool_call_id=call["id"] or ""))
                results.append(f"{call['name']}({json.dumps(call['args'])}): {text[:MAX_QUOTED]}")
        if results:
            # As text: some servers refuse a history of calls without the tools.
            messages[1] = HumanMessage("\n".join([messages[1].text, "", "What the tools returned:", *results]))
        return None

    def _request(self, model: Any, messages: Sequence[BaseMessage], agent: str, method: str) -> AIMessage:
        """Make one request and record it; raises AdvisorError, also if no budget or time is left."""
        self._transcript.check_budget()
        if time.monotonic() > self._deadline:
            raise AdvisorError(f"{self.name} took longer than {self._timeout_s:g} s: llm_timeout_s gives it longer")
        request = [{"role": message.type, "text": message.text} for message in messages]
        turn: dict[str, Any] = {"agent": agent, "model": self.name, "mode": method, "asked": request}
        try:
            reply = _invoke(model, messages, self.name, agent)
        except AdvisorError as error:
            self._transcript.add("turn", **turn, error=str(error), input_tokens=0, output_tokens=0)
            raise
        counts = {name: (reply.usage_metadata or {}).get(name) for name in ("input_tokens", "output_tokens")}
        extra_texts = {name: text for name, text in reply.additional_kwargs.items() if isinstance(text, str)}
        self._transcript.add("turn", **turn, text=reply.text, calls=reply.tool_calls, beside=extra_texts, **counts)
        if refusal := reply.additional_kwargs.get("refusal"):
            raise AdvisorError(f"{self.name} refuses to answer: {clean(str(refusal))[:200]}")
        return reply


def after_reasoning(text: str) -> str:
    """Return the text after the reasoning: some servers drop its first tag, and the last is missing if tokens ran out."""
    return OPENING.split(CLOSING.split(text)[-1])[0]


def objects_in(text: str) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yield each JSON object with its start and end, nested ones after those that contain them."""
    decoder, start = json.JSONDecoder(), text.find("{")
    while start >= 0:
        with suppress(ValueError):
            document, end = decoder.raw_decode(text, start)
            yield document, start, end
        start = text.find("{", start + 1)


def calls_in(text: str, known: Collection[str]) -> list[ToolCall]:
    """Return the calls of known tools that are written as text."""
    calls = [document for document, *_ in objects_in(after_reasoning(text)) if str(document.get("name")) in known]
    return [
        ToolCall(name=call["name"], args=call.get("arguments") or call.get("parameters") or {}, id=f"call_{number}")
        for number, call in enumerate(calls)
    ]


def read_answer(reply: AIMessage, answer_type: type[Answer]) -> tuple[Answer | None, str | None]:
    """Return the last answer after the reasoning, or what is wrong with it; objects of other kinds don't count."""
    text, reasoning = after_reasoning(reply.text), str(reply.additional_kwargs.get("reasoning_content") or "").strip()
    if not text.strip():
        # Some servers return the whole answer as reasoning.
        whole = reasoning if reasoning.startswith(("{", "```")) else ""
        text = json.dumps(reply.tool_calls[-1]["args"]) if reply.tool_calls else whole
    value, complaint, answer_end = None, "there is no JSON object: answer with one complete object and nothing else", 0
    for document, start, end in objects_in(text):
        if start < answer_end:
            continue
        try:
            value, complaint, answer_end = answer_type.model_validate(document), None, end
        except ValidationError as error:
            if document.keys() & answer_type.model_fields.keys():
                value, complaint, answer_end = None, first_problem(error), end
    return value, complaint
