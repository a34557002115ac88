"""Plan file: a user's own plan, trusted as little as anybody's."""

from pathlib import Path

from pydantic import ValidationError

from profiling_agent.documents import DocumentError, parse_json, parse_record
from profiling_agent.errors import PlanError
from profiling_agent.files import read_bytes
from profiling_agent.records import Plan

MAX_BYTES = 1_000_000


def first_problem(error: ValidationError) -> str:
    """Return the first thing wrong as `where: what (got value)`, on one line."""
    problem = error.errors(include_url=False, include_context=False)[0]
    if not problem["loc"] and problem["type"] == "value_error":
        # Said by a rule of ours over several fields, which names them and what it saw.
        return problem["msg"].removeprefix("Value error, ")
    where = ".".join(str(part) for part in problem["loc"]) or "document"
    return f"{where}: {problem['msg']} (got {str(problem['input'])[:80]!r})"


def read_plan(path: str, *, quotes: bool = True) -> Plan:
    """Return the plan in a JSON file, in the paper's form (Figure 4) or ours; PlanError where it is none.

    What is wrong in it is quoted only if it `quotes`, for whoever may read the file, and only of a JSON object: whatever
    else a path leads to was never meant as a plan.
    """
    try:
        text = read_bytes(Path(path).expanduser(), max_bytes=MAX_BYTES)
        is_object = isinstance(parse_json(text, max_bytes=MAX_BYTES), dict)
        return parse_record(Plan, text, strict=True, quotes=quotes and is_object)
    except OSError as error:
        raise PlanError(f"plan file {path!r} can't be read ({error.strerror}): check the path") from error
    except DocumentError as error:
        raise PlanError(f"plan file {path!r} is no valid plan: {error}") from error
    # Of `~name` for nobody of that name.
    except RuntimeError as error:
        raise PlanError(f"plan file {path!r} can't be read ({error}): check the path") from error
