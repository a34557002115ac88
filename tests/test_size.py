"""The project's size: limits that may only fall."""

import ast
import subprocess
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MAX_LINES = {"profiling_agent graphs": 22321, "tests": 23216, "benchmarks": 6009}
MAX_MODULES = 107


def python_files(folders: str) -> list[Path]:
    """Return the Python files that git tracks in these folders."""
    listed = subprocess.run(
        ["git", "ls-files", *(f"{folder}/*.py" for folder in folders.split())],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return [ROOT / name for name in listed.stdout.split()]


@pytest.mark.parametrize("folders", MAX_LINES)
def test_a_folder_has_no_more_lines_than_its_limit(folders: str):
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in python_files(folders))

    assert lines <= MAX_LINES[folders], "a change that adds something removes something: see CONTRIBUTING.md"


def test_the_package_has_no_more_modules_than_its_limit():
    assert len(python_files("profiling_agent graphs")) <= MAX_MODULES


def test_no_class_name_stands_twice_in_the_package():
    names = Counter(
        node.name
        for path in python_files("profiling_agent graphs")
        for node in ast.parse(path.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ClassDef)
    )

    assert [name for name, count in names.items() if count > 1] == []
