"""What every process that runs torch needs: its threads, and a batch to run."""

import torch

from profiling_agent.records import InputSpec
from profiling_agent.reproducibility import available_threads


def pin_threads(num_threads: int | None = None) -> int:
    """Fix the number of compute threads of this process; by default one per core it may use."""
    count = num_threads or available_threads()
    torch.set_num_threads(count)
    return count


def random_batch(spec: InputSpec, batch_size: int, *, seed: int = 0) -> torch.Tensor:
    """Return standard normal noise in the model's input shape: (batch, channels, height, width), float32."""
    return torch.randn(spec.batch(batch_size), generator=torch.Generator().manual_seed(seed))
