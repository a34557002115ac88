"""Eager torch: how a module is run and timed."""

import os
import time

import torch
from torch import nn

from profiling_agent.records import InputSpec
from profiling_agent.runtimes.latency import latency_stats as latency_stats


def pin_threads(num_threads: int | None = None) -> int:
    """Fix the number of compute threads of this process; by default one per core it may use."""
    count = num_threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count


def random_batch(spec: InputSpec, batch_size: int, *, seed: int = 0) -> torch.Tensor:
    """Return standard normal noise in the model's input shape: (batch, channels, height, width), float32."""
    return torch.randn(spec.batch(batch_size), generator=torch.Generator().manual_seed(seed))


def time_forward(model: nn.Module, batch: torch.Tensor, *, runs: int, warmup: int = 0) -> list[float]:
    """Return the milliseconds of `runs` forward passes after `warmup` untimed ones."""
    samples: list[float] = []
    with torch.inference_mode():
        for index in range(warmup + runs):
            started = time.perf_counter()
            model(pixel_values=batch)
            if batch.is_cuda:
                # CUDA returns before the kernel finishes; without this the sample measures the launch.
                torch.cuda.synchronize(batch.device)
            if index >= warmup:
                samples.append((time.perf_counter() - started) * 1e3)
    return samples
