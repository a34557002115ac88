"""Optimization graph: a model and a contract in, a loop of plans and measurements, a verdict out.

    acquisition -> input_shape_resolver -> (intake <-> confirmation) -> profiling -> deployment_search
                                                                                         |
                       +------------------------------------------------------------ analysis -> verdict
                       v
                 (approval) -> pruning -> quantization -> evaluation
                       ^                                      |
                       +--------- iterative_pruning <---------+
                                          |
                                      verdict -> advice -> report

A rejected plan goes back to its planner, a single pass and no plan straight to the verdict, and advice back to the verdict if a fork has changed the contract.
Every agent is a function in `nodes.py` or `intake.py` of `profiling_agent/graph/`; this file only connects them. With an LLM, `analysis` and
`iterative_pruning` find their plan in the subgraph of `planner.py`; `deployment_search` and `verdict` go step by step in those of `steps.py`.
"""

import os
from collections.abc import Iterable
from functools import partial
from typing import Any, Literal

from langgraph.checkpoint.base import BaseCheckpointSaver
from langgraph.graph import END, START, StateGraph

from profiling_agent.graph import nodes
from profiling_agent.graph.checkpoints import registered
from profiling_agent.graph.context import Context
from profiling_agent.graph.intake import confirmation, intake
from profiling_agent.graph.planner import PLANNER
from profiling_agent.graph.run import CheckedGraph, Run, run_agent
from profiling_agent.graph.state import Allowlist, RunResult, RunState, allowlist_from_env
from profiling_agent.graph.steps import DEPLOYMENT_SEARCH, VERDICT
from profiling_agent.request import Request


def route_to_intake(state: RunState) -> Literal["intake", "profiling"]:
    """Read a goal in words first, and again if a person added to it."""
    return "intake" if state.request.goal_text and state.intake is None else "profiling"


def route_after_planning(state: RunState) -> Literal["approval", "pruning", "verdict"]:
    """Finish without another plan; ask a person about it if that was requested."""
    if state.stopped is not None:
        return "verdict"
    is_asked = state.request.approve == "each" or (state.request.approve == "plan" and not state.attempts)
    return "approval" if is_asked else "pruning"


def route_after_evaluation(state: RunState) -> Literal["iterative_pruning", "verdict"]:
    """Iterate, unless a single pass was requested."""
    return "iterative_pruning" if state.stopped is None else "verdict"


def route_after_approval(state: RunState) -> Literal["pruning", "analysis", "iterative_pruning"]:
    """Carry the plan out; a rejected one goes back to its planner."""
    if state.proposal is not None:
        return "pruning"
    return "iterative_pruning" if state.attempts else "analysis"


def route_after_advice(state: RunState) -> Literal["report", "verdict"]:
    """Report, unless a fork has changed the contract since the verdict."""
    return "report" if state.judged_goal == state.goal else "verdict"


def build_graph(
    checkpointer: BaseCheckpointSaver[str] | None = None,
    advisor: Any = None,
    *,
    addresses: Iterable[str] = (),
    allowlist: Allowlist | None = None,
) -> CheckedGraph:
    """Return the compiled graph; `invoke(Request(...))` returns the verdict, the report and the run folder.

    A dict of a request's fields works too: an unknown or impossible one raises RequestError before the run starts. Without a checkpointer, invoking
    the same request again reuses the jobs that its run has finished. With one, the thread's id is the run's id, and `invoke(None, config)` resumes an
    interrupted run. `advisor` is a LangChain chat model that plans instead of the requested one; it is never stored, so a graph that resumes needs it
    again. With a checkpointer, keys of the environment go to a request's base_url only if it is in `addresses`, as a request may come from a
    checkpoint. `allowlist` is a server's: what a request may name.
    """
    graph = StateGraph(RunState, Context, input_schema=Request, output_schema=RunResult)
    graph.add_node("acquisition", partial(run_agent, nodes.acquisition), input_schema=Request)
    agents = (
        *(nodes.input_shape_resolver, intake, confirmation, nodes.profiling, nodes.deployment_search),
        *(nodes.analysis, nodes.approval, nodes.pruning, nodes.quantization, nodes.evaluation),
        *(nodes.iterative_pruning, nodes.verdict, nodes.advice, nodes.report),
    )
    for agent in agents:
        graph.add_node(agent.__name__, partial(run_agent, agent), input_schema=RunState)

    graph.add_edge(START, "acquisition")
    graph.add_edge("acquisition", "input_shape_resolver")
    graph.add_conditional_edges("input_shape_resolver", route_to_intake)
    graph.add_edge("intake", "confirmation")
    graph.add_conditional_edges("confirmation", route_to_intake)
    graph.add_edge("profiling", "deployment_search")
    graph.add_edge("deployment_search", "analysis")
    graph.add_conditional_edges("analysis", route_after_planning)
    graph.add_conditional_edges("approval", route_after_approval)
    graph.add_edge("pruning", "quantization")
    graph.add_edge("quantization", "evaluation")
    graph.add_conditional_edges("evaluation", route_after_evaluation)
    graph.add_conditional_edges("iterative_pruning", route_after_planning)
    graph.add_edge("verdict", "advice")
    graph.add_conditional_edges("advice", route_after_advice)
    graph.add_edge("report", END)
    compiled = vars(graph.compile(checkpointer=registered(checkpointer), name="profiling_agent"))
    subgraphs = {
        "deployment_search": DEPLOYMENT_SEARCH,
        "analysis": PLANNER,
        "iterative_pruning": PLANNER,
        "verdict": VERDICT,
    }
    for name, subgraph in subgraphs.items():
        # The node calls it, which LangGraph sees in plain functions only; drawings and Studio show it then.
        compiled["nodes"][name].subgraphs = [subgraph]
    make_run = partial(Run, advisor=advisor, addresses=tuple(addresses), allowlist=allowlist)
    return CheckedGraph(
        make_run=make_run, **{name: value for name, value in compiled.items() if name != "__orig_class__"}
    )


# Named in `langgraph.json`: a server's graph, with requests from outside.
graph = build_graph(allowlist=allowlist_from_env(os.environ))
