"""docs/support.md is what its script makes of its results."""

import json
from pathlib import Path

from deployed import all_deployments
from pruning.families import FAMILIES, TIMM_FAMILIES
from support import PAGE, RESULTS, TIMM_RESULTS, joined, page


def test_the_page_is_that_of_the_results():
    assert PAGE.read_text(encoding="utf-8") == page([RESULTS, TIMM_RESULTS])


def test_every_family_was_taken_through_every_deployment():
    rows = joined([RESULTS, TIMM_RESULTS])
    every = {(form, each.runtime, each.scheme) for form in ("whole", "pruned") for each in all_deployments()}
    # Its compiler takes as long for timm's as for all others, and compiles nothing else of them.
    compiled = {(form, runtime, scheme) for form, runtime, scheme in every if (form, runtime) == ("whole", "inductor")}

    assert {row["family"] for row in rows} == set(FAMILIES)
    for row in rows:
        done = {(each["form"], each["runtime"], each["scheme"]) for each in row["deployable"]}
        assert done == (every - compiled if row["family"] in TIMM_FAMILIES else every), row["family"]


def test_a_refusal_is_a_note_that_is_written_once(tmp_path: Path):
    refused = {"form": "whole", "runtime": "openvino", "scheme": "static", "distance": 0.0, "refused": "code: why"}
    well = refused | {"form": "pruned", "refused": "", "distance": 0.25}
    files = [tmp_path / f"{name}.json" for name in "ab"]
    for file in files:
        row = {"family": file.stem, "units": {"mlp": 2}, "refused": {"stem": 1}, "deployable": [refused, well]}
        file.write_text(json.dumps({"rows": [row]}), encoding="utf-8")

    lines = page(files).splitlines()

    assert next(line for line in lines if "openvino" in line).endswith("| openvino int8 static |")
    assert [line for line in lines if line.startswith(("| a |", "| b |"))] == [
        "| a | 2 MLP | no (1) / 0.2 |",
        "| b | 2 MLP | no (1) / 0.2 |",
        "| a | 1 stem |",
        "| b | 1 stem |",
    ]
    assert sum("code: why" in line for line in lines) == 1


def test_what_was_not_tried_is_a_dash(tmp_path: Path):
    told = {"scheme": "static", "distance": 0.25, "refused": ""}
    row = {
        "family": "a",
        "units": {},
        "refused": {},
        "deployable": [
            {"form": "whole", "runtime": "openvino"} | told,
            {"form": "pruned", "runtime": "openvino"} | told,
            {"form": "pruned", "runtime": "inductor"} | told,
        ],
    }
    (tmp_path / "a.json").write_text(json.dumps({"rows": [row]}), encoding="utf-8")

    assert "| a | none | 0.2 / 0.2 | - / 0.2 |" in page([tmp_path / "a.json"])
