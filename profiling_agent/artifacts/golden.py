"""Golden logits: two images and what the model said of them when it was saved; does it still say so? No torch here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from profiling_agent.artifacts.recipe import GOLDEN, Recipe
from profiling_agent.errors import ArtifactError
from profiling_agent.reproducibility import environment

NUM_IMAGES = 2
# Relative distances of the logits. Another CPU or thread count adds float32 in another order, about 1e-6 apart. An
# activation that this moves across a rounding edge changes by a whole step, of int8 or of bfloat16; where 7-bit
# activations replace 8-bit ones, by two of int8.
FLOAT_TOLERANCE, STEP_TOLERANCE, REDUCED_TOLERANCE = 1e-4, 2e-2, 1e-1


@dataclass(frozen=True, slots=True)
class Golden:
    """Images (n, channels, height, width) and the logits (n, classes) that the model computed for them.

    The images are rounded to float16 and stored as that: in float32 they are 1.3% of ViT-B in int8.
    """

    pixel_values: NDArray[np.float16]
    logits: NDArray[np.float32]


def write_golden(golden: Golden, folder: Path) -> None:
    """Write the golden images and logits into a saved folder."""
    logits = np.ascontiguousarray(golden.logits)
    save_file({"pixel_values": golden.pixel_values, "logits": logits}, folder / GOLDEN)


def check_golden(run: Callable[[NDArray[np.float32]], NDArray[Any]], folder: Path, recipe: Recipe) -> None:
    """Run the golden images of a saved folder through `run`, and compare the logits with the saved ones.

    Raises:
        ArtifactError: they are further apart than `tolerance` allows, or no number; the images can't be read or run.
    """
    golden = _read(folder / GOLDEN)
    try:
        logits = run(golden.pixel_values.astype(np.float32))
    except RuntimeError as error:
        line = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ArtifactError(
            f"the golden images in {str(folder)!r} can't be run ({line}): save the model again"
        ) from error
    smallest = np.finfo(np.float32).tiny
    distance = float(np.linalg.norm(logits - golden.logits) / max(np.linalg.norm(golden.logits), smallest))
    allowed = tolerance(recipe)
    # `not <=` so that a NaN fails.
    if not distance <= allowed:
        raise ArtifactError(
            f"{str(folder)!r} doesn't compute what it did when it was saved: its logits are {distance:.2g} apart "
            f"(relative), {allowed:g} is allowed; save it again with the installed libraries"
        )


def _read(path: Path) -> Golden:
    try:
        held = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"{str(path)!r} is damaged and can't be read ({error}): save the model again") from error
    for name in ("pixel_values", "logits"):
        if name not in held:
            raise ArtifactError(f"{str(path)!r} is damaged and has no {name}: save the model again")
    return Golden(held["pixel_values"], held["logits"])


def tolerance(recipe: Recipe) -> float:
    """Return how far apart the logits of a saved model may be here."""
    # float16 weights of a layer alone are rounded, the activations that they meet stay float32.
    has_steps = any(layer.dtype != "float16" for layer in recipe.quantized)
    is_half = not recipe.quantized and recipe.deployment.scheme != "float32"
    if not (has_steps or is_half):
        return FLOAT_TOLERANCE
    # Another CPU may have other kernels, whose activations have 7 bits or whose sums are rounded elsewhere.
    return STEP_TOLERANCE if recipe.cpu == environment().cpu else REDUCED_TOLERANCE
