import json
from pathlib import Path

import pytest
import re2
from sample_records import GOAL, profile

from profiling_agent.errors import PlanError
from profiling_agent.planning.allocation import dry_run
from profiling_agent.planning.digest import group_units, pattern_for
from profiling_agent.planning.rules import MIN_PARAMS_SAVED, analyse, parse_plan, read_plan
from profiling_agent.schemas import Plan


def test_repeated_units_are_one_group_whose_shares_add_up():
    (group,) = group_units(profile(num_layers=2, width=512))

    # Two layers of fc1 and fc2 with 5 x 512 params each, beside a norm of 64; the norm does no MACs.
    assert len(group.units) == 2
    assert group.params_share == pytest.approx(10240 / 10304)
    assert group.macs_share == 1.0
    assert group.latency_share == pytest.approx(8 / 9)


def test_a_groups_pattern_hits_its_members_and_nothing_else():
    pattern = pattern_for(["a.0.b.1.c", "a.2.b.1.c"])

    assert re2.search(pattern, "a.2.b.1.c")
    assert not re2.search(pattern, "a.1.b.1.c")
    assert not re2.search(pattern, "a.2.b.10.c")


def test_the_first_plan_saves_enough_to_be_worth_an_evaluation_and_cites_the_profile():
    measured = profile()

    plan = analyse(measured, GOAL)

    assert dry_run(plan, measured).params <= measured.params * (1 - MIN_PARAMS_SAVED)
    assert "99.4% of the params" in plan.pruning[0].justification
    assert plan.quantization is None


def test_a_model_without_units_gets_a_plan_that_prunes_nothing():
    assert analyse(profile().model_copy(update={"units": ()}), GOAL).pruning == ()


# The paper's Figure 4 to the letter: no braces around, no comma between, one recommendation each that is no array, a line that goes on.
FIGURE_4 = r"""
"pruning_recommendations":
  {"layer": "encoder\\.stages\\d+\\.layer\\.\\.\\d+\\.convolution",
   "pruning_type": "structured",
   "pruning_ratio": 0.2,
   "justification": "Reduces Conv2d parameters and MACs, improving latency"}
"quantization_recommendations":
  {"layer": "all",
   "quantization_type": "dynamic",
   "dtype": "qint8",
   "justification": "qint8 quantization of linear layers improves CPU
   ↪ inference"}
"""


def test_the_papers_figure_is_read_as_it_is_printed(tmp_path: Path):
    prune = {
        "layer": r"encoder\.stages\d+\.layer\.\.\d+\.convolution",
        "pruning_type": "structured",
        "pruning_ratio": 0.2,
        "justification": "Reduces Conv2d parameters and MACs, improving latency",
    }
    quantize = {
        "layer": "all",
        "quantization_type": "dynamic",
        "dtype": "qint8",
        "justification": "qint8 quantization of linear layers improves CPU inference",
    }
    in_arrays = json.dumps({"pruning_recommendations": [prune], "quantization_recommendations": [quantize]})
    expected = Plan.model_validate({"pruning": [prune], "quantization": [quantize]})

    path = tmp_path / "plan.json"
    for text in (FIGURE_4, in_arrays):
        path.write_text(text, encoding="utf-8")
        assert read_plan(str(path)) == expected
    assert parse_plan(FIGURE_4.encode()) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
        # What only looks like the figure.
        ('"pruning": {', "no valid plan"),
        ('"a": {}\n"a": {}', "no valid plan"),
        ('"pruning_recommendations": {}}', "no valid plan"),
        ('"pruning_recommendations": {}\n"pruning_recommendations": {}', "no valid plan"),
        ("{", "no valid plan"),
        ("[]", "no valid plan"),
        ('{"pruning": [{"layer": "x", "pruning_type": "structured", "pruning_ratio": 1}]}', "less than 1"),
        ('{"pruning": [{"layer": "x", "pruning_type": "structured", "pruning_ratio": NaN}]}', "no valid plan"),
        ('{"pruning": [{"layer": "x", "pruning_type": "magic", "pruning_ratio": 0.1}]}', "'structured' or 'head'"),
        ('{"pruning": [{"layer": "x", "pruning_type": "head", "pruning_ratio": "0.1"}]}', "valid number"),
        ('{"prune": []}', "Extra inputs"),
        ("\x00\xff", "no valid plan"),
    ],
)
def test_a_plan_file_that_is_none_is_refused_in_one_line(tmp_path: Path, text: str, says: str):
    path = tmp_path / "plan.json"
    path.write_text(text)

    with pytest.raises(PlanError, match=says) as refused:
        read_plan(str(path))

    assert "\n" not in str(refused.value)


def test_a_plan_file_that_is_not_there_is_named():
    with pytest.raises(PlanError, match=r"'nowhere\.json' can't be read"):
        read_plan("nowhere.json")


@pytest.mark.parametrize("layer", ["(?P<x>a)(?P=x)", "((a{1000}){1000}){1000}", "("])
@pytest.mark.parametrize(
    ("part", "rest"),
    [
        ("pruning", {"pruning_type": "structured", "pruning_ratio": 0.2}),
        ("quantization", {"quantization_type": "dynamic", "dtype": "qint8"}),
    ],
)
def test_a_pattern_that_is_none_is_refused_before_anything_is_measured(
    tmp_path: Path, layer: str, part: str, rest: dict[str, object]
):
    (tmp_path / "plan.json").write_text(json.dumps({part: [{"layer": layer, **rest}]}))

    with pytest.raises(PlanError, match="no RE2 expression"):
        read_plan(str(tmp_path / "plan.json"))
