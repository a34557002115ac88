"""Calls: what a model's turn asks of our tools, bounded before anything is carried out, and carrying one out."""

import inspect
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints

from langchain_core.messages import AIMessage
from langchain_core.messages.tool import ToolCall
from pydantic import TypeAdapter, ValidationError

from profiling_agent.documents import DocumentError, parse_json
from profiling_agent.llm.extract import problems
from profiling_agent.llm.question import Tool

# More in one turn are noise; each is paid for with its answer in every request that follows.
MAX_CALLS = 8
# A plan of all that an answer may hold has about 10,000 characters.
MAX_ARGUMENTS = 20_000
# What servers allow in a tool's name and in the identity of a call; they read both back from the history.
MAX_NAME = 64
ODD = re.compile(r"[^A-Za-z0-9_-]")


@dataclass(frozen=True)
class Call:
    """One call; `problem` says what is wrong with its arguments, which then are none."""

    id: str
    name: str
    arguments: dict[str, Any]
    problem: str | None

    @property
    def text(self) -> str:
        """Return the arguments as JSON."""
        return json.dumps(self.arguments)

    @property
    def said(self) -> ToolCall:
        """Return the call as it stands in the history that the model is shown."""
        return ToolCall(name=self.name, args=self.arguments, id=self.id, type="tool_call")


def calls_of(message: AIMessage) -> tuple[Call, ...]:
    """Return the first calls of a message."""
    return tuple(_call(index, dict(asked)) for index, asked in enumerate(message.tool_calls[:MAX_CALLS]))


def _call(index: int, asked: dict[str, Any]) -> Call:
    arguments, problem = _arguments(asked.get("args"))
    return Call(
        id=ODD.sub("_", str(asked.get("id") or f"call_{index}"))[:MAX_NAME],
        name=ODD.sub("_", str(asked.get("name")))[:MAX_NAME] or "_",
        arguments=arguments,
        problem=problem,
    )


def _arguments(given: Any) -> tuple[dict[str, Any], str | None]:
    try:
        # A half of a surrogate pair in them would fail in the tool.
        text = json.dumps(given, ensure_ascii=False).encode("utf-8", errors="replace")
        found = parse_json(text, max_bytes=MAX_ARGUMENTS)
    except DocumentError as error:
        return {}, str(error)
    except (TypeError, ValueError, RecursionError):
        return {}, "they are no JSON object"
    return (found, None) if isinstance(found, dict) else ({}, "they are no JSON object")


def carried_out(call: Call, tools: Mapping[str, Tool]) -> str:
    """Return what the tool says, or what is wrong with the call; what a tool raises is a bug of ours."""
    tool = tools.get(call.name)
    if tool is None:
        return f"there is no tool {call.name!r}; there are {', '.join(sorted(tools))}"
    fitting, wrong = _fitted(tool, call.arguments)
    if wrong := call.problem or wrong:
        return f"{call.name} can't be called so ({wrong})"
    return tool(**fitting)


def _fitted(tool: Tool, arguments: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
    """Return the arguments as the tool's parameters have them, a number that came as text as a number; or what of them doesn't fit."""
    kinds = get_type_hints(tool)
    try:
        inspect.signature(tool).bind(**arguments)
        return {
            name: TypeAdapter(kinds.get(name, Any)).validate_python(value) for name, value in arguments.items()
        }, None
    except TypeError as error:
        return {}, str(error)
    except ValidationError as error:
        return {}, problems(error)
