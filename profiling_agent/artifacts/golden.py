"""Two images and what the model said of them when it was saved: does it still say so?"""

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from profiling_agent.artifacts.recipe import Recipe
from profiling_agent.errors import ArtifactError
from profiling_agent.modules.inference import random_batch
from profiling_agent.quantization.kinds import quantized_modules
from profiling_agent.records import InputSpec

NUM_IMAGES = 2
# Relative distances of the logits. Another CPU or thread count adds float32 in another order, about 1e-6 apart. An
# activation that this moves across a rounding edge changes by a whole step, of int8 or of bfloat16; where 7-bit
# activations replace 8-bit ones, by two of int8.
FLOAT_TOLERANCE, STEP_TOLERANCE, REDUCED_TOLERANCE = 1e-4, 2e-2, 1e-1


def logits_of(model: nn.Module, pixel_values: Tensor) -> Tensor:
    """Return the logits in eval mode, on the CPU; the model's mode is left as found."""
    was_training = model.training
    model.eval()
    try:
        with torch.inference_mode():
            device = next((parameter.device for parameter in model.parameters()), torch.device("cpu"))
            return model(pixel_values=pixel_values.to(device)).logits.cpu()
    finally:
        model.train(was_training)


def golden_tensors(model: nn.Module, spec: InputSpec) -> dict[str, Tensor]:
    """Return an input batch of two and the logits that `model` computes for it.

    The images are rounded to float16 and stored as that: in float32 they are 1.3% of ViT-B in int8.
    """
    pixel_values = random_batch(spec, NUM_IMAGES).half()
    return {"pixel_values": pixel_values, "logits": logits_of(model, pixel_values.float()).clone()}


def _tolerance(model: nn.Module, recipe: Recipe) -> float:
    # float16 weights alone are rounded, the activations that they meet stay float32.
    saved = {layer.name: layer.reduce_range for layer in recipe.quantized if layer.dtype != "float16"}
    if not saved:
        return FLOAT_TOLERANCE
    held = quantized_modules(model)
    is_same = all(held[name].reduce_range == reduced for name, reduced in saved.items())
    return STEP_TOLERANCE if is_same else REDUCED_TOLERANCE


def check_golden(model: nn.Module, golden: dict[str, Tensor], recipe: Recipe) -> None:
    """Raise ArtifactError where `model` doesn't compute the logits that were saved with it."""
    try:
        expected = golden["logits"]
        found = logits_of(model, golden["pixel_values"].float())
    except (KeyError, RuntimeError) as error:
        raise ArtifactError(f"the saved golden images can't be run ({error}): save the model again") from error
    refuse_far_logits("the model", found.numpy(), expected.numpy(), _tolerance(model, recipe))


def refuse_far_logits(who: str, found: NDArray[Any], expected: NDArray[Any], tolerance: float) -> None:
    """Raise ArtifactError where ||found - expected|| / ||expected|| is more than `tolerance`, or no number."""
    distance = float(np.linalg.norm(found - expected) / max(np.linalg.norm(expected), np.finfo(np.float32).tiny))
    # `not <=` so that a NaN fails.
    if not distance <= tolerance:
        raise ArtifactError(
            f"{who} doesn't compute what it did when it was saved: its logits are {distance:.2g} apart (relative), "
            f"{tolerance:g} is allowed; save it again with the installed libraries"
        )
