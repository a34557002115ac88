"""The rules of the house, as tests."""

import ast
import subprocess
import sys
import tomllib

from architecture import ORDER, ROOT, drawing, drawn, imports, sources, upward

PACKAGE = ROOT / "profiling_agent"
STAGES = ORDER[ORDER.index("data") : ORDER.index("graph")]


def test_every_package_and_every_module_of_the_root_has_its_place_in_the_order():
    folders = {path.parent.name for path in PACKAGE.glob("*/__init__.py")}
    modules = {path.stem for path in PACKAGE.glob("*.py")} - {"__init__"}

    assert folders | modules == {*ORDER} - {"graphs", "prompts"}


def test_packages_import_one_way():
    assert upward(imports()) == []


def test_the_drawing_is_that_of_the_imports():
    assert drawn() == drawing(), "the imports changed: python tests/architecture.py"


def test_the_stages_work_where_langgraph_and_langchain_are_not_installed():
    modules = [
        ".".join(path.relative_to(ROOT).with_suffix("").parts)
        for stage in STAGES
        for path in sorted((PACKAGE / stage).rglob("*.py"))
        if path.stem not in ("__init__", "__main__")
    ]
    blocked = "import sys\nfor name in ('langgraph', 'langchain_core', 'langchain_openai'): sys.modules[name] = None\n"
    imports = "\n".join(f"import {module}" for module in modules)

    ended = subprocess.run([sys.executable, "-c", blocked + imports], capture_output=True, text=True, check=False)

    assert ended.returncode == 0, ended.stderr


def test_the_parent_process_of_a_run_imports_no_torch():
    code = "import sys, profiling_agent.cli.main, profiling_agent.api; print('torch' in sys.modules)"

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

    # A job's child, a model's or library's code, the node that frees the run before it raises again, the
    # thread that hands what it caught to the one that waits, and the command line, whose crashes have their own code.
    assert set(found) <= {
        "profiling_agent/llm/chat.py",
        "profiling_agent/jobs/worker.py",
        "profiling_agent/lib/logs.py",
        "profiling_agent/graph/run.py",
        "profiling_agent/cli/terminal.py",
        # One run of many: the others go on.
        "profiling_agent/sweep.py",
    }


def test_every_package_on_disk_is_in_the_wheel():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    on_disk = {".".join(path.parent.relative_to(ROOT).parts) for path in PACKAGE.rglob("__init__.py")}

    assert listed == on_disk | {"profiling_agent.graphs", "profiling_agent.prompts"}


def test_nothing_is_unpickled_and_no_remote_code_is_run():
    for path in sources():
        text = path.read_text()
        assert "pickle.load" not in text
        assert "torch.load(" not in text
        assert "trust_remote_code=True" not in text
