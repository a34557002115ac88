"""Golden logits: two images and what the model said of them when it was saved; does it still say so? No torch here."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import load_file, save_file

from profiling_agent.artifacts.recipe import GOLDEN, TORCH, Recipe
from profiling_agent.errors import ArtifactError
from profiling_agent.quantization.vnni import saturates
from profiling_agent.reproducibility import environment

NUM_IMAGES = 2
# Relative distances of the logits. Another CPU or thread count adds float32 in another order, about 1e-6 apart. An
# activation that this moves across a rounding edge changes by a whole step, of int8 or of bfloat16; where 7-bit
# activations replace 8-bit ones, by two of int8.
FLOAT_TOLERANCE, STEP_TOLERANCE, REDUCED_TOLERANCE = 1e-4, 2e-2, 1e-1
IMAGES, LOGITS = "pixel_values", "logits"


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
    save_file({IMAGES: golden.pixel_values, LOGITS: logits}, folder / GOLDEN)


def check_golden(run: Callable[[NDArray[np.float32]], NDArray[Any]], folder: Path, recipe: Recipe) -> None:
    """Run the golden images of a saved folder through `run`, and compare the logits with the saved ones.

    Raises:
        ArtifactError: they are further apart than `tolerance` allows, or no number.
    """
    distance, allowed = golden_distance(run, folder), tolerance(recipe)
    # `not <=` so that a NaN fails.
    if not distance <= allowed:
        raise ArtifactError(
            f"{str(folder)!r} doesn't compute what it did when it was saved: its logits are {distance:.2g} apart "
            f"(relative), {allowed:g} is allowed; save it again with the installed libraries"
        )


def golden_distance(run: Callable[[NDArray[np.float32]], NDArray[Any]], folder: Path) -> float:
    """Return the relative distance between the logits that `run` gives for a folder's golden images and the saved ones."""
    golden = read_golden(folder)
    logits, expected = run(golden.pixel_values.astype(np.float32)), golden.logits.astype(np.float64)
    smallest = np.finfo(np.float64).tiny
    return float(np.linalg.norm(logits - expected) / max(np.linalg.norm(expected), smallest))


def read_golden(folder: Path) -> Golden:
    """Return the golden images and logits of a saved folder."""
    tensors = load_file(folder / GOLDEN)
    return Golden(tensors[IMAGES], tensors[LOGITS])


def tolerance(recipe: Recipe) -> float:
    """Return how far apart the logits of a saved model may be here."""
    # float16 weights of a layer alone are rounded, the activations that they meet stay float32.
    has_steps = any(layer.dtype != "float16" for layer in recipe.quantized)
    is_half = not recipe.quantized and recipe.deployment.scheme not in ("float32", "tf32")
    if recipe.deployment.scheme == "tf32":
        return STEP_TOLERANCE
    if not (has_steps or is_half):
        return FLOAT_TOLERANCE
    # Half precision of all layers is made on CUDA, whose kernels sum otherwise than those of any CPU.
    is_cuda = is_half or any(layer.kind == "rowwise" for layer in recipe.quantized)
    if is_cuda and recipe.deployment.runtime in TORCH:
        return REDUCED_TOLERANCE
    # Another CPU may have other kernels, whose activations have 7 bits or whose sums are rounded elsewhere. By its flags too: a
    # cloud has one name for processors that can do different things.
    is_whole = any(layer.dtype == "qint8" and not layer.reduce_range for layer in recipe.quantized)
    is_same = recipe.cpu == environment().cpu and not (is_whole and saturates(recipe.deployment.runtime))
    return STEP_TOLERANCE if is_same else REDUCED_TOLERANCE
