"""Memory that this process and its children may still take: the machine's, or what a container's limit leaves of it."""

from collections.abc import Iterator
from pathlib import Path

import psutil

GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
# The names of the limit, of what is used, and of what of that are files that the kernel would drop, in versions 2 and 1 of control groups.
NAMES = (
    ("", "memory.max", "memory.current", ("inactive_file", "active_file")),
    ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
)


def total_bytes(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return how much memory there is, or may be used here."""
    return min([psutil.virtual_memory().total, *(limit for limit, _ in _limits(groups, own))])


def available_bytes(groups: Path = GROUPS, own: Path = OWN_GROUPS) -> int:
    """Return how much memory can be had without swapping, at least 0."""
    left = (limit - used for limit, used in _limits(groups, own))
    return max(min([psutil.virtual_memory().available, *left]), 0)


def _limits(groups: Path, own: Path) -> Iterator[tuple[int, int]]:
    """Yield (limit, used) of this process's control group and those above it, as far as they have a limit."""
    for controller, limit_name, used_name, files_names in NAMES:
        for group in own_groups(controller, groups, own):
            limit, used = _number(group / limit_name), _number(group / used_name)
            if limit is not None and used is not None:
                yield limit, max(used - _files(group / "memory.stat", files_names), 0)


def own_groups(controller: str, groups: Path, own: Path) -> Iterator[Path]:
    """Yield the folders of this process's control group and of those above it: of a controller in version 1, of "" in version 2.

    A folder may not be there: in a container, what lies outside isn't, and its own group is the last.
    """
    root = groups / controller
    folder = root / _own_group(own, controller)
    for group in (folder, *folder.parents):
        yield group
        if group == root:
            break


def _own_group(own: Path, controller: str) -> str:
    for line in _lines(own):
        _, names, path = (*line.split(":", 2), "", "")[:3]
        if controller in names.split(","):
            return path.strip("/")
    return ""


def _files(stat: Path, names: tuple[str, ...]) -> int:
    words = (line.split() for line in _lines(stat))
    return sum(int(pair[1]) for pair in words if len(pair) == 2 and pair[0] in names and pair[1].isdecimal())


def _number(path: Path) -> int | None:
    text = "".join(_lines(path)).strip()
    return int(text) if text.isdecimal() else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
