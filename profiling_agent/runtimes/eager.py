"""What every process that runs torch needs: its threads, and a batch to run."""

import torch

from profiling_agent.records import InputSpec
from profiling_agent.reproducibility import available_threads
from profiling_agent.runtimes.noise import noise_batch


def pin_threads(num_threads: int | None = None) -> int:
    """Fix the number of compute threads of this process; by default one per core it may use."""
    count = num_threads or available_threads()
    torch.set_num_threads(count)
    return count


def random_batch(spec: InputSpec, batch_size: int, *, seed: int = 0) -> torch.Tensor:
    """Return `noise_batch` as a tensor."""
    return torch.from_numpy(noise_batch(spec, batch_size, seed=seed))
