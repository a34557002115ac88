"""Batches of images: noise to time a model with, and what a batch that is given has to look like. No torch here."""

import numpy as np

from profiling_agent.deployment.protocol import Batch
from profiling_agent.errors import ArtifactError
from profiling_agent.records import InputSpec


def noise_batch(spec: InputSpec, batch_size: int, *, seed: int = 0) -> Batch:
    """Return standard normal noise in the model's input shape: (batch, channels, height, width), float32."""
    return np.random.default_rng(seed).standard_normal(spec.batch(batch_size), dtype=np.float32)


def check_images(spec: InputSpec, pixel_values: Batch) -> None:
    """Raise ArtifactError where these aren't images (n, channels, height, width) of the model's size."""
    expected = (spec.channels, spec.height, spec.width)
    if pixel_values.ndim != 4 or pixel_values.shape[1:] != expected or not len(pixel_values):
        channels, height, width = expected
        raise ArtifactError(
            f"the model takes pixel_values of shape (n, {channels}, {height}, {width}), not "
            f"{tuple(pixel_values.shape)!r}: prepare images with its processor"
        )


def check_fixed_batch(fixed_size: int | None, pixel_values: Batch) -> None:
    """Raise ArtifactError where the file was exported for another number of images."""
    if fixed_size is not None and len(pixel_values) != fixed_size:
        raise ArtifactError(
            f"the model was exported for batches of exactly {fixed_size} images, not {len(pixel_values)}: "
            "fill the batch up, or export it with a dynamic batch"
        )
