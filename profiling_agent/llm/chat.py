"""Chat: turns with a chat model, their deadlines and retries, and the ways of asking for JSON that a server may know.

Requests are made in the caller's context, so that LangChain's callbacks, a graph's streams and traces see them as its own. What a
model's client raises is an AdvisorError that names it, whatever it is: a server may answer anything, and a model that
was passed as an object is a stranger's code. What our own code raises meanwhile is a bug, and comes out as what it is.
"""

import contextvars
import math
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import openai
import tenacity
from langchain_core.exceptions import (
    ContextOverflowError,
    ModelAuthenticationError,
    ModelError,
    ModelInvalidRequestError,
    ModelNotFoundError,
    ModelPermissionDeniedError,
    ModelTimeoutError,
)
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage
from langchain_core.runnables import RunnableSequence

from profiling_agent.documents import DocumentError, clean, first_line, parse_json
from profiling_agent.errors import AdvisorError, ContextTooLongError, ProfilingAgentError
from profiling_agent.foreign import is_ours
from profiling_agent.llm.calls import Call, calls_of
from profiling_agent.llm.endpoint import redacted
from profiling_agent.llm.reply import token_count, without_surrogates
from profiling_agent.llm.transport import MAX_WAIT_S

Mode = Literal["json_schema", "json_mode", "prompted"]
MODES: tuple[Mode, ...] = ("json_schema", "json_mode", "prompted")
MAX_TRIES = 4
TOO_LONG = re.compile(r"context (length|window|size)|context_length|prompt is too long", re.IGNORECASE)
# A wrong key, a wrong model: asking again changes nothing, and every question would fail.
FATAL = (ModelAuthenticationError, ModelPermissionDeniedError, ModelNotFoundError)
TOO_LARGE, FAILED = 413, 500
# What servers say of tools, schemas and streams that they don't know, beside 400; some fail at them, time after time.
REFUSALS = (422, FAILED, 501)
# OpenRouter says 404 where a model is there, and nobody who runs it with tools.
ABOUT_WAYS = re.compile(r"\btools?\b|response_format|requested parameters", re.IGNORECASE)


class _RefusedError(Exception):
    """The server doesn't take a question in the way that it was asked; its cause says why."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error
        self.is_failure = getattr(error, "status_code", None) == FAILED


@dataclass(frozen=True)
class ChatTurn:
    """What the model said: text, calls of tools, and the tokens that its server counted, None where it counts none."""

    text: str
    input_tokens: int | None
    output_tokens: int | None
    calls: tuple[Call, ...] = ()
    num_calls: int = 0


class Chat:
    """A chat model with a name; remembers which ways of asking its server refused."""

    def __init__(self, model: BaseChatModel, name: str, *, spend: Callable[[], None]) -> None:
        """`spend` is called before each request, and raises AdvisorError where none may be made any more."""
        self.name = name
        self._model, self._spend = model, spend
        self._modes = list(MODES)
        self._knows_tools = True

    @property
    def mode(self) -> Mode:
        """Return the way of asking for JSON that is used now."""
        return self._modes[0]

    def ask(
        self, messages: Sequence[BaseMessage], schema: Mapping[str, Any], *, deadline_s: float, agent: str = "advisor"
    ) -> ChatTurn:
        """Return the model's turn; JSON of this schema is asked for, and may still not be what comes. `agent` names the run in traces.

        Raises:
            ContextTooLongError: the messages are too long for the model.
            AdvisorError: nothing came within the deadline, the server refused, or the budget is spent.
        """
        started, tries = time.monotonic(), MAX_TRIES
        while True:
            left = deadline_s - (time.monotonic() - started)
            try:
                return self._tried(lambda: self._structured(messages, schema, agent), left, tries)
            except _RefusedError as refused:
                if self._stops_streaming(refused):
                    continue
                if len(self._modes) == 1:
                    raise self._given_up(refused) from refused.error
                self._modes.pop(0)
                # It has had its time to recover.
                tries = 1 if refused.is_failure else MAX_TRIES

    def ask_with_tools(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any], *, deadline_s: float, agent: str = "advisor"
    ) -> ChatTurn | None:
        """Return the model's turn, which may call tools; None where its server knows no tools."""
        started = time.monotonic()
        while self._knows_tools:
            left = deadline_s - (time.monotonic() - started)
            try:
                return self._tried(lambda: self._with_tools(messages, tools, agent), left)
            except _RefusedError as refused:
                self._knows_tools = self._stops_streaming(refused)
        return None

    def _given_up(self, refused: _RefusedError) -> AdvisorError:
        if not refused.is_failure:
            return AdvisorError(f"{self.name} refused the request ({said_by(refused.error)})")
        # Whoever fails whatever is asked says nothing of the ways of asking.
        self._modes, self._knows_tools = list(MODES), True
        return self._no_answer(refused.error)

    def _stops_streaming(self, refused: _RefusedError) -> bool:
        """Return whether what the server refused was a stream, as somebody listens; no other is asked for then."""
        if refused.is_failure or not _was_streamed(refused.error) or self._model.disable_streaming is True:
            return False
        self._model = self._model.model_copy(update={"disable_streaming": True})
        return True

    def _with_tools(self, messages: Sequence[BaseMessage], tools: Sequence[Any], agent: str) -> AIMessage:
        try:
            return self._model.bind_tools(tools).invoke(list(messages), {"run_name": agent})
        except NotImplementedError as error:
            raise ModelInvalidRequestError(str(error)) from error

    def _structured(self, messages: Sequence[BaseMessage], schema: Mapping[str, Any], agent: str) -> AIMessage:
        if self.mode == "prompted":
            return self._model.invoke(list(messages), {"run_name": agent})
        try:
            asking: Any = self._model.with_structured_output(dict(schema), method=self.mode, include_raw=True)
            # The second half reads the text as JSON, which isn't used, and takes minutes for a megabyte that is none.
            first = asking.first if isinstance(asking, RunnableSequence) else asking
            answer = cast("dict[str, Any]", first.invoke(list(messages), {"run_name": agent}))
        except NotImplementedError as error:
            raise ModelInvalidRequestError(str(error)) from error
        return _with_text(answer["raw"])

    def _tried(self, call: Callable[[], Any], deadline_s: float, tries: int = MAX_TRIES) -> ChatTurn:
        """Return what `call`, which does nothing but ask the model, comes back with; what passes is tried again.

        Raises:
            _RefusedError: the server doesn't take it in this way.
            AdvisorError: nothing came, and in no other way would.
        """
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_passing),
            stop=tenacity.stop_after_attempt(tries) | tenacity.stop_before_delay(deadline_s),
            wait=_wait,
            reraise=True,
        )
        started = time.monotonic()

        def once() -> ChatTurn:
            left = deadline_s - (time.monotonic() - started)
            if left <= 0:
                # What isn't sent isn't counted.
                raise self._no_answer(TimeoutError("the deadline of the question has passed"))
            # Outside of every except: what goes wrong in whoever counts is no answer of the model's.
            self._spend()
            return self._asked(call, left)

        try:
            return retrying(once)
        except (ModelError, openai.APIStatusError) as error:
            raise self._meaning(error) from error

    def _meaning(self, error: Exception) -> Exception:
        """Return what an error of the server's, or of its client's, says of the question."""
        status = getattr(error, "status_code", None)
        is_refusal = isinstance(error, ModelInvalidRequestError) or status in REFUSALS
        if status == TOO_LARGE or isinstance(error, ContextOverflowError) or (is_refusal and _is_too_long(error)):
            return ContextTooLongError(f"the question is too long for {self.name}")
        if is_refusal or (isinstance(error, ModelNotFoundError) and ABOUT_WAYS.search(str(error))):
            return _RefusedError(error)
        if isinstance(error, FATAL):
            return AdvisorError(f"{self.name} can't be asked ({said_by(error)})")
        return self._no_answer(error)

    def _asked(self, call: Callable[[], Any], seconds: float) -> ChatTurn:
        """Return the turn of one request; ModelError comes out as it is, for whoever tries again."""
        try:
            return _within(seconds, lambda: _turn(call()))
        except openai.LengthFinishReasonError as error:
            return _cut_off(error)
        except (ModelError, openai.APIStatusError, ProfilingAgentError, MemoryError):
            raise
        except TimeoutError as error:
            raise self._no_answer(error) from error
        except Exception as error:
            if is_ours(error.__traceback__):
                raise
            raise self._no_answer(error) from error

    def _no_answer(self, error: Exception) -> AdvisorError:
        advice = ": --advisor-timeout-s gives it longer" if isinstance(error, (TimeoutError, ModelTimeoutError)) else ""
        return AdvisorError(f"{self.name} gave no answer ({type(error).__name__}: {said_by(error)}){advice}")


def said_by(error: BaseException) -> str:
    """Return an exception's first line, cut, with no key in it and nothing that would move a terminal's cursor."""
    return clean(redacted(first_line(error))[:200])


def _is_too_long(error: Exception) -> bool:
    """Return whether a server says so, each in its own words."""
    return getattr(error, "code", None) == "context_length_exceeded" or bool(TOO_LONG.search(str(error)))


def _was_streamed(error: Exception) -> bool:
    """Return whether the request that was refused asked for a stream; nobody knows of clients that don't show what they sent."""
    try:
        sent = parse_json(getattr(getattr(error, "request", None), "content", b"{}"))
    except (TypeError, DocumentError):
        return False
    return isinstance(sent, dict) and cast("dict[str, Any]", sent).get("stream") is True


def _is_passing(error: BaseException) -> bool:
    return isinstance(error, ModelError) and bool(error.is_retryable) and getattr(error, "status_code", None) != 501


def _wait(state: tenacity.RetryCallState) -> float:
    """Wait as long as the server asks for, else exponentially longer."""
    error = state.outcome.exception() if state.outcome else None
    headers = getattr(getattr(error, "response", None), "headers", {})
    try:
        asked = float(headers.get("retry-after", ""))
    except ValueError:
        asked = tenacity.wait_random_exponential(multiplier=0.5, max=MAX_WAIT_S)(state)
    return 0.0 if math.isnan(asked) else min(max(asked, 0.0), MAX_WAIT_S)


def _within(seconds: float, call: Callable[[], Any]) -> Any:
    """Return what `call` does; TimeoutError after `seconds`, whoever hangs.

    A client's own timeout is between two bytes: a server that drips is never late.
    """
    if seconds <= 0:
        raise TimeoutError("the deadline of the question has passed")
    outcome: list[tuple[Any, BaseException | None]] = []

    def run() -> None:
        try:
            outcome.append((call(), None))
        except BaseException as error:  # noqa: BLE001 - handed to the thread that waits
            outcome.append((None, error))

    thread = threading.Thread(target=contextvars.copy_context().run, args=(run,), daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _with_text(message: Any) -> Any:
    """Return a message that holds an answer; where it is a call, as of clients that make a tool of a schema, as a text."""
    if not isinstance(message, AIMessage) or not message.tool_calls or "{" in message.text:
        return message
    return message.model_copy(update={"content": calls_of(message)[0].text, "tool_calls": []})


def _turn(message: Any) -> ChatTurn:
    if not isinstance(message, AIMessage):
        raise AdvisorError(f"the chat model returned {type(message).__name__} and no message")
    usage = cast("dict[str, Any]", message.usage_metadata or {})
    # Where the stream of a structured answer leaves them (langchain-openai 1.7).
    streamed = cast("dict[str, Any]", message.response_metadata.get("token_usage") or {})
    return ChatTurn(
        text=without_surrogates(redacted(message.text)),
        input_tokens=token_count(usage.get("input_tokens", streamed.get("prompt_tokens"))),
        output_tokens=token_count(usage.get("output_tokens", streamed.get("completion_tokens"))),
        calls=calls_of(message),
        num_calls=len(message.tool_calls),
    )


def _cut_off(error: openai.LengthFinishReasonError) -> ChatTurn:
    """Return the turn of a model that ran out of tokens: what it said so far, which it may mend."""
    completion = error.completion
    text = completion.choices[0].message.content or ""
    usage = completion.usage
    return ChatTurn(
        text=without_surrogates(redacted(text)),
        input_tokens=token_count(usage.prompt_tokens) if usage else None,
        output_tokens=token_count(usage.completion_tokens) if usage else None,
    )
