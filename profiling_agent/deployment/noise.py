"""Images without a picture, for what is only timed. No torch here."""

import numpy as np

from profiling_agent.deployment.protocol import Batch
from profiling_agent.records import InputSpec


def noise_batch(spec: InputSpec, batch_size: int, *, seed: int = 0) -> Batch:
    """Return standard normal noise in the model's input shape: (batch, channels, height, width), float32."""
    return np.random.default_rng(seed).standard_normal(spec.batch(batch_size), dtype=np.float32)
