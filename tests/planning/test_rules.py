import json
from pathlib import Path

import pytest
import re2
from sample_records import GOAL, profile

from profiling_agent.errors import PlanError
from profiling_agent.planning.allocation import dry_run
from profiling_agent.planning.digest import pattern_for
from profiling_agent.planning.rules import MIN_PARAMS_SAVED, analyse, parse_plan, read_plan
from profiling_agent.schemas import Plan


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


def test_a_plan_in_the_papers_format_is_read(tmp_path: Path):
    prune = {"layer": r"layer\.\d+\.convolution", "pruning_type": "structured", "pruning_ratio": 0.2}
    quantize = {"layer": "all", "quantization_type": "dynamic", "dtype": "qint8"}
    expected = Plan.model_validate({"pruning": [prune], "quantization": [quantize]})

    path = tmp_path / "plan.json"
    # The paper prints a lone recommendation without an array.
    for wrap in (lambda one: one, lambda one: [one]):
        text = json.dumps({"pruning_recommendations": wrap(prune), "quantization_recommendations": wrap(quantize)})
        path.write_text(text, encoding="utf-8")
        assert read_plan(str(path)) == expected
        assert parse_plan(text.encode()) == expected


@pytest.mark.parametrize(
    ("text", "says"),
    [
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
