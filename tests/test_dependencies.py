"""Every package that is imported is declared, and constraints.txt pins what is declared."""

import ast
import re
import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.metadata import distribution, packages_distributions
from pathlib import Path

ROOT = Path(__file__).parents[1]
SHIPPED = ("profiling_agent", "graphs", "prompts")
# What only those who test, benchmark or develop install.
NOT_FOR_USERS = ("bench", "test", "dev")


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def named(requirements: Iterable[str]) -> set[str]:
    names = {normal(re.split(r"[^\w.-]", requirement, maxsplit=1)[0]) for requirement in requirements}
    return names - {"profiling-agent"}


def declared(*, leave_out: Iterable[str] = ()) -> set[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    return named(project["dependencies"]).union(*(named(extras[name]) for name in extras.keys() - set(leave_out)))


def imported(path: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield node.module


brought = cache(packages_distributions)


@cache
def modules_of(name: str) -> set[str]:
    return {str(file) for file in distribution(name).files or ()}


@cache
def distributions_of(module: str) -> frozenset[str]:
    """Return who brings a module; of a namespace that several share, those whose file it is."""
    top = module.split(".")[0]
    # pydantic pins its core, which is imported by itself where a start is to be quick.
    top = "pydantic" if top == "pydantic_core" else top
    names = set(brought().get(top, [top]))
    if len(names) > 1:
        path = module.replace(".", "/")
        names = {name for name in names if {f"{path}.py", f"{path}/__init__.py"} & modules_of(name)} or names
    return frozenset(map(normal, names))


def undeclared(folders: Iterable[str], known: set[str]) -> set[str]:
    paths = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    # These two find their helpers by bare names.
    helpers = [path.relative_to(ROOT) for folder in ("tests", "benchmarks") for path in (ROOT / folder).rglob("*.py")]
    own = {name for path in helpers for name in (path.stem, *path.parts)}
    return {
        f"{module} in {path.relative_to(ROOT)}"
        for path in paths
        for module in imported(path)
        if (top := module.split(".")[0]) not in sys.stdlib_module_names | {"profiling_agent"}
        and not (top in own and path.relative_to(ROOT).parts[0] not in SHIPPED)
        and not distributions_of(module) & known
    }


def test_what_is_imported_is_declared_for_users_or_in_some_extra():
    assert not undeclared(SHIPPED, declared(leave_out=NOT_FOR_USERS))
    # Tools in environments of their own: the name of a package begins with that of its module.
    files = (ROOT / "benchmarks" / "peers").glob("*.txt")
    peers = named(line for file in files for line in file.read_text().splitlines() if not line.startswith("#"))
    unknown = undeclared(("tests", "benchmarks"), declared())
    assert not {each for each in unknown if not any(name.startswith(normal(each.split(".")[0])) for name in peers)}


def test_constraints_pin_each_declared_package():
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pinned = named(line for line in lines if "==" in line)

    assert not declared() - pinned
