"""Fork server's program: imports the given modules, serves, and in each copy runs the requested module."""

import runpy
import sys

from profiling_agent.processes.forking import Server, exec_in_child, import_modules

if __name__ == "__main__":
    import_modules(sys.argv[1:])
    copy = Server().serve()
    exec_in_child(copy)
    assert copy.asked.module is not None, "a copy runs something"
    # Run here, so that no function of ours is on the stack.
    runpy.run_module(copy.asked.module, run_name="__main__", alter_sys=True)
