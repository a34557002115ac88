"""How many threads a model's work is split into, and what is the same machine."""

import os
from pathlib import Path

import pytest

from profiling_agent.reproducibility import available_threads, environment

ALLOWED = sorted(os.sched_getaffinity(0))


def described(folder: Path, cores: dict[int, tuple[int, int]]) -> Path:
    """Return a folder as the kernel's, with the processor and the core that each logical one is part of."""
    for cpu, (package, core) in cores.items():
        (topology := folder / f"cpu{cpu}" / "topology").mkdir(parents=True)
        (topology / "physical_package_id").write_text(f"{package}\n")
        (topology / "core_id").write_text(f"{core}\n")
    return folder


def test_second_threads_of_a_core_are_none_of_ours(tmp_path: Path):
    both = described(tmp_path / "one", dict.fromkeys(ALLOWED, (0, 3)))
    # The same number on another processor is another core; what this process may not use counts for nothing.
    apart = described(tmp_path / "each", {cpu: (cpu, 0) for cpu in ALLOWED} | {max(ALLOWED) + 1: (99, 0)})

    assert available_threads(both) == 1
    assert available_threads(apart) == len(ALLOWED)


def test_where_the_system_does_not_tell_each_is_a_core(tmp_path: Path):
    assert available_threads(tmp_path) == len(ALLOWED)


def test_what_ray_sets_for_each_of_its_tasks_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OMP_NUM_THREADS", "1")

    assert available_threads(tmp_path) == len(ALLOWED)


def test_a_machine_has_whole_gigabytes_whatever_its_kernel_keeps():
    physical = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    assert environment().memory_bytes % 2**30 == 0
    assert 0 <= environment().memory_bytes - physical < 2**30
