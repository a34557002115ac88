"""Progress: how long work says where it is."""

from typing import Protocol


class Progress(Protocol):
    """Called now and then by long work; `total` is 0 where the end isn't known."""

    def __call__(self, message: str, done: int, total: int) -> None:
        """Say that `done` of `total` is behind us."""
        ...


def silent(message: str, done: int, total: int) -> None:
    """Say nothing."""
