"""Kinds of machine: those whose times may be compared, and whose results are the same to the bit, have one name."""

import hashlib
import json
import platform

from profiling_agent.records import Environment
from profiling_agent.reproducibility import environment

# Two machines of one kind tell different sizes of memory, by what their kernels keep.
VARIES = {"memory_bytes", "device"}
# A machine offers one of it, which a job takes whole: so that it runs alone.
SLOT = "profiling-agent-"


def kind_of(here: Environment) -> str:
    """Return the name of a machine's kind: processor, threads, libraries and our own code."""
    told = json.dumps(here.model_dump(mode="json", exclude=VARIES), sort_keys=True)
    return hashlib.sha256(told.encode()).hexdigest()[:12]


def slot_of(kind: str) -> str:
    """Return the name of the resource that machines of a kind offer to Ray."""
    return f"{SLOT}{kind}"


def start_line(address: str = "HEAD:6379") -> str:
    """Return the command that adds this machine to a cluster."""
    slot = json.dumps({slot_of(kind_of(environment())): 1})
    return f"RAY_worker_niceness=0 RAY_AUTH_MODE=token ray start --address={address} --resources='{slot}'"


def node_name(node_id: str) -> str:
    """Return what reports call this machine of a cluster."""
    return f"{platform.node()[:60]}/{node_id[:8]}"
