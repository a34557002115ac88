"""What of the paper's text a table contradicts, and how tables are written; each on rows made by hand."""

from typing import Any

import pytest

from benchmarks.paper.numbers import (
    FAMILIES,
    METHOD,
    ONNX,
    OURS,
    RECIPE,
    TABLE_1,
    TABLE_5,
    UNIFORM_CUT,
    Cell,
    Row,
    Study,
    TableName,
    Value,
    contradictions,
    family_of,
    formatted,
)
from benchmarks.paper.tables import markdown


def row(what: str, note: str = "", family: Any = "ViT-B/16", **cells: Any) -> Row:
    """Return a row; a cell is (the paper's, ours, low, high), the last two where there are any."""
    names: dict[str, Any] = {
        "gained": "points gained",
        "params": "% of params saved",
        "bytes": "% of bytes saved",
        "fast": "times as fast",
        "onnx": "times ONNX Runtime",
    }
    made = []
    for name, (paper, here, *bounds) in cells.items():
        low, high = bounds or (None, None)
        made.append(
            Cell(
                quantity=names[name],
                paper=None if paper is None else Value(value=paper),
                here=None if here is None else Value(value=here, low=low, high=high),
            )
        )
    return Row(model="m", family=family, data="d", what=what, cells=tuple(made), note=note)


def said(name: TableName, *rows: Row) -> str:
    return "\n".join(contradictions(name, rows))


def test_a_uniform_cut_that_saves_more_for_less_contradicts_the_better_balance():
    method = row(METHOD, gained=(2, -3.0, -4.0, -2.0), params=(9.9, 8.0))
    better = row("random 10%", gained=(0, -1.0, -1.5, -0.5), params=(6.6, 9.0))
    assert "random 10% saves 9.0% of the params for -1.00 [-1.50, -0.50] points, its method 8.0%" in said(
        "table1", better, method
    )
    # Within the noise, or for fewer params, it is no contradiction.
    noisy = row("random 10%", gained=(0, -1.0, -2.5, 0.5), params=(6.6, 9.0))
    smaller = row("random 10%", gained=(0, -1.0, -1.5, -0.5), params=(6.6, 7.0))
    assert "balance" not in said("table1", noisy, smaller, method)
    assert "balance" not in said("table1", better, row(METHOD, "it died", gained=(2, None)))


def test_a_network_that_does_not_collapse_contradicts_the_collapse():
    collapsed = row("l1 10%", family="ResNet-101", gained=(-17, -30.0, -35.0, -25.0))
    stands = row("l1 10%", family="ResNet-101", gained=(-17, -2.0, -3.0, -1.0))
    assert "(-17.0 points, 5.2.1); on ResNet-101 (m, d) l1 10% gains -2.00 [-3.00, -1.00]" in said("table1", stands)
    assert said("table1", collapsed) == ""
    assert said("table1", row("l1 10%", gained=(-3, -2.0, -3.0, -1.0))) == ""


@pytest.mark.parametrize("name", ["table1", "table2", "table3"])
def test_a_method_that_is_shown_to_lose_more_than_a_point_contradicts_a_table_where_it_does_not(name: TableName):
    assert "gains -2.00 [-2.50, -1.50]" in said(name, row(METHOD, gained=(-0.6, -2.0, -2.5, -1.5)))
    assert said(name, row(METHOD, gained=(-0.6, -2.0, -3.5, -0.5))) == ""
    # Where the paper itself loses as much there is no claim to contradict.
    assert said(name, row(METHOD, gained=(-4.9, -3.0, -3.5, -2.5))) == ""
    assert said(name, row(OURS, gained=(-0.6, -2.0, -2.5, -1.5))) == ""


def test_int8_that_is_slower_or_larger_than_onnx_runtimes_contradicts_the_third_table():
    onnx = row(ONNX, bytes=(74.1, 73.0))
    slower = row(METHOD, bytes=(74.2, 72.0), onnx=(1.66, 0.8, 0.75, 0.85))
    found = said("table3", onnx, slower)
    assert f"1.66 times as fast as ONNX Runtime's (5.4); on ViT-B/16 (m, d) {METHOD} is 0.80 [0.75, 0.85]" in found
    assert f"{METHOD} saves 72.0%, ONNX Runtime's 73.0%" in found
    assert f"{RECIPE} saves 71.0%" in said("table3", onnx, row(RECIPE, bytes=(74.2, 71.0)))
    faster = row(METHOD, bytes=(74.2, 74.0), onnx=(1.66, 1.3, 1.2, 1.4))
    assert said("table3", onnx, faster) == ""
    assert said("table3", row(ONNX, "not installed"), row(METHOD, bytes=(74.2, 72.0))) == ""


def test_int8_that_is_slower_or_saves_little_contradicts_the_fourth_table():
    resnet = row(f"quantization, {METHOD}", family="ResNet-101", fast=(1.01, 0.9, 0.85, 0.95), bytes=(3.4, 5.0))
    found = said("table4", resnet)
    assert f"consistently faster (5.5); on ResNet-101 (m, d) quantization, {METHOD} is 0.90 [0.85, 0.95]" in found
    assert f"{METHOD} saves 5.0%, and its own table has 3.4%" in found
    assert said("table4", row(f"quantization, {METHOD}", fast=(1.7, 1.5, 1.4, 1.6), bytes=(74.3, 74.0))) == ""


def test_a_uniform_cut_that_is_faster_contradicts_the_figure():
    method = row(METHOD, fast=(1.10, 1.02, 1.00, 1.04))
    assert "l1 10% is 1.20 times as fast" in said("figure5", row("l1 10%", fast=(None, 1.2)), method)
    assert said("figure5", row("l1 10%", fast=(None, 1.03)), method) == ""


def test_numbers_are_written_with_what_was_before_and_their_interval():
    assert formatted("top-1, %", Value(value=88.8, before=90)) == "90.00 → 88.80"
    assert formatted("points gained", Value(value=-1.2, low=-2, high=0.4)) == "-1.20 [-2.00, +0.40]"
    assert formatted("params, M", Value(value=0.9012345)) == "0.9012"
    assert formatted("seconds an image", None) == ""


def study(name: TableName, *rows: Row) -> Study:
    return Study(name=name, title="t", rows=rows, contradicted=("no",), differences=("a | b",), missing=())


def test_a_table_has_the_papers_number_next_to_each_quantity_of_which_it_prints_any():
    lines = markdown(study("table2", row(METHOD, gained=(1, 2.0)), row(OURS, "a|b", fast=(None, 2.0)))).splitlines()

    assert lines[:4] == [
        "| model | data | what | points gained | the paper | times as fast | note |",
        "|---|---|---|---|---|---|---|",
        f"| ViT-B/16: m | d | {METHOD} | +2.00 | +1.00 |  |  |",
        "| ViT-B/16: m | d | ours |  |  | 2.00 | a\\|b |",
    ]
    assert lines[4:] == [
        "",
        "Claims of the paper that this contradicts:",
        "",
        "- no",
        "",
        "Differences from the paper:",
        "",
        "- a | b",
    ]


def test_the_figure_has_bars():
    line = markdown(study("figure5", row(METHOD, fast=(1.1, 0.5), gained=(None, -1.0)))).splitlines()[2]
    assert "| █████ 0.50 | ███████████ 1.10 | -1.00 |" in line


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
