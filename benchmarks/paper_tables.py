"""Write the reproduced tables into docs/paper.md, from what `profiling-agent reproduce` left: `python benchmarks/paper_tables.py [FOLDER]`.

FOLDER holds table1.json to figure5.json; by default benchmarks/results/reproduce, into which they are copied from OUTPUT/tables.
"""

import sys
from pathlib import Path

from profiling_agent.reproduce.paper import TABLE_NAMES
from profiling_agent.reproduce.table import Study, markdown

ROOT = Path(__file__).parents[1]
FOLDER, PAGE = ROOT / "benchmarks" / "results" / "reproduce", ROOT / "docs" / "paper.md"
NOTHING = "Not made yet.\n"


def filled(page: str, studies: dict[str, Study]) -> str:
    """Return a page with each table between its marks; of one that wasn't made, that."""
    for name in TABLE_NAMES:
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = page.partition(begin)
        _, found, after = rest.partition(end)
        if not found:
            raise SystemExit(f"the page has no place for {name}: {begin.strip()} and {end}")
        text = markdown(studies[name]) if name in studies else NOTHING
        page = f"{before}{begin}\n{text}\n{end}{after}"
    return page


def read(folder: Path) -> dict[str, Study]:
    """Return the studies in a folder, by name."""
    paths = {name: folder / f"{name}.json" for name in TABLE_NAMES}
    return {
        name: Study.model_validate_json(path.read_text(encoding="utf-8"))
        for name, path in paths.items()
        if path.exists()
    }


def main() -> None:
    """Fill the page."""
    studies = read(Path(sys.argv[1]) if len(sys.argv) > 1 else FOLDER)
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8"), studies), encoding="utf-8")
    print(f"{PAGE.relative_to(ROOT)}: {', '.join(studies) or 'no tables'}")


if __name__ == "__main__":
    main()
