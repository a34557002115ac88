"""Trace a model with Torch-Pruning, on a copy without weights."""

import copy
from collections.abc import Generator
from contextlib import contextmanager
from operator import attrgetter
from typing import Any

import torch
import torch_pruning as tp
from torch import nn

from profiling_agent.modules.inference import device_of
from profiling_agent.records import InputSpec


def without_weights(model: nn.Module) -> nn.Module:
    """Return a copy of `model` on the meta device: its structure and shapes, no memory and no arithmetic."""
    memo: dict[int, Any] = {
        id(parameter): nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)
        for parameter in model.parameters()
    }
    memo |= {id(buffer): buffer.to("meta") for buffer in model.buffers()}
    return copy.deepcopy(model, memo)


@contextmanager
def dependency_graph(skeleton: nn.Module, spec: InputSpec) -> Generator[Any]:
    """Trace `skeleton`, a copy made for it, and give its Torch-Pruning dependency graph.

    Torch-Pruning raises nearly anything on a model that it can't trace, and leaves its hooks there; either way the
    copy is in eval mode, its parameters require gradients, and it may have changed itself as it ran.
    """
    image = torch.zeros(spec.batch(1), device=device_of(skeleton))
    graph = tp.DependencyGraph()
    with torch.enable_grad():
        # The trace is read off autograd, so frozen parameters would be invisible to it.
        skeleton.requires_grad_(requires_grad=True)
        graph.build_dependency(skeleton, {"pixel_values": image}, output_transform=attrgetter("logits"), verbose=False)
    try:
        yield graph
    finally:
        # Its nodes refer to each other and to autograd's, which keep the copy and its activations alive.
        for node in graph.module2node.values():
            vars(node).update(inputs=[], outputs=[], dependencies=[], grad_fn=None)
        graph.module2node.clear()
