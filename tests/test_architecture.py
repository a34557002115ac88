"""The rules of the house, as tests."""

import ast
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "profiling_agent"
STAGES = (
    "acquisition",
    "shapes",
    "profiling",
    "analysis",
    "pruning",
    "quantization",
    "runtimes",
    "jobs",
    "evaluation",
    "iteration",
    "artifacts",
    "reporting",
)


def sources() -> list[Path]:
    return [*PACKAGE.rglob("*.py"), *(ROOT / "graphs").glob("*.py"), *(ROOT / "prompts").glob("*.py")]


@pytest.mark.parametrize("stage", STAGES)
def test_a_stage_works_where_langgraph_and_langchain_are_not_installed(stage: str):
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for path in sorted((PACKAGE / stage).glob("*.py"))
        if path.stem not in ("__init__", "__main__")
    ]
    blocked = "import sys\nfor name in ('langgraph', 'langchain_core', 'langchain_openai'): sys.modules[name] = None\n"
    imports = "\n".join(f"import {module}" for module in modules)

    ended = subprocess.run([sys.executable, "-c", blocked + imports], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr


def test_the_parent_process_of_a_run_imports_no_torch():
    code = "import sys, profiling_agent.cli.main, profiling_agent.lifecycle; print('torch' in sys.modules)"

    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout

    assert said.strip() == "False"


def test_broad_excepts_stand_at_the_boundaries_only():
    found = [
        f"{path.relative_to(ROOT).as_posix()}"
        for path in sources()
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.ExceptHandler)
        and (node.type is None or getattr(node.type, "id", "") in ("Exception", "BaseException"))
    ]

    # A job's child, the Torch-Pruning call, the node that frees the run before it raises again, and the thread that hands
    # what it caught to the one that waits.
    assert set(found) <= {
        "profiling_agent/llm/chat.py",
        "profiling_agent/jobs/__main__.py",
        "profiling_agent/pruning/prune.py",
        "profiling_agent/agents/node.py",
    }


def test_every_package_on_disk_is_in_the_wheel():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    on_disk = {f"profiling_agent.{folder.name}" for folder in PACKAGE.iterdir() if (folder / "__init__.py").exists()}

    assert listed == on_disk | {"profiling_agent", "profiling_agent.graphs", "profiling_agent.prompts"}


def test_nothing_is_unpickled_and_no_remote_code_is_run():
    for path in sources():
        text = path.read_text()
        assert "pickle.load" not in text
        assert "torch.load(" not in text
        assert "trust_remote_code=True" not in text
