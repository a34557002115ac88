"""Frames of ours from a graph's node to the tensor operation, counted in a real run by watchers inside its processes.

`python tests/frames.py MODEL DATA` prints them. A run is started with a `sitecustomize.py` on its path. In the parent that
notes the stack whenever a node hands an order to a child process, in the child whenever a weight is cut or rounded.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

WATCH = '''
import json, os, sys, threading
OURS = os.sep + "profiling_agent" + os.sep
OUT = os.environ["PROFILING_AGENT_FRAMES_OUT"]

def stack(frame):
    """Return what of ours is on the stack, outermost first."""
    found = []
    while frame is not None:
        code = frame.f_code
        if OURS in code.co_filename and code.co_name != "<module>":
            found.append(code.co_filename.rpartition(OURS)[2] + ":" + code.co_name)
        frame = frame.f_back
    return found[::-1]

seen = set()

def note(kind, frames):
    line = json.dumps({"kind": kind, "frames": frames})
    if line not in seen:
        seen.add(line)
        with open(OUT, "a") as out:
            out.write(line + "\\n")

if sys.argv[0] == "-m" or "profiling_agent.jobs" in " ".join(sys.orig_argv):
    import torch
    from torch.overrides import TorchFunctionMode

    class Watch(TorchFunctionMode):
        def __torch_function__(self, func, types, args=(), kwargs=None):
            frames = stack(sys._getframe(1))
            last = frames[-1].partition(":")[0] if frames else ""
            name = getattr(func, "__name__", "")
            if last == "pruning/surgery.py" and name in ("index_select", "__getitem__"):
                note("cut", frames)
            elif last.startswith("quantization/") and name == "round":
                note("round", frames)
            return func(*args, **(kwargs or {}))

    Watch().__enter__()
else:
    def hand_over(frame, event, argument):
        if event == "c_call" and argument.__name__ == "write" and ("processes" in frame.f_code.co_filename or "jobs" in frame.f_code.co_filename):
            frames = stack(frame)
            nodes = [i for i, name in enumerate(frames) if name.startswith("agents/") and name.endswith((":pruning", ":quantization", ":deployment_search"))]
            if nodes:
                note(frames[nodes[-1]].rpartition(":")[2], frames[nodes[-1]:])

    sys.setprofile(hand_over)
    threading.setprofile(hand_over)
'''
RUN = """
import sys
from profiling_agent import Request, optimize
optimize(Request(model=sys.argv[1], dataset=sys.argv[2], output=sys.argv[3], runtimes="eager", quantize_dtype="qint8",
                 batch_size=64, max_iterations=1, num_sessions=2))
"""


def counted(model: Path, data: Path) -> dict[str, list[list[str]]]:
    """Return every stack seen in one run: of the nodes `pruning`, `quantization` and `deployment_search`, of `cut` and of `round`."""
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch, "frames.jsonl")
        Path(scratch, "sitecustomize.py").write_text(WATCH, encoding="utf-8")
        environment = os.environ | {"PYTHONPATH": scratch, "PROFILING_AGENT_FRAMES_OUT": str(out)}
        command = [sys.executable, "-P", "-c", RUN, str(model), str(data), str(Path(scratch, "runs"))]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        found: dict[str, list[list[str]]] = {}
        for line in out.read_text(encoding="utf-8").splitlines():
            said = json.loads(line)
            found.setdefault(said["kind"], []).append(said["frames"])
        return found


def longest(stacks: list[list[str]], through: str) -> list[str]:
    """Return the longest of the stacks that pass a file or function whose name begins so."""
    return max((frames for frames in stacks if any(name.startswith(through) for name in frames)), key=len)


if __name__ == "__main__":
    for kind, stacks in counted(Path(sys.argv[1]), Path(sys.argv[2])).items():
        for frames in stacks:
            sys.stdout.write(f"{kind} {len(frames)} {' > '.join(frames)}\n")
