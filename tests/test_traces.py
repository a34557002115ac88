"""Every number that README.md and docs/benchmarks.md print as measured stands in the file that they name for it."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from traces import RESULTS, ROOT, Claim, claims, is_found, unfounded

PAGES = [ROOT / "README.md", ROOT / "docs" / "benchmarks.md"]


def moved(claim: Claim, steps: int) -> Claim:
    """Return a claim whose first number is some steps of its last digit off."""
    first, *others = claim.values
    digits = len(first.partition(".")[2])
    other = f"{float(first.replace(',', '')) + steps * 10**-digits:.{digits}f}"
    return replace(claim, values=(other, *others), printed=claim.printed.replace(first, other, 1))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_number_of_the_page_stands_in_the_file_that_it_names(page: Path):
    assert [(claim.printed, claim.sources) for claim in unfounded([page])] == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_file_of_results_that_the_page_names_is_there_and_names_its_processor(page: Path):
    names = {name for claim in claims(page) for name in claim.sources if name.endswith(".json")}

    assert names
    assert all(sorted(RESULTS.glob(name.split("results/")[-1])) for name in names), names
    for file in RESULTS.glob("*.json"):
        if file.name != "prompt_examples.json":
            assert json.loads(file.read_text(encoding="utf-8"))["environment"]["processor"], file.name


def test_a_number_whose_last_digit_is_another_is_found_nowhere():
    told = [claim for page in PAGES for claim in claims(page)]
    intervals = [claim for claim in told if len(claim.values) == 3]

    assert len(intervals) > 150
    assert [claim.printed for claim in intervals for steps in (-3, -1, 1, 3) if is_found(moved(claim, steps))] == []
