"""Advisor: a question in, a validated answer out after at most two repairs, or AdvisorError."""

import inspect
import json
import time
from collections.abc import Sequence
from typing import Any, get_type_hints

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from pydantic import TypeAdapter, ValidationError

from profiling_agent.errors import AdvisorError
from profiling_agent.llm.chat import Chat, ChatTurn
from profiling_agent.llm.endpoint import redacted
from profiling_agent.llm.extract import NoJsonError, extract_object
from profiling_agent.llm.ledger import Ledger, key_of
from profiling_agent.llm.question import MAX_REPAIRS, Advice, Answer, Check, Question, Tool

MAX_TOOL_ROUNDS = 4
# What is quoted back of an answer that can't be used, and of what a tool returns.
MAX_QUOTED = 4000


class Advisor:
    """One chat model, asked by all agents of a run."""

    def __init__(self, chat: Chat, ledger: Ledger, *, deadline_s: float) -> None:
        """`deadline_s` is the time for one question, its repairs and tools included."""
        self._chat, self._ledger, self._deadline_s = chat, ledger, deadline_s

    @property
    def name(self) -> str:
        """Return the model's name."""
        return self._chat.name

    def ask(
        self,
        question: Question,
        answer_type: type[Answer],
        *,
        check: Check[Answer] | None = None,
        tools: Sequence[Tool] = (),
        max_repairs: int = MAX_REPAIRS,
    ) -> Advice[Answer]:
        """Return the model's answer; one that was accepted before is replayed without a request.

        What `check` says of a valid answer goes back to the model as what is wrong, as an invalid answer does; after
        so many repairs the last valid one is returned with the complaint.

        Raises:
            AdvisorError: no valid answer came.
        """
        schema = answer_type.model_json_schema()
        key = key_of(self.name, (question.instructions, question.evidence), schema)
        value = _stored(self._ledger.answer(key), answer_type)
        if value is not None:
            return Advice(value=value, complaint=check(value) if check else None, repairs=0, is_replayed=True)
        talk = _Talk(self._chat, self._ledger, question, schema, deadline=time.monotonic() + self._deadline_s)
        try:
            advice = talk.lead(answer_type, check, tools, max_repairs)
        except AdvisorError as error:
            self._ledger.note_failure(question.agent, str(error))
            raise
        self._ledger.accept(key, question.agent, advice.value.model_dump(mode="json"))
        return advice


class _Talk:
    """One question's conversation."""

    def __init__(
        self, chat: Chat, ledger: Ledger, question: Question, schema: dict[str, Any], *, deadline: float
    ) -> None:
        self._chat, self._ledger, self._question = chat, ledger, question
        self._schema, self._deadline = schema, deadline
        self._messages: list[BaseMessage] = [SystemMessage(question.instructions), HumanMessage(question.evidence)]

    def lead(
        self, answer_type: type[Answer], check: Check[Answer] | None, tools: Sequence[Tool], max_repairs: int
    ) -> Advice[Answer]:
        """Return the first answer that nothing is wrong with, else the last valid one."""
        usable: Advice[Answer] | None = None
        complaint: str | None = None
        turn = self._after_tools(tools) if tools else None
        for repair in range(max_repairs + 1):
            if turn is None:
                turn = self._chat.ask(self._messages, self._schema, deadline_s=self._left())
            value, complaint = _read(turn.text, answer_type)
            if value is not None:
                complaint = check(value) if check else None
                usable = Advice(value=value, complaint=complaint, repairs=repair, is_replayed=False)
            self._note(turn, complaint)
            if complaint is None and usable is not None:
                return usable
            self._messages += [AIMessage(turn.text[:MAX_QUOTED]), HumanMessage(_please(complaint))]
            turn = None
        if usable is None:
            raise AdvisorError(f"{self._chat.name} gave no valid answer in {max_repairs + 1} turns ({complaint})")
        return usable

    def _after_tools(self, tools: Sequence[Tool]) -> ChatTurn | None:
        """Let the model call tools; return what it said when it was done, None where it is still to be asked."""
        by_name = {tool.__name__: tool for tool in tools}
        for _ in range(MAX_TOOL_ROUNDS):
            turn = self._chat.ask_with_tools(self._messages, tools, deadline_s=self._left())
            if turn is None or not turn.message.tool_calls:
                return turn
            self._note(turn, None)
            self._messages.append(turn.message)
            for call in turn.message.tool_calls:
                said = _called(by_name, call["name"], call["args"])
                self._messages.append(ToolMessage(said[:MAX_QUOTED], tool_call_id=call["id"] or call["name"]))
        return None

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _note(self, turn: ChatTurn, complaint: str | None) -> None:
        self._ledger.note_turn(
            agent=self._question.agent,
            model=self._chat.name,
            mode=self._chat.mode,
            asked=[{"role": message.type, "text": message.text} for message in self._messages],
            said=turn.text,
            calls=[
                {"name": call["name"], "args": redacted(json.dumps(call["args"]))} for call in turn.message.tool_calls
            ],
            complaint=complaint,
            input_tokens=turn.input_tokens,
            output_tokens=turn.output_tokens,
        )


def _stored(document: Any, answer_type: type[Answer]) -> Answer | None:
    try:
        return None if document is None else answer_type.model_validate(document)
    except ValidationError:
        return None


def _read(text: str, answer_type: type[Answer]) -> tuple[Answer | None, str | None]:
    try:
        return answer_type.model_validate(extract_object(text)), None
    except NoJsonError as error:
        return None, str(error)
    except ValidationError as error:
        return None, _problems(error)


def _problems(error: ValidationError) -> str:
    return "; ".join(_problem(each) for each in error.errors(include_url=False, include_context=False)[:5])


def _problem(found: Any) -> str:
    where = ".".join(str(part) for part in found["loc"]) or "the document"
    return f"{where}: {found['msg']} (got {str(found['input'])[:80]!r})"


def _please(complaint: str | None) -> str:
    return f"That can't be used: {complaint}\nAnswer again, with one JSON object of the same schema and nothing else."


def _called(tools: dict[str, Tool], name: str, arguments: dict[str, Any]) -> str:
    tool = tools.get(name)
    if tool is None:
        return f"there is no tool {name!r}; there are {', '.join(sorted(tools))}"
    wrong = _misfit(tool, arguments)
    return f"{name} can't be called so ({wrong})" if wrong else tool(**arguments)


def _misfit(tool: Tool, arguments: dict[str, Any]) -> str | None:
    """Return what of a call doesn't fit the tool's parameters; what a tool raises after that is a bug of ours."""
    kinds = get_type_hints(tool)
    try:
        inspect.signature(tool).bind(**arguments)
        for name, value in arguments.items():
            TypeAdapter(kinds.get(name, Any)).validate_python(value)
    except TypeError as error:
        return str(error)
    except ValidationError as error:
        return _problems(error)
    return None
