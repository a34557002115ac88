"""Agents that measure, prune and quantize a vision model until a contract is met.

A request passes acquisition, input_shape_resolver, profiling, deployment_search and analysis. Then pruning, quantization, evaluation and
iterative_pruning repeat until nothing is left to try; verdict chooses the winner, and report writes the report.

    from profiling_agent import Request, build_graph
    request = Request(model="microsoft/resnet-101", dataset="frgfm/imagenette", dataset_config="320px")
    result = build_graph().invoke(request)
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.lib.logs import silence_libraries

if TYPE_CHECKING:
    from profiling_agent.api import approve, optimize, pending, resume
    from profiling_agent.exporting.pick import pick, push
    from profiling_agent.graphs.optimization import build_graph  # pyright: ignore[reportMissingImports] - mapped on install
    from profiling_agent.request import Request
    from profiling_agent.runtimes.torch_artifact import load
    from profiling_agent.schemas import Approval, ApprovalQuestion, Goal, Plan
    from profiling_agent.sweep import optimize_many

__all__ = ["Approval", "ApprovalQuestion", "Goal", "Plan", "ProfilingAgentError", "Request", "approve", "build_graph"]
__all__ += ["load", "optimize", "optimize_many", "pending", "pick", "push", "resume"]

silence_libraries()

# Importing torch takes seconds, LangGraph one, and building our records a fifth: none is loaded before it is needed.
_MODULES = {
    "api": ("approve", "optimize", "pending", "resume"),
    "exporting.pick": ("pick", "push"),
    "graphs.optimization": ("build_graph",),
    "request": ("Request",),
    "runtimes.torch_artifact": ("load",),
    "schemas": ("Approval", "ApprovalQuestion", "Goal", "Plan"),
    "sweep": ("optimize_many",),
}


def __getattr__(name: str) -> Any:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(import_module(f"profiling_agent.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
