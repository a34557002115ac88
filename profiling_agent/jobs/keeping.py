"""How a job keeps a model that it made. Imported by the warm worker only, like the catalogue."""

from collections.abc import Sequence

from torch import nn

from profiling_agent.artifacts.load import load_module
from profiling_agent.artifacts.save import save_derived
from profiling_agent.jobs.context import Desk
from profiling_agent.records import ArtifactRef, Cut


def keep_model(model: nn.Module, source: ArtifactRef, desk: Desk, *, cuts: Sequence[Cut] | None = None) -> ArtifactRef:
    """Save `model`, made of the saved model `source`, with its source's cuts where none are given; return the reference.

    It is loaded once, which is the reload gate: a model that doesn't come back as it was saved is never handed on.

    Raises:
        ArtifactError: it doesn't come back, or `source` is damaged.
    """
    folder = desk.folder / "model"
    save_derived(model, desk.path(source), folder, cuts=cuts)
    load_module(folder)
    return desk.ref(folder, "model")
