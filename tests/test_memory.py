"""How much memory there is for a run: the machine's, or what a container leaves of it."""

from pathlib import Path

import psutil
import pytest

from profiling_agent.lib.machine import available_bytes, own_groups, total_bytes

GIB = 2**30


def group(folder: Path, limit: str, used: int, files: int = 0) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "memory.max").write_text(f"{limit}\n")
    (folder / "memory.current").write_text(f"{used}\n")
    dropped = f"inactive_file {files // 2}\nactive_file {files - files // 2}\n"
    (folder / "memory.stat").write_text(f"anon {used - files}\n{dropped}")


@pytest.fixture
def own(tmp_path: Path) -> Path:
    path = tmp_path / "cgroup"
    path.write_text("4:memory:/app/one\n1:cpu:/\n0::/app/one\n")
    return path


def test_a_limit_of_a_container_counts_less_what_is_used_and_files_are_dropped(tmp_path: Path, own: Path):
    group(tmp_path / "groups" / "app" / "one", str(GIB), GIB // 2, files=GIB // 4)

    assert total_bytes(tmp_path / "groups", own) == GIB
    assert available_bytes(tmp_path / "groups", own) == GIB // 2 + GIB // 4


def test_the_narrowest_limit_on_the_way_up_counts(tmp_path: Path, own: Path):
    group(tmp_path / "groups" / "app" / "one", "max", 1000)
    group(tmp_path / "groups" / "app", str(GIB // 8), 1000)
    group(tmp_path / "groups", str(GIB // 4), GIB)

    assert total_bytes(tmp_path / "groups", own) == GIB // 8
    # More is used above than is allowed: nothing is left, and not less than nothing.
    assert available_bytes(tmp_path / "groups", own) == 0


def test_the_own_group_comes_first_and_the_root_last(tmp_path: Path, own: Path):
    assert list(own_groups(tmp_path, own)) == [tmp_path / "app" / "one", tmp_path / "app", tmp_path]
    assert list(own_groups(tmp_path, tmp_path / "none")) == [tmp_path]


@pytest.mark.parametrize("limit", ["max", "", "9223372036854771712"])
def test_without_a_limit_the_machine_counts(tmp_path: Path, own: Path, limit: str):
    group(tmp_path / "groups" / "app" / "one", limit, 1000)

    assert total_bytes(tmp_path / "groups", own) == psutil.virtual_memory().total
    assert total_bytes(tmp_path / "nothing", tmp_path / "none") == psutil.virtual_memory().total
    assert 0 < available_bytes(tmp_path / "nothing", tmp_path / "none") <= psutil.virtual_memory().total
