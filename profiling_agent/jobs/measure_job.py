"""What a deployed model takes, as jobs: both measure other processes, and import no torch themselves."""

from profiling_agent.jobs import racing
from profiling_agent.jobs.context import Desk
from profiling_agent.records import MemoryUse, Throughputs


def measure_throughput(task: racing.ThroughputTask, desk: Desk) -> Throughputs:
    """Let the models take turns at each batch size."""
    from profiling_agent.benchmarking.throughput import throughput

    return throughput(
        task.models,
        root=desk.root,
        batch_sizes=task.batch_sizes,
        device=task.device,
        seed=task.seed,
        progress=desk.progress,
    )


def measure_memory(task: racing.MemoryTask, desk: Desk) -> MemoryUse:
    """Read what a process holds at most that only loads and runs the model."""
    from profiling_agent.benchmarking.throughput import memory_use

    return memory_use(task.model, root=desk.root, batch_size=task.batch_size, device=task.device)
