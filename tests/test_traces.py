"""Every number that README.md and docs/benchmarks.md print as measured stands in the file that they name for it."""

import json
from pathlib import Path

import pytest
from traces import RESULTS, ROOT, claims, is_found

PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_number_of_the_page_stands_in_the_file_that_it_names(page: Path):
    assert [(claim.printed, claim.sources) for claim in claims(page) if not is_found(claim)] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_of_results_that_the_page_names_is_there_and_names_its_processor(page: Path):
    names = {name for claim in claims(page) for name in claim.sources if name.endswith(".json")}

    assert names
    assert all(sorted(RESULTS.glob(name.split("results/")[-1])) for name in names), names
    for file in RESULTS.glob("*.json"):
        if file.name != "prompt_examples.json":
            assert json.loads(file.read_text(encoding="utf-8"))["environment"]["processor"], file.name
