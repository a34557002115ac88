"""Subgraphs of the deployment search and of the verdict: one deployment or one finalist a step, each shown and checkpointed as it ends.

    measure_baseline -> try_deployment* -> race_deployments -> measure_deployment*

    measure_candidate* -> race_candidates -> (time_finalist -> test_finalist)* -> decide

The steps, and which comes next, are those of `profiling_agent/search`; this only connects them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime

from profiling_agent.graph.checkpoints import call_subgraph
from profiling_agent.lib.logs import raise_if_stopped
from profiling_agent.search import attempt, finalize
from profiling_agent.search.attempt import DeploymentTrials
from profiling_agent.search.evaluator import Evaluator
from profiling_agent.search.finalize import Finalists

Step = Callable[..., DeploymentTrials | Finalists]
StateT = TypeVar("StateT", DeploymentTrials, Finalists)
# More than any run takes; LangGraph's limit is against loops without an end.
MAX_STEPS = 1_000


def _do(step: Step, state: Any, *, runtime: Runtime[Any]) -> dict[str, Any]:
    """Do a step, with the arguments in the context before the state; return what it changed, of a dict the new entries."""
    timesheet = runtime.context[0].jobs.timesheet
    timesheet.resume_at(state.spent_s)
    after = step(*runtime.context, state)
    # An interrupted job may end as if done.
    raise_if_stopped()
    changed = {name: value for name, value in after if value is not getattr(state, name)}
    for name, value in changed.items():
        if isinstance(value, dict):
            before = getattr(state, name)
            changed[name] = {key: each for key, each in value.items() if each is not before.get(key)}
    return changed | {"spent_s": timesheet.spent_s}


def _next(state: DeploymentTrials | Finalists) -> str:
    return state.next_step.__name__ if state.next_step else END


def _subgraph(schema: type[Any], first: Sequence[Step], edges: Mapping[Step, Sequence[Any]]) -> Any:
    """Return the compiled graph of steps, which begins with one of `first`; `edges` has the steps that may follow each."""
    graph = StateGraph(schema)
    graph.add_conditional_edges(START, _next, [step.__name__ for step in first])
    for step, following in edges.items():
        graph.add_node(step.__name__, partial(_do, step))
        graph.add_conditional_edges(step.__name__, _next, [getattr(each, "__name__", END) for each in following])
    return graph.compile().with_config(recursion_limit=MAX_STEPS)


DEPLOYMENT_SEARCH = _subgraph(
    DeploymentTrials,
    [attempt.measure_baseline],
    {
        attempt.measure_baseline: [attempt.try_deployment, END],
        attempt.try_deployment: [attempt.try_deployment, attempt.race_deployments],
        attempt.race_deployments: [attempt.measure_deployment, END],
        attempt.measure_deployment: [attempt.measure_deployment, END],
    },
)
VERDICT = _subgraph(
    Finalists,
    [finalize.measure_candidate, finalize.race_candidates],
    {
        finalize.measure_candidate: [finalize.measure_candidate, finalize.race_candidates],
        finalize.race_candidates: [finalize.time_finalist, finalize.decide],
        finalize.time_finalist: [finalize.time_finalist, finalize.test_finalist, finalize.decide],
        finalize.test_finalist: [finalize.time_finalist, finalize.decide],
        finalize.decide: [END],
    },
)


def run_steps(graph: Any, start: StateT, evaluator: Evaluator, *given: Any) -> StateT:
    """Return the state after the last step; a run that was killed in a step goes on with that step."""
    timesheet = evaluator.jobs.timesheet
    begun = dict(start) | {"spent_s": timesheet.spent_s}
    ended = type(start).model_validate(call_subgraph(graph, begun, (evaluator, *given)))
    timesheet.resume_at(ended.spent_s)
    return ended
