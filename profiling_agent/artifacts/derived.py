"""Save what was made of a saved model: same input, same processor, same origin."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from profiling_agent.artifacts.load import load_processor, load_recipe
from profiling_agent.artifacts.save import save_model
from profiling_agent.records import Cut, Deployment


def save_derived(
    model: nn.Module,
    source: Path,
    folder: Path,
    *,
    cuts: Sequence[Cut] | None = None,
    folded: Sequence[str] | None = None,
    deployment: Deployment | None = None,
) -> None:
    """Write `model`, made of the saved model in `source`, to `folder`.

    Without `cuts` it has those of its source, and so with `folded`, the batch norms that are identities, and `deployment`.

    Raises:
        ArtifactError: `folder` exists, or `source` is damaged.
    """
    recipe = load_recipe(source)
    save_model(
        model,
        folder,
        spec=recipe.input,
        processor=load_processor(source),
        base_model=recipe.base_model,
        base_revision=recipe.base_revision,
        cuts=recipe.cuts if cuts is None else cuts,
        folded=recipe.folded if folded is None else folded,
        deployment=recipe.deployment if deployment is None else deployment,
    )
