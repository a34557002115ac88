"""Subgraphs of the deployment search and of the verdict: one deployment or one finalist a step, each shown and checkpointed as it ends.

    measure_baseline -> (try_deployment* -> race_deployments -> measure_deployment*), twice if no deployment with 8 bits suffices

    measure_candidate* -> race_candidates -> (time_finalist -> test_finalist)* -> decide

The steps, and which comes next, are those of `profiling_agent/search`; this only connects them.
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

from langgraph.graph import END, START, StateGraph
from langgraph.runtime import Runtime

from profiling_agent.graph.checkpoints import call_subgraph
from profiling_agent.graph.state import require
from profiling_agent.lib.logs import raise_if_stopped
from profiling_agent.schemas import Journal, QuantizationRecommendation
from profiling_agent.search import attempt, finalize
from profiling_agent.search.attempt import DeploymentSearchState
from profiling_agent.search.evaluator import Evaluator
from profiling_agent.search.finalize import FinalChoice, FinalChoiceState

Step = Callable[..., DeploymentSearchState | FinalChoiceState]
StateT = TypeVar("StateT", DeploymentSearchState, FinalChoiceState)
# More than any run takes; LangGraph's limit is against loops without an end.
MAX_STEPS = 1_000


def _run_step(step: Step, state: Any, *, runtime: Runtime[Any]) -> dict[str, Any]:
    """Call a step with the context's values and the state; return the changed fields, of a dict the changed entries."""
    timesheet = runtime.context[0].jobs.timesheet
    timesheet.resume_at(state.spent_s)
    new_state = step(*runtime.context, state)
    # An interrupted job may end as if done.
    raise_if_stopped()
    update = {name: value for name, value in new_state if value is not getattr(state, name)}
    for name, value in update.items():
        if isinstance(value, dict):
            old_value = getattr(state, name)
            update[name] = {key: entry for key, entry in value.items() if entry is not old_value.get(key)}
    return update | {"spent_s": timesheet.spent_s}


def _next_name(state: DeploymentSearchState | FinalChoiceState) -> str:
    return state.next_step.__name__ if state.next_step else END


def _subgraph(schema: type[Any], first: Sequence[Step], edges: Mapping[Step, Sequence[Any]]) -> Any:
    """Return the compiled graph of steps, which begins with one of `first`; `edges` has the successors of each step."""
    graph = StateGraph(schema)
    graph.add_conditional_edges(START, _next_name, [step.__name__ for step in first])
    for step, successors in edges.items():
        graph.add_node(step.__name__, partial(_run_step, step))
        graph.add_conditional_edges(step.__name__, _next_name, [getattr(each, "__name__", END) for each in successors])
    return graph.compile().with_config(recursion_limit=MAX_STEPS)


DEPLOYMENT_SEARCH = _subgraph(
    DeploymentSearchState,
    [attempt.measure_baseline],
    {
        attempt.measure_baseline: [attempt.try_deployment, END],
        attempt.try_deployment: [attempt.try_deployment, attempt.race_deployments],
        attempt.race_deployments: [attempt.measure_deployment, attempt.try_deployment, END],
        attempt.measure_deployment: [attempt.measure_deployment, attempt.try_deployment, END],
    },
)
VERDICT = _subgraph(
    FinalChoiceState,
    [finalize.measure_candidate, finalize.race_candidates],
    {
        finalize.measure_candidate: [finalize.measure_candidate, finalize.race_candidates],
        finalize.race_candidates: [finalize.time_finalist, finalize.decide],
        finalize.time_finalist: [finalize.time_finalist, finalize.test_finalist, finalize.decide],
        finalize.test_finalist: [finalize.time_finalist, finalize.decide],
        finalize.decide: [END],
    },
)


def _run_steps(graph: Any, initial_state: StateT, evaluator: Evaluator, *arguments: Any) -> StateT:
    """Return the state after the last step, called with evaluator, arguments and state; a killed run goes on with its step."""
    timesheet = evaluator.jobs.timesheet
    fields = dict(initial_state) | {"spent_s": timesheet.spent_s}
    state = type(initial_state).model_validate(call_subgraph(graph, fields, (evaluator, *arguments)))
    timesheet.resume_at(state.spent_s)
    return state


def search_deployments(
    evaluator: Evaluator, quantization: tuple[QuantizationRecommendation, ...] | None
) -> DeploymentSearchState:
    """Return the state after the search for a deployment; `quantization` is what the user's own plan requests."""
    return _run_steps(DEPLOYMENT_SEARCH, DeploymentSearchState(requested_quantization=quantization), evaluator)


def choose_final(evaluator: Evaluator, journal: Journal) -> FinalChoice:
    """Return the final choice and its verdict; opens the held-out images."""
    return require(_run_steps(VERDICT, finalize.initial_state(evaluator, journal), evaluator, journal).final)
