"""Memory that this process and its children may still take: the machine's, or what a container's limit leaves of it."""

from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
FILES = ("inactive_file", "active_file")


def total_bytes(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return how much memory there is, or may be used here."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits(groups, own))])


def available_bytes(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return how much memory can be had without swapping, at least 0."""
    left = (limit - used for limit, used in _limits(groups, own))
    return max(min([psutil.virtual_memory().available, *left]), 0)


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) of this process's control group and those above it; files that the kernel would drop aren't used."""
    for group in own_groups(groups, own):
        limit, used = _number(group / "memory.max"), _number(group / "memory.current")
        if limit is not None and used is not None:
            words = (line.split() for line in _lines(group / "memory.stat"))
            files = sum(int(pair[1]) for pair in words if len(pair) == 2 and pair[0] in FILES and pair[1].isdecimal())
            yield limit, max(used - files, 0)


def own_groups(groups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group, of version 2, and of those above it.

    A folder may not be there: in a container, what lies outside isn't, and its own group is the last.
    """
    name = next((line.removeprefix("0::") for line in _lines(own) if line.startswith("0::")), "")
    folder = groups / name.strip("/")
    for group in (folder, *folder.parents):
        yield group
        if group == groups:
            break


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
