"""Progress: how long work says where it is."""

from collections.abc import Callable

# Called now and then by long work with what it does, and how much of how much is done; the last is 0 where the end isn't known.
Progress = Callable[[str, int, int], None]


def silent(message: str, done: int, total: int) -> None:
    """Say nothing."""
