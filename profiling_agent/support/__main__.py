"""Program that takes the steps: `python -m profiling_agent.support FOLDER`; each line asks for one."""

import sys
from pathlib import Path

from profiling_agent.errors import ProfilingAgentError
from profiling_agent.modules.inference import pin_threads
from profiling_agent.processes.serve import Parent
from profiling_agent.reproducibility import available_threads
from profiling_agent.support import steps
from profiling_agent.support.look import Ask, Reply


def answered(ask: Ask, folder: Path, parent: Parent) -> Reply:
    """Take one step."""
    threads = available_threads()
    if ask.step == "prepare":

        def progress(message: str, done: int, total: int) -> None:
            parent.send(Reply(kind="progress", text=message, done=done, total=total))

        made = steps.prepare(ask.model, folder, revision=ask.revision, progress=progress)
        return Reply(kind="done", prunable=made, forms=steps.forms(folder))
    if ask.step == "export":
        assert ask.form is not None, "an export is of a form"
        return Reply(kind="done", text=steps.write_onnx(folder, ask.form) or "")
    assert ask.told is not None, "a deployment is named"
    if ask.step == "make":
        return Reply(kind="done", told=steps.make(folder, ask.told.form, ask.told.deployment, num_threads=threads))
    return Reply(kind="done", told=steps.reopen(folder, ask.told, num_threads=threads))


def main() -> None:
    """Answer until the parent is gone."""
    parent, folder = Parent(), Path(sys.argv[1])
    pin_threads(available_threads())
    while True:
        try:
            reply = answered(parent.receive(Ask), folder, parent)
        except ProfilingAgentError as error:
            reply = Reply(kind="failed", text=str(error), error=type(error).__name__)
        parent.send(reply)


if __name__ == "__main__":
    main()
