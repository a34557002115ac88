"""A Python that has a few packages and what they need, and nothing else: neither ours nor what ours asks for."""

import json
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

BEGIN = "import sys; sys.path[:0] = {paths!r}; sys.dont_write_bytecode = True; sys.argv = {arguments!r}\n"


def packages(folder: Path, *names: str) -> Path:
    """Fill a folder with links to the packages of these names and to those that they require; return it."""
    folder.mkdir()
    waiting, known = list(names), set[str]()
    while waiting:
        if (name := canonicalize_name(waiting.pop())) in known:
            continue
        known.add(name)
        try:
            found = metadata.distribution(name)
        # Another system's, or one that this package can do without.
        except metadata.PackageNotFoundError:
            continue
        wanted = map(Requirement, found.requires or ())
        waiting += [each.name for each in wanted if each.marker is None or each.marker.evaluate({"extra": ""})]
        for top in {file.parts[0] for file in found.files or () if file.parts[0] not in ("..", "__pycache__")}:
            link = folder / top
            if not link.exists():
                link.symlink_to(Path(str(found.locate_file(top))))
    return folder


def run(packages: Path, code: str, *arguments: str | Path, beside: Path | None = None) -> str:
    """Return what a new interpreter prints that finds nothing but these packages and the modules in `beside`."""
    paths = [str(packages), *([str(beside)] if beside else [])]
    begin = BEGIN.format(paths=paths, arguments=["-c", *map(str, arguments)])
    ended = subprocess.run(
        # Isolated, and without the site's packages, which ours would be among.
        [sys.executable, "-I", "-S", "-c", begin + code],
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def said(packages: Path, code: str, *arguments: str | Path, beside: Path | None = None):
    """Return what `run` does, read as JSON."""
    return json.loads(run(packages, code, *arguments, beside=beside).splitlines()[-1])
