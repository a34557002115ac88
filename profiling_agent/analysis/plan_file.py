"""Plan file: a user's own plan, trusted as little as anybody's."""

import json

from profiling_agent.documents import DocumentError, parse_json, parse_record
from profiling_agent.errors import PlanError
from profiling_agent.files import expanded
from profiling_agent.modules.layer_names import matching_names
from profiling_agent.records import Plan, in_arrays, unprinted


def parse_plan(text: bytes, *, strict: bool | None = None, quotes: bool = True) -> Plan:
    """Return the plan that a text holds: a JSON object of ours, or the paper's Figure 4, in arrays or as it is printed; DocumentError where it holds none.

    What is wrong is quoted only if it `quotes`, and only of a JSON object.
    """
    try:
        document = parse_json(unprinted(text.decode("utf-8")))
    except UnicodeDecodeError:
        raise DocumentError("it is no UTF-8 text") from None
    return parse_record(
        Plan, json.dumps(in_arrays(document)), strict=strict, quotes=quotes and isinstance(document, dict)
    )


def read_plan(path: str, *, quotes: bool = True) -> Plan:
    """Return the plan in a JSON file, as `parse_plan` reads it; PlanError where it is none.

    What is wrong in it is quoted only if it `quotes`, for whoever may read the file, and only of a JSON object: whatever
    else a path leads to was never meant as a plan.
    """
    try:
        plan = parse_plan(expanded(path).read_bytes(), strict=True, quotes=quotes)
    except OSError as error:
        raise PlanError(f"plan file {path!r} can't be read ({error.strerror}): check the path") from error
    except DocumentError as error:
        raise PlanError(f"plan file {path!r} is no valid plan: {error}") from error
    for recommended in (*(plan.pruning or ()), *(plan.quantization or ())):
        # Minutes before a model is there to look for it in.
        matching_names(recommended.layer, ())
    return plan
