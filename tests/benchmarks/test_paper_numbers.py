"""How tables are written, on rows made by hand, and what the paper's own numbers say of each other."""

from typing import Any

import pytest

from benchmarks.paper.numbers import (
    FAMILIES,
    METHOD,
    OURS,
    TABLE_1,
    TABLE_5,
    UNIFORM_CUT,
    Cell,
    Row,
    Study,
    Value,
    family_of,
    formatted,
)
from benchmarks.paper.tables import markdown


def row(what: str, note: str = "", **cells: tuple[float | None, float]) -> Row:
    """Return a row; a cell is what the paper prints, where it does, and what was measured."""
    names = {"gained": "points gained", "fast": "times as fast"}
    made = tuple(
        Cell(quantity=names[name], paper=None if paper is None else Value(value=paper), here=Value(value=here))
        for name, (paper, here) in cells.items()
    )
    return Row(model="m", family="ViT-B/16", data="d", what=what, cells=made, note=note)


def test_numbers_are_written_with_what_was_before_and_their_interval():
    assert formatted("top-1, %", Value(value=88.8, before=90)) == "90.00 → 88.80"
    assert formatted("points gained", Value(value=-1.2, low=-2, high=0.4)) == "-1.20 [-2.00, +0.40]"
    assert formatted("params, M", Value(value=0.9012345)) == "0.9012"
    assert formatted("seconds an image", None) == ""


def test_a_table_has_the_papers_number_next_to_each_quantity_of_which_it_prints_any():
    rows = row(METHOD, gained=(1, 2.0)), row(OURS, "a|b", fast=(None, 2.0))
    lines = markdown(Study(name="table2", title="t", rows=rows, differences=("a | b",), missing=())).splitlines()

    assert lines[:4] == [
        "| model | data | what | points gained | the paper | times as fast | note |",
        "|---|---|---|---|---|---|---|",
        f"| ViT-B/16: m | d | {METHOD} | +2.00 | +1.00 |  |  |",
        "| ViT-B/16: m | d | ours |  |  | 2.00 | a\\|b |",
    ]
    assert lines[4:] == ["", "Differences from the paper:", "", "- a | b"]


@pytest.mark.parametrize(
    ("model", "architecture", "family"),
    [
        ("google/vit-base-patch16-224", "ViTForImageClassification", "ViT-B/16"),
        ("facebook/deit-base-patch16-224", "ViTForImageClassification", "DeiT-B/16"),
        ("mine", "DeiTForImageClassification", "DeiT-B/16"),
        ("microsoft/swin-base-patch4-window7-224", "SwinForImageClassification", "Swin-B"),
        ("/models/deit/resnet-or-vit", "ResNetForImageClassification", "ResNet-101"),
        ("reference:deit", "reference:deit", "DeiT-B/16"),
        ("apple/mobilevit-small", "MobileViTForImageClassification", None),
        ("nothing", "", None),
    ],
)
def test_the_architecture_decides_which_of_the_papers_models_one_stands_for(
    model: str, architecture: str, family: str | None
):
    assert family_of(model, architecture) == family


def test_the_papers_first_and_fifth_table_agree():
    for family in FAMILIES:
        gained, left = TABLE_1[family]
        assert TABLE_5[family]["GPT-4o"] == (gained, pytest.approx(left, abs=0.06))


@pytest.mark.parametrize("family", ["ViT-B/16", "DeiT-B/16"])
def test_the_uniform_cut_of_a_vit_comes_to_the_params_of_the_papers_first_table(family: Any):
    """Twelve layers lose floor(ratio * 3072) channels, each a row and a column of 768 and a bias."""
    _, ratio = UNIFORM_CUT[family]
    left = 86.567656 - 12 * int(ratio * 3072) * (768 + 768 + 1) / 1e6

    assert left == pytest.approx(TABLE_1[family][1], abs=0.06)
