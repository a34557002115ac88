"""Reply: what is taken of a server's document before its client reads it: one completion's texts, calls and counts."""

import json
from typing import Any, cast

from profiling_agent.documents import DocumentError, clean, parse_json

# No model reads or writes a hundred million tokens in one turn; what is said beyond is no count.
MAX_TOKENS = 10**8
# Far more than are carried out; the client takes its time for each.
MAX_CALLS_READ = 100
MAX_MODELS_READ = 10_000
MAX_SAID = 200
FINISHED = frozenset({"stop", "length", "tool_calls", "content_filter"})


def token_count(value: object) -> int | None:
    """Return a number of tokens as it is counted here: a whole one from 0 to MAX_TOKENS; None for everything else."""
    return value if isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_TOKENS else None


def completion(document: Any) -> dict[str, Any]:
    """Return a completion with nothing but the fields that are read, each of its type; DocumentError where it is none.

    What has another type is left out: a reply with an odd count still holds its answer.
    """
    found = _dict(document)
    choices = found.get("choices")
    choice = _dict(cast("list[Any]", choices)[0]) if isinstance(choices, list) and choices else {}
    message = choice.get("message")
    if not isinstance(message, dict):
        raise DocumentError(_said(found))
    finish = choice.get("finish_reason")
    read: dict[str, Any] = {
        **_head(found),
        "object": "chat.completion",
        "choices": [
            {
                "index": 0,
                "message": _message(cast("dict[str, Any]", message)),
                "finish_reason": finish if isinstance(finish, str) and finish in FINISHED else "stop",
                "logprobs": None,
            }
        ],
    }
    return read | _usage(found)


def completion_piece(document: Any) -> dict[str, Any]:
    """Return a piece of a completion that is streamed, with nothing but the fields that are read; DocumentError where it is none."""
    found = _dict(document)
    choices = found.get("choices")
    if not isinstance(choices, list):
        raise DocumentError(_said(found))
    read: dict[str, Any] = {**_head(found), "object": "chat.completion.chunk", "choices": []}
    if choices:
        choice = _dict(cast("list[Any]", choices)[0])
        finish = choice.get("finish_reason")
        read["choices"] = [
            {
                "index": 0,
                "delta": _delta(_dict(choice.get("delta"))),
                "finish_reason": (finish if finish in FINISHED else "stop")
                if finish and isinstance(finish, str)
                else None,
                "logprobs": None,
            }
        ]
    return read | _usage(found)


def as_piece(whole: dict[str, Any]) -> dict[str, Any]:
    """Return a `completion` as the one piece of a stream, for servers that answer a request for a stream with all at once."""
    choice = whole["choices"][0]
    calls = [{"index": index, **call} for index, call in enumerate(choice["message"].get("tool_calls", ()))]
    delta = {**choice["message"], **({"tool_calls": calls} if calls else {})}
    return {**whole, "object": "chat.completion.chunk", "choices": [{**choice, "delta": delta}]}


def model_list(document: Any) -> dict[str, Any]:
    """Return a list of models with nothing but their names; DocumentError where it is none."""
    listed = _dict(document).get("data")
    if not isinstance(listed, list):
        raise DocumentError("it lists no models")
    names = [_dict(each).get("id") for each in cast("list[Any]", listed)[:MAX_MODELS_READ]]
    models = [{"id": name, "object": "model", "created": 0, "owned_by": ""} for name in names if isinstance(name, str)]
    return {"object": "list", "data": models}


def as_it_is(document: Any) -> dict[str, Any]:
    """Return any other document of a server; DocumentError where it is no JSON object."""
    if not isinstance(document, dict):
        raise DocumentError("it is no JSON object")
    return cast("dict[str, Any]", document)


def without_surrogates(text: str) -> str:
    """Return text that can be written as UTF-8; half of a surrogate pair is a question mark."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _head(found: dict[str, Any]) -> dict[str, Any]:
    return {"id": _text(found.get("id"))[:MAX_SAID], "created": 0, "model": _text(found.get("model"))[:MAX_SAID]}


def _usage(found: dict[str, Any]) -> dict[str, Any]:
    usage = _dict(found.get("usage"))
    sent, written = token_count(usage.get("prompt_tokens")), token_count(usage.get("completion_tokens"))
    if sent is None or written is None:
        return {}
    return {"usage": {"prompt_tokens": sent, "completion_tokens": written, "total_tokens": sent + written}}


def _delta(said: dict[str, Any]) -> dict[str, Any]:
    content, refusal, calls = said.get("content"), said.get("refusal"), said.get("tool_calls")
    delta: dict[str, Any] = {"role": "assistant"}
    if isinstance(content, (str, list)):
        delta["content"] = _text(content)
    if isinstance(refusal, str):
        delta["refusal"] = refusal
    if isinstance(calls, list):
        pieces = [piece for each in cast("list[Any]", calls)[:MAX_CALLS_READ] if (piece := _call_piece(_dict(each)))]
        delta |= {"tool_calls": pieces} if pieces else {}
    return delta


def _call_piece(said: dict[str, Any]) -> dict[str, Any] | None:
    """Return a piece of a call: its name with the first, arguments bit by bit."""
    index, function = said.get("index"), _dict(said.get("function"))
    if isinstance(index, bool) or not isinstance(index, int) or not 0 <= index < MAX_CALLS_READ:
        return None
    name, arguments, identity = function.get("name"), function.get("arguments"), said.get("id")
    piece: dict[str, Any] = {"index": index, "type": "function", "function": {}}
    if isinstance(name, str) and name:
        known = isinstance(identity, str) and 0 < len(identity) <= MAX_SAID
        piece |= {"id": identity if known else f"call_{index}"}
        piece["function"]["name"] = name
    if arguments:
        piece["function"]["arguments"] = arguments if isinstance(arguments, str) else json.dumps(arguments)
    return piece


def _message(said: dict[str, Any]) -> dict[str, Any]:
    content, refusal, calls = said.get("content"), said.get("refusal"), said.get("tool_calls")
    message: dict[str, Any] = {
        "role": "assistant",
        "content": _text(content) if isinstance(content, (str, list)) else None,
        "refusal": refusal if isinstance(refusal, str) else None,
    }
    if isinstance(calls, list):
        asked = cast("list[Any]", calls)[:MAX_CALLS_READ]
        if read := [call for index, each in enumerate(asked) if (call := _call(index, _dict(each)))]:
            message["tool_calls"] = read
    return message


def _call(index: int, said: dict[str, Any]) -> dict[str, Any] | None:
    function = _dict(said.get("function"))
    name, arguments, identity = function.get("name"), function.get("arguments"), said.get("id")
    if not isinstance(name, str):
        return None
    return {
        "id": identity if isinstance(identity, str) and 0 < len(identity) <= MAX_SAID else f"call_{index}",
        "type": "function",
        "function": {"name": name, "arguments": _arguments(arguments)},
    }


def _arguments(given: object) -> str:
    """Return a call's arguments as the JSON of an object; what is no JSON stays, for whoever called is told so."""
    found = given
    if isinstance(given, str):
        try:
            found = parse_json(given)
        except DocumentError:
            return given
    # Some servers give the object itself, some none where there are no arguments.
    return json.dumps(found if isinstance(found, dict) else {"arguments": found} if found else {})


def _text(content: object) -> str:
    """Return the text of a message that is one, or a list of parts."""
    if isinstance(content, str):
        return content
    parts = cast("list[Any]", content) if isinstance(content, list) else []
    return "".join(part if isinstance(part, str) else _text(_dict(part).get("text")) for part in parts)


def _said(document: dict[str, Any]) -> str:
    """Return what a document says that is no completion; some servers answer 200 with an error in it."""
    error = document.get("error")
    message = error if isinstance(error, str) else _dict(error).get("message")
    return f"it says {clean(message)[:MAX_SAID]!r}" if isinstance(message, str) else "it holds no completion"


def _dict(value: object) -> dict[str, Any]:
    return cast("dict[str, Any]", value) if isinstance(value, dict) else {}
