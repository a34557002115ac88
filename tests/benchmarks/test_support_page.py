"""docs/support.md is what its script makes of its results."""

import json

from support import PAGE, RESULTS, page


def test_the_page_is_that_of_the_results():
    assert PAGE.read_text(encoding="utf-8") == page(json.loads(RESULTS.read_text(encoding="utf-8")))


def test_a_refusal_is_a_note_that_is_written_once():
    refused = {"form": "whole", "runtime": "openvino", "scheme": "static", "distance": 0.0, "refused": "code: why"}
    well = refused | {"form": "pruned", "refused": "", "distance": 0.25}
    rows = [
        {"family": name, "units": {"mlp": 2}, "refused": {"stem": 1}, "deployable": [refused, well]} for name in "ab"
    ]

    lines = page({"rows": rows}).splitlines()

    assert next(line for line in lines if "openvino" in line).endswith("| openvino int8 static |")
    assert [line for line in lines if line.startswith(("| a |", "| b |"))] == [
        "| a | 2 MLP | no (1) / 0.2 |",
        "| b | 2 MLP | no (1) / 0.2 |",
        "| a | 1 stem |",
        "| b | 1 stem |",
    ]
    assert sum("code: why" in line for line in lines) == 1
