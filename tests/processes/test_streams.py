import subprocess
import sys

# The C library's own buffer is what a solver in C prints into; it is flushed when the process ends.
NOISY = """
import ctypes
from profiling_agent.lib.third_party import keep_stdout
print("before")
keep_stdout()
ctypes.CDLL(None).puts(b"from C")
print("ours")
"""


def test_standard_output_is_kept_for_what_we_print():
    said = subprocess.run([sys.executable, "-c", NOISY], capture_output=True, text=True, check=True)

    assert said.stdout == "before\nours\n"
    assert said.stderr == "from C\n"
