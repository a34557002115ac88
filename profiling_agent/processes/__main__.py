"""Fork server's program: it imports the modules that it is given, serves, and in each copy runs what was asked for."""

import runpy
import sys

from profiling_agent.processes.forking import Server, become, import_modules

if __name__ == "__main__":
    import_modules(sys.argv[1:])
    copy = Server().serve()
    become(copy)
    assert copy.asked.module is not None, "a copy runs something"
    # Here, where no function of ours is on the stack.
    runpy.run_module(copy.asked.module, run_name="__main__", alter_sys=True)
