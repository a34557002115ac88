"""Advisor: a question in, a validated answer out after at most two repairs, or AdvisorError."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from langchain_core.messages import AIMessage, BaseMessage, HumanMessage, SystemMessage, ToolMessage
from pydantic import ValidationError

from profiling_agent.errors import AdvisorError
from profiling_agent.llm.calls import MAX_CALLS, Call, carried_out
from profiling_agent.llm.chat import Chat, ChatTurn
from profiling_agent.llm.endpoint import redacted
from profiling_agent.llm.extract import NoJsonError, extract_object, problems
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
            try:
                turn = turn or self._asked()
            except AdvisorError:
                if usable is None:
                    raise
                return usable
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

    def _asked(self) -> ChatTurn:
        return self._chat.ask(self._messages, self._schema, deadline_s=self._left(), agent=self._question.agent)

    def _after_tools(self, tools: Sequence[Tool]) -> ChatTurn | None:
        """Let the model call tools; return what it said when it was done, None where it is still to be asked."""
        by_name = {tool.__name__: tool for tool in tools}
        heard: list[str] = []
        for _ in range(MAX_TOOL_ROUNDS):
            turn = self._chat.ask_with_tools(self._messages, tools, deadline_s=self._left(), agent=self._question.agent)
            if turn is None:
                break
            if not turn.calls:
                return turn
            self._note(turn, None)
            self._messages.append(AIMessage(turn.text[:MAX_QUOTED], tool_calls=[call.said for call in turn.calls]))
            told = [self._told(call, by_name, turn.num_calls) for call in turn.calls]
            self._messages += [
                ToolMessage(said, tool_call_id=call.id) for call, said in zip(turn.calls, told, strict=True)
            ]
            heard += [f"{call.name}({call.text}): {said}" for call, said in zip(turn.calls, told, strict=True)]
        if heard:
            # As one text: some servers refuse a history of calls without the thoughts between them, or without the tools.
            said = "\n".join([self._question.evidence, "", "What the tools said when they were called:", *heard])
            self._messages[1:] = [HumanMessage(said)]
        return None

    def _told(self, call: Call, tools: Mapping[str, Tool], num_calls: int) -> str:
        """Return what a tool says to a call, and where it is too much, or one of too many, that it is."""
        if self._left() <= 0:
            raise AdvisorError(
                f"{self._chat.name} gave no answer (its calls of tools took longer than the question may)"
            )
        said = carried_out(call, tools)
        if len(said) > MAX_QUOTED:
            said = f"{said[:MAX_QUOTED]} ({len(said) - MAX_QUOTED} characters more)"
        too_many = f" (of {num_calls} calls in this turn the first {MAX_CALLS} were carried out)"
        return said + too_many if num_calls > MAX_CALLS else said

    def _left(self) -> float:
        return self._deadline - time.monotonic()

    def _note(self, turn: ChatTurn, complaint: str | None) -> None:
        self._ledger.note_turn(
            agent=self._question.agent,
            model=self._chat.name,
            mode=self._chat.mode,
            asked=[{"role": message.type, "text": message.text} for message in self._messages],
            said=turn.text,
            calls=[{"name": call.name, "args": redacted(call.text)} for call in turn.calls],
            num_calls=turn.num_calls,
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
        return None, problems(error)


def _please(complaint: str | None) -> str:
    return f"That can't be used: {complaint}\nAnswer again, with one JSON object of the same schema and nothing else."
