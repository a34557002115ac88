"""Context of an invocation, which Studio keeps as an assistant: who plans, with which prompts, and where the model will run."""

from collections.abc import Collection, Iterator
from typing import Any, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model, model_validator

from profiling_agent import prompts
from profiling_agent.errors import FieldError, RequestError
from profiling_agent.graph.state import choose_endpoint, key_for
from profiling_agent.lib.io import expanded, first_problem
from profiling_agent.llm.chat import Recorded, check_endpoint, name_of
from profiling_agent.llm.transcript import RECORDED, open_recording
from profiling_agent.request import Request, unknown_field

# Fields of the request that Studio shows with an assistant, and not in the form of a run.
PLANNING = ("llm", "base_url", "planner", "llm_tokens", "llm_timeout_s", "device", "runtimes", "output")
# What a run can't change once it has measured.
FROZEN = ("device", "batch_size", "output")
PLANNERS = ("analysis", "iterative_pruning")
NODES = ("input_shape_resolver", "intake", *PLANNERS, "advice")
SUFFIX = "_prompt"


ModelT = TypeVar("ModelT", bound=BaseModel)


def validated(model: type[ModelT], fields: Any) -> ModelT:
    """Return a model of given fields; FieldError for an unknown or impossible one."""
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise FieldError(first_problem(error)) from error


class ContextBase(BaseModel):
    """Context of an invocation; a field that isn't given is as the request, or the thread, has it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    batch_size: int | None = Field(default=None, description="the batch size you deploy, in place of the input's")
    objective: Literal["speed", "size"] | None = Field(default=None, description="in place of the input's")

    @property
    def prompts(self) -> dict[str, str]:
        """Return the text of each prompt that differs from the file of its name."""
        given = {name.removesuffix(SUFFIX): getattr(self, name) for name in self.model_fields_set if SUFFIX in name}
        return {name: text for name, text in given.items() if text != prompts.default_text(name)}

    @property
    def given(self) -> dict[str, Any]:
        """Return the given fields of a request."""
        return self.model_dump(exclude_unset=True, exclude_none=True, include={*Request.model_fields})

    def applied_to(self, request: Request) -> Request:
        """Return a request with the given fields; FieldError for an impossible one."""
        return validated(Request, request.model_dump(exclude_unset=True) | self.given) if self.given else request

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, document: Any) -> Any:
        if isinstance(document, dict) and (problem := unknown_field(document, cls.model_fields)):
            raise ValueError(problem)
        return document

    @model_validator(mode="after")
    def _check_prompts(self) -> Self:
        for name, text in self.prompts.items():
            prompts.check(name, text)
        return self


def _fields() -> Iterator[tuple[str, Any]]:
    for name in PLANNING:
        yield name, (Request.model_fields[name].annotation, Request.model_fields[name])
    for name in (name for name in prompts.names() if name != "ask"):
        # The form of a plan is in the prompts of both that plan.
        nodes = [node for node in NODES if name.startswith(node)] or [*PLANNERS]
        extra: dict[str, Any] = {"langgraph_nodes": nodes, "langgraph_type": "prompt"}
        text, description = prompts.default_text(name), f"prompts/{name}.md"
        yield name + SUFFIX, (str, Field(default=text, description=description, json_schema_extra=extra))


Context = create_model("Context", __base__=ContextBase, **dict(_fields()))


def as_context(given: Any) -> ContextBase:
    """Return a context from a dict of its fields, or None; FieldError for an unknown or impossible one."""
    return given if isinstance(given, ContextBase) else validated(Context, given or {})


def choose_advisor(request: Request, advisor: Any, trusted: Collection[str]) -> dict[str, Any]:
    """Return the language model that plans, and a line about it; raises RequestError when it doesn't work.

    `advisor` is a chat model object. Keys go to `trusted` addresses only.
    """
    if request.planner == "rules":
        return {"advisor_note": "the built-in rules plan: they were requested"}
    if advisor is not None:
        name, fields = name_of(advisor), {"advisor_object": name_of(advisor)}
    elif request.llm.startswith(RECORDED):
        file = str(expanded(request.llm.removeprefix(RECORDED)).resolve())
        recording = open_recording(file)
        name, fields = Recorded(recording, recording).name, {"recorded": file}
    elif endpoint := choose_endpoint(request.llm, request.base_url):
        check_endpoint(endpoint, key_for(endpoint, trusted), timeout_s=request.llm_timeout_s)
        name, fields = endpoint.name, {"endpoint": endpoint}
    elif request.planner == "llm":
        raise RequestError("planner is 'llm' but llm is 'none': name a model, as in llm=openai:MODEL")
    else:
        return {"advisor_note": "the built-in rules plan: no language model was requested"}
    suffix = " beside the built-in rules" if request.planner == "hybrid" else ""
    return {**fields, "advisor_note": f"{name} plans{suffix}"}
