"""Two images and what the model said of them when it was saved: does it still say so?"""

import torch
from torch import Tensor, nn

from profiling_agent.artifacts.recipe import Recipe
from profiling_agent.errors import ArtifactError
from profiling_agent.records import InputSpec
from profiling_agent.runtimes.eager import random_batch

NUM_IMAGES = 2
# Relative distances of the logits. Another CPU or thread count adds float32 in another order, about 1e-6 apart. An
# activation that this moves across a rounding edge changes by a whole int8 step; where 7-bit activations replace
# 8-bit ones, by two.
FLOAT_TOLERANCE, INT8_TOLERANCE, REDUCED_TOLERANCE = 1e-4, 2e-2, 1e-1


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
    """Return an input batch of two and the logits that `model` computes for it."""
    pixel_values = random_batch(spec, NUM_IMAGES)
    return {"pixel_values": pixel_values, "logits": logits_of(model, pixel_values).clone()}


def _tolerance(model: nn.Module, recipe: Recipe) -> float:
    saved = {layer.name: layer.reduce_range for layer in recipe.quantized if layer.dtype == "qint8"}
    if not saved:
        return FLOAT_TOLERANCE
    is_same = all(model.get_submodule(name).reduce_range == reduced for name, reduced in saved.items())
    return INT8_TOLERANCE if is_same else REDUCED_TOLERANCE


def check_golden(model: nn.Module, golden: dict[str, Tensor], recipe: Recipe) -> None:
    """Raise ArtifactError where `model` doesn't compute the logits that were saved with it."""
    try:
        expected = golden["logits"]
        found = logits_of(model, golden["pixel_values"])
    except (KeyError, RuntimeError) as error:
        raise ArtifactError(f"the saved golden images can't be run ({error}): save the model again") from error
    distance = float((found - expected).norm() / expected.norm().clamp_min(torch.finfo(torch.float32).tiny))
    # `not <=` so that a NaN fails.
    if not distance <= (tolerance := _tolerance(model, recipe)):
        raise ArtifactError(
            f"the model doesn't compute what it did when it was saved: its logits are {distance:.2g} apart "
            f"(relative), {tolerance:g} is allowed; save it again with the installed libraries"
        )
