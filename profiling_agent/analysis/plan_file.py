"""Plan file: a user's own plan, trusted as little as anybody's."""

from pathlib import Path

from pydantic import ValidationError

from profiling_agent.errors import PlanError
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


def read_plan(path: str) -> Plan:
    """Return the plan in a JSON file, in the paper's form (Figure 4) or ours; PlanError where it is none."""
    file = Path(path).expanduser()
    try:
        if file.stat().st_size > MAX_BYTES:
            raise PlanError(f"plan file {path!r} is larger than {MAX_BYTES} bytes: a plan is a short JSON document")
        return Plan.model_validate_json(file.read_text(encoding="utf-8"), strict=True)
    except OSError as error:
        raise PlanError(f"plan file {path!r} can't be read ({error.strerror}): check the path") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"plan file {path!r} is not UTF-8 text: a plan is a JSON document") from error
    except ValidationError as error:
        raise PlanError(f"plan file {path!r} is no valid plan: {first_problem(error)}") from error
