"""Chat: turns with a chat model, their deadlines and retries, and the ways of asking for JSON that a server may know."""

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
)
from langchain_core.language_models import BaseChatModel
from langchain_core.messages import AIMessage, BaseMessage

from profiling_agent.errors import AdvisorError, ContextTooLongError
from profiling_agent.llm.endpoint import redacted

Mode = Literal["json_schema", "json_mode", "prompted"]
MODES: tuple[Mode, ...] = ("json_schema", "json_mode", "prompted")
MAX_TRIES, MAX_WAIT_S = 4, 20.0
TOO_LONG = re.compile(r"context (length|window|size)|context_length|prompt is too long", re.IGNORECASE)
# A wrong key, a wrong model: asking again changes nothing, and every question would fail.
FATAL = (ModelAuthenticationError, ModelPermissionDeniedError, ModelNotFoundError)
# What the client trips over in a response that is no completion, such as a page of HTML, wherever it first looks into it.
NO_COMPLETION = (AttributeError, TypeError, ValueError, LookupError)


@dataclass(frozen=True)
class ChatTurn:
    """What the model said: text, calls of tools, and the tokens that its server counted, None where it counts none."""

    message: AIMessage
    input_tokens: int | None
    output_tokens: int | None

    @property
    def text(self) -> str:
        """Return the text alone, of a message that may have several parts."""
        return redacted(self.message.text)


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

    def ask(self, messages: Sequence[BaseMessage], schema: Mapping[str, Any], *, deadline_s: float) -> ChatTurn:
        """Return the model's turn; JSON of this schema is asked for, and may still not be what comes.

        Raises:
            ContextTooLongError: the messages are too long for the model.
            AdvisorError: nothing came within the deadline, the server refused, or the budget is spent.
        """
        started = time.monotonic()
        while True:
            left = deadline_s - (time.monotonic() - started)
            try:
                return self._tried(lambda: self._structured(messages, schema), left)
            except ModelInvalidRequestError as error:
                if len(self._modes) == 1:
                    raise AdvisorError(f"{self.name} refused the request ({first_line(error)})") from error
                self._modes.pop(0)

    def ask_with_tools(
        self, messages: Sequence[BaseMessage], tools: Sequence[Any], *, deadline_s: float
    ) -> ChatTurn | None:
        """Return the model's turn, which may call tools; None where its server knows no tools."""
        if not self._knows_tools:
            return None
        try:
            return self._tried(lambda: self._model.bind_tools(tools).invoke(list(messages)), deadline_s)
        except (ModelInvalidRequestError, NotImplementedError):
            self._knows_tools = False
            return None

    def _structured(self, messages: Sequence[BaseMessage], schema: Mapping[str, Any]) -> AIMessage:
        if self.mode == "prompted":
            return self._model.invoke(list(messages))
        try:
            asking = self._model.with_structured_output(dict(schema), method=self.mode, include_raw=True)
            answer = cast("dict[str, Any]", asking.invoke(list(messages)))
        except NotImplementedError as error:
            raise ModelInvalidRequestError(str(error)) from error
        return answer["raw"]

    def _tried(self, call: Callable[[], Any], deadline_s: float) -> ChatTurn:
        """Return what `call`, which does nothing but ask the model, comes back with; what passes is tried again."""
        retrying = tenacity.Retrying(
            retry=tenacity.retry_if_exception(_is_passing),
            stop=tenacity.stop_after_attempt(MAX_TRIES) | tenacity.stop_after_delay(deadline_s),
            wait=_wait,
            reraise=True,
        )
        started = time.monotonic()

        def once() -> ChatTurn:
            # Outside of every except: what goes wrong in whoever counts is no answer of the model's.
            self._spend()
            return self._asked(call, deadline_s - (time.monotonic() - started))

        try:
            return retrying(once)
        except ContextOverflowError as error:
            raise ContextTooLongError(f"the question is too long for {self.name}") from error
        except ModelInvalidRequestError as error:
            if _is_too_long(error):
                raise ContextTooLongError(f"the question is too long for {self.name}") from error
            raise
        except FATAL as error:
            raise AdvisorError(f"{self.name} can't be asked ({first_line(error)})") from error
        except ModelError as error:
            raise self._no_answer(error) from error

    def _asked(self, call: Callable[[], Any], seconds: float) -> ChatTurn:
        """Return the turn of one request; ModelError comes out as it is, for whoever tries again."""
        try:
            message = _within(seconds, call)
        except openai.LengthFinishReasonError as error:
            return _cut_off(error)
        except ModelError:
            raise
        except (openai.OpenAIError, TimeoutError, *NO_COMPLETION) as error:
            raise self._no_answer(error) from error
        return _turn(message)

    def _no_answer(self, error: Exception) -> AdvisorError:
        return AdvisorError(f"{self.name} gave no answer ({type(error).__name__}: {first_line(error)})")


def first_line(error: BaseException) -> str:
    """Return an exception's first line, cut."""
    return redacted((str(error).strip().splitlines() or [type(error).__name__])[0])[:200]


def _is_too_long(error: ModelInvalidRequestError) -> bool:
    """Return whether a server says so, each in its own words."""
    return getattr(error, "code", None) == "context_length_exceeded" or bool(TOO_LONG.search(str(error)))


def _is_passing(error: BaseException) -> bool:
    return isinstance(error, ModelError) and bool(error.is_retryable)


def _wait(state: tenacity.RetryCallState) -> float:
    """Wait as long as the server asks for, else exponentially longer."""
    error = state.outcome.exception() if state.outcome else None
    headers = getattr(getattr(error, "response", None), "headers", {})
    try:
        asked = float(headers.get("retry-after", ""))
    except ValueError:
        asked = tenacity.wait_random_exponential(multiplier=0.5, max=MAX_WAIT_S)(state)
    return min(max(asked, 0.0), MAX_WAIT_S)


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

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if not outcome:
        raise TimeoutError(f"no answer within {seconds:.0f} s")
    value, error = outcome[0]
    if error is not None:
        raise error
    return value


def _turn(message: Any) -> ChatTurn:
    if not isinstance(message, AIMessage):
        raise AdvisorError(f"the chat model returned {type(message).__name__} and no message")
    usage = message.usage_metadata
    return ChatTurn(
        message=message,
        input_tokens=usage["input_tokens"] if usage else None,
        output_tokens=usage["output_tokens"] if usage else None,
    )


def _cut_off(error: openai.LengthFinishReasonError) -> ChatTurn:
    """Return the turn of a model that ran out of tokens: what it said so far, which it may mend."""
    completion = error.completion
    text = completion.choices[0].message.content or ""
    usage = completion.usage
    return ChatTurn(
        message=AIMessage(content=text),
        input_tokens=usage.prompt_tokens if usage else None,
        output_tokens=usage.completion_tokens if usage else None,
    )
