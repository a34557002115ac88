"""The order of the packages, read from the imports; `python tests/architecture.py` draws it into docs/architecture.md."""

import ast
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
BEGIN, END = "<!-- drawn from the imports by tests/architecture.py -->", "<!-- end of the drawing -->"

# Lowest first: a package or a module of the root imports itself and what stands before it.
ORDER = (
    *("schemas", "errors", "lib", "request", "workspace"),
    *("processes", "prompts", "llm", "data"),
    *("pruning", "quantization", "runtimes"),
    *("measure", "profiling", "planning"),
    *("jobs", "search"),
    *("reporting", "exporting"),
    *("graph", "graphs", "api", "sweep", "cli"),
)


@dataclass(frozen=True, order=True)
class Import:
    """One import of ours by one of ours, wherever in the file it stands."""

    package: str
    imported: str
    path: str
    line: int


def sources() -> list[Path]:
    """Return every file that is installed."""
    mapped = [path for name in ("graphs", "prompts") for path in (ROOT / name).glob("*.py")]
    return [*(ROOT / "profiling_agent").rglob("*.py"), *mapped]


def package_of(module: str) -> str | None:
    """Return the package or root module that a dotted name of ours lies in, or None for the package itself."""
    first = module.split(".")[1] if "." in module else ""
    return first if first in ORDER else None


def imports() -> Iterator[Import]:
    """Yield every import of one of our packages by another, those inside functions and `if TYPE_CHECKING` included."""
    for path in sources():
        relative = path.relative_to(ROOT)
        own = ".".join(relative.with_suffix("").parts).removeprefix("profiling_agent.")
        package = package_of(f"profiling_agent.{own}")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            for module in _modules(node):
                imported = package_of(module)
                if package is not None and imported is not None and imported != package:
                    yield Import(package, imported, relative.as_posix(), getattr(node, "lineno", 0))


def _modules(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name.startswith("profiling_agent."))
    elif isinstance(node, ast.ImportFrom) and node.module == "profiling_agent":
        yield from (f"profiling_agent.{alias.name}" for alias in node.names)
    elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("profiling_agent."):
        yield node.module or ""


def upward(found: Iterable[Import]) -> list[Import]:
    """Return the imports that run against the order."""
    return sorted(i for i in found if ORDER.index(i.imported) >= ORDER.index(i.package))


def _reached(package: str, edges: dict[str, set[str]]) -> set[str]:
    seen: set[str] = set()
    waiting = list(edges.get(package, ()))
    while waiting:
        if (one := waiting.pop()) not in seen:
            seen.add(one)
            waiting += edges.get(one, ())
    return seen


def drawing() -> str:
    """Return the imports as Mermaid, without those that follow from others, and a table of the packages."""
    edges: dict[str, set[str]] = {name: set() for name in ORDER}
    for each in imports():
        edges[each.package].add(each.imported)
    lines = ["```mermaid", "graph BT"]
    for name in ORDER:
        implied = set[str]().union(*(_reached(other, edges) for other in edges[name]))
        lines += [f"    {name} --> {other}" for other in ORDER if other in edges[name] - implied]
    lines += ["```", "", "| package | what it is | imports |", "|---|---|---|"]
    for name in ORDER:
        imported = ", ".join(other for other in ORDER if other in edges[name]) or "nothing of ours"
        lines.append(f"| `{name}` | {_purpose(name)} | {imported} |")
    return "\n".join(lines)


def _purpose(name: str) -> str:
    folder = ROOT / name if name in ("graphs", "prompts") else ROOT / "profiling_agent" / name
    path = folder / "__init__.py" if folder.is_dir() else folder.with_suffix(".py")
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
    return text.split("\n\n")[0].replace("\n", " ").removesuffix(".")


def drawn() -> str:
    """Return the drawing that the page holds."""
    return PAGE.read_text(encoding="utf-8").split(BEGIN)[1].split(END)[0].strip()


if __name__ == "__main__":
    before, rest = PAGE.read_text(encoding="utf-8").split(BEGIN)
    PAGE.write_text(f"{before}{BEGIN}\n{drawing()}\n{END}{rest.split(END)[1]}", encoding="utf-8")
