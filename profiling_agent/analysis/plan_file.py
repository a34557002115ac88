"""Plan file: a user's own plan, trusted as little as anybody's."""

from profiling_agent.documents import DocumentError, parse_json, parse_record
from profiling_agent.errors import PlanError
from profiling_agent.files import expanded, read_bytes
from profiling_agent.modules.layer_names import matching_names
from profiling_agent.records import Plan

MAX_BYTES = 1_000_000


def read_plan(path: str, *, quotes: bool = True) -> Plan:
    """Return the plan in a JSON file, with the keys of the paper's Figure 4, in lists; PlanError where it is none.

    What is wrong in it is quoted only if it `quotes`, for whoever may read the file, and only of a JSON object: whatever
    else a path leads to was never meant as a plan.
    """
    try:
        text = read_bytes(expanded(path), max_bytes=MAX_BYTES)
        is_object = isinstance(parse_json(text, max_bytes=MAX_BYTES), dict)
        plan = parse_record(Plan, text, strict=True, quotes=quotes and is_object)
    except OSError as error:
        raise PlanError(f"plan file {path!r} can't be read ({error.strerror}): check the path") from error
    except DocumentError as error:
        raise PlanError(f"plan file {path!r} is no valid plan: {error}") from error
    for recommended in (*(plan.pruning or ()), *(plan.quantization or ())):
        # Minutes before a model is there to look for it in.
        matching_names(recommended.layer, ())
    return plan
