"""Trace a model with Torch-Pruning, on a copy without weights where weights don't matter."""

import copy
from collections.abc import Generator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch_pruning as tp
from torch import nn

from profiling_agent.records import InputSpec
from profiling_agent.shapes.verify import device_of, left_as_found


def without_weights(model: nn.Module) -> nn.Module:
    """Return a copy of `model` on the meta device: its structure and shapes, no memory and no arithmetic."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


@contextmanager
def dependency_graph(model: nn.Module, spec: InputSpec) -> Generator[Any]:
    """Trace `model` and give its Torch-Pruning dependency graph; every parameter requires gradients afterwards.

    Torch-Pruning raises nearly anything on a model that it can't trace, and then leaves its hooks on it: give it a copy.
    """
    image = torch.zeros(spec.batch(1), device=device_of(model))
    graph = tp.DependencyGraph()
    with left_as_found(model), torch.enable_grad():
        # The trace is read off autograd, so frozen parameters would be invisible to it.
        model.requires_grad_(requires_grad=True)
        graph.build_dependency(
            model.eval(), {"pixel_values": image}, output_transform=attrgetter("logits"), verbose=False
        )
    try:
        yield graph
    finally:
        # Its nodes refer to each other and to autograd's, which keep the model and its activations alive.
        for node in graph.module2node.values():
            vars(node).update(inputs=[], outputs=[], dependencies=[], grad_fn=None)
        graph.module2node.clear()
