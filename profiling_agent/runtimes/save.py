"""Saving a deployment: a float32 model brought into a runtime and a scheme, with all that a saved model has, and a card."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from pkgutil import resolve_name

import numpy as np

from profiling_agent.artifacts.golden import NUM_IMAGES, Golden
from profiling_agent.artifacts.recipe import PreparedFiles, Recipe
from profiling_agent.artifacts.save import write_artifact
from profiling_agent.deployment.batches import noise_batch
from profiling_agent.deployment.protocol import Source
from profiling_agent.deployment.registry import runtime
from profiling_agent.errors import QuantizationError
from profiling_agent.records import Deployment


def save_deployed(
    source: Source,
    deployment: Deployment,
    folder: Path,
    *,
    complexity: tuple[int, int] | None = None,
    num_threads: int | None = None,
) -> Recipe:
    """Bring `source` into `deployment` and write it to `folder`, which appears complete or not at all; return its recipe.

    What the opened model says of two images is stored with it, and so are params and MACs of the float32 model, its
    `complexity`, where they are given.

    Raises:
        ArtifactError: `folder` exists, the disk is full, or the runtime lacks what it needs.
        PlanError: a pattern hits no layer.
        QuantizationError: the model can't be brought into this deployment, or doesn't give numbers in it.
    """
    convert: Callable[[Source, Deployment, Path], PreparedFiles] = resolve_name(runtime(deployment.runtime).CONVERSION)
    return write_artifact(
        source.recipe.deployed_as(deployment),
        folder,
        processor=source.processor,
        write_model=partial(convert, source, deployment),
        ask=partial(_ask, device=source.device, num_threads=num_threads),
        complexity=complexity,
        has_card=True,
    )


def _ask(folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> Golden:
    session = runtime(recipe.deployment.runtime).open(folder, recipe, device=device, num_threads=num_threads)
    images = noise_batch(recipe.input, session.fixed_size or NUM_IMAGES).astype(np.float16)
    logits = session.run(images.astype(np.float32))
    if not np.isfinite(logits).all():
        raise QuantizationError(
            f"as {recipe.deployment.name} the model gives logits that aren't finite: leave this deployment out"
        )
    return Golden(images, logits)
