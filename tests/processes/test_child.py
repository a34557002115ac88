"""What is kept of what a child printed before it died."""

from profiling_agent.processes.child import last_words

ABORTED = """
terminate called after throwing an instance of 'c10::Error'
  what():  Tried to register an operator (torchvision::nms) with the same name twice.
Exception raised from registerDef at dispatcher.cpp:10 (most recent call first):
frame #0: c10::Error::Error + 0x9d (0x7f in libc10.so)
frame #1: c10::Dispatcher::registerDef + 0x1a (0x7e in libtorch_cpu.so)
frame #2: _PyEval_EvalFrameDefault + 0x5e (0x5d in python3)
frame #3: PyEval_EvalCode + 0x15b (0x5c in python3)
"""


def test_what_cpp_says_of_its_exception_comes_before_the_end_of_its_stack():
    cause, *frames = last_words(ABORTED).split(" | ")

    assert cause == "what():  Tried to register an operator (torchvision::nms) with the same name twice."
    assert [frame[:8] for frame in frames] == ["frame #1", "frame #2", "frame #3"]


def test_of_all_else_the_last_lines_are_kept():
    assert last_words("a warning\nTraceback\n  line\nValueError: no\n") == "Traceback |   line | ValueError: no"
    assert last_words("what(): it alone\n") == "what(): it alone"
    assert last_words(f"begins\n{'x' * 600}") == "x" * 500
    assert last_words(" \n") == ""
