"""How a child process of ours is started: which Python, and what it sees of the environment."""

import os
import signal
import sys

QUIET = {"HF_HUB_DISABLE_PROGRESS_BARS": "1", "HF_HUB_DISABLE_TELEMETRY": "1", "TOKENIZERS_PARALLELISM": "false"}


def child_command(module: str, *arguments: str) -> list[str]:
    """Return the command line that runs one of our modules."""
    # -P: a file of the user's called torch.py in the working folder is not to be imported.
    return [sys.executable, "-P", "-m", module, *arguments]


def child_environment() -> dict[str, str]:
    """Return a child's environment: no progress bars, no telemetry, no parallel tokenizers."""
    return os.environ | QUIET


def ending(code: int) -> str:
    """Return how a process ended, after its exit status: by which signal, where it was one."""
    if code >= 0:
        return f"exit status {code}"
    name = signal.Signals(-code).name if -code in set(signal.Signals) else f"signal {-code}"
    meaning = {
        "SIGKILL": ", killed from outside, as the system does when memory runs out; lower batch_size or num_samples"
    }.get(name, "")
    return f"exit status {code} ({name}{meaning})"
