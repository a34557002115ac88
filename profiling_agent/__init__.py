"""Agents that measure, prune and quantize a vision model until a contract is met.

A request goes through acquisition, input_shape_resolver, profiling, deployment_search and analysis; then pruning, quantization and
evaluation go round with iterative_pruning until the loop has nothing more to try; verdict chooses, and report writes it down.

    from profiling_agent import Request, build_graph
    request = Request(model="microsoft/resnet-101", dataset="frgfm/imagenette", dataset_config="320px")
    result = build_graph().invoke(request)
"""

from typing import TYPE_CHECKING, Any

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.quiet import silence_torchao
from profiling_agent.records import Approval, ApprovalQuestion, Goal, Plan
from profiling_agent.request import Request

if TYPE_CHECKING:
    from profiling_agent.deployment.load import load
    from profiling_agent.graphs.optimization import build_graph  # pyright: ignore[reportMissingImports] - mapped on install
    from profiling_agent.handover.pick import pick
    from profiling_agent.handover.push import push
    from profiling_agent.lifecycle import approve, optimize, pending, resume
    from profiling_agent.sweep import optimize_many

__all__ = [
    "Approval",
    "ApprovalQuestion",
    "Goal",
    "Plan",
    "ProfilingAgentError",
    "Request",
    "approve",
    "build_graph",
    "load",
    "optimize",
    "optimize_many",
    "pending",
    "pick",
    "push",
    "resume",
]

silence_torchao()

# torch takes seconds to import and LangGraph one: neither is loaded before it is needed.
_LAZY = {
    "approve": "profiling_agent.lifecycle",
    "build_graph": "profiling_agent.graphs.optimization",
    "load": "profiling_agent.deployment.load",
    "optimize": "profiling_agent.lifecycle",
    "optimize_many": "profiling_agent.sweep",
    "pending": "profiling_agent.lifecycle",
    "pick": "profiling_agent.handover.pick",
    "push": "profiling_agent.handover.push",
    "resume": "profiling_agent.lifecycle",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
