"""Whether optional packages are there, without importing them."""

from collections.abc import Sequence
from importlib.util import find_spec


def missing_packages(packages: Sequence[str], *, extra: str) -> str | None:
    """Return the line that says how to install the first of `packages` that isn't there, or None."""
    for name in packages:
        if find_spec(name) is None:
            return f"{name} isn't installed: pip install profiling-agent[{extra}]"
    return None
