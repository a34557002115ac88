import json
import warnings

import pytest
from pydantic import ValidationError

from profiling_agent.request import Request


def test_every_field_has_a_default_and_a_description():
    assert Request().model == "reference:vit"
    assert all(field.description for field in Request.model_fields.values())


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"max_accuracy_drop": -0.1}, "greater than or equal to 0"),
        ({"max_accuracy_drop": float("nan")}, "finite"),
        ({"min_speedup": 0.5}, "greater than or equal to 1"),
        ({"max_size_ratio": 0}, "greater than 0"),
        ({"max_iterations": 0}, "greater than or equal to 1"),
        ({"recover_epochs": -1}, "greater than or equal to 0"),
        ({"recover_epochs": 101}, "less than or equal to 100"),
        ({"run_id": "../elsewhere"}, "is no run id"),
        ({"device": "tpu"}, "'auto', 'cpu' or 'cuda'"),
        ({"unknown": 1}, "Extra inputs"),
        ({"max_iterations": "5"}, "valid integer"),
        ({"seed": 1.5}, "valid integer"),
        ({"revision": "main"}, "reference models have no revision"),
        ({"dataset_config": "full_size"}, "has no configuration"),
        ({"runtimes": "eager,tensorrt"}, "runtimes names 'tensorrt'"),
        ({"max_memory_ratio": 0}, "greater than 0"),
        ({"objective": "beauty"}, "'speed', 'size' or 'memory'"),
        ({"quantize_dtype": "none", "quantize_layers": "fc1"}, "quantize_dtype is 'none'"),
        ({"label_column": "\udcff"}, "label_column holds bytes that are no UTF-8"),
        ({"num_sessions": 1}, "greater than or equal to 2"),
        ({"max_size_ratio": 101.0}, "less than or equal to 100"),
        *(
            ({"time_budget": text}, "is no duration")
            for text in ("", "soon", "30", "-5m", "1.5h", "5 parsecs", "m", "\uff13m")
        ),
        *(
            ({"time_budget": text}, "a minute at least, and 30 days at most")
            for text in ("59s", "0m", "9999h", "0h0m0s")
        ),
    ],
)
def test_what_can_not_be_carried_out_is_refused_and_named(asked: dict[str, object], says: str):
    with pytest.raises(ValidationError, match=says):
        Request.model_validate(asked)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        (None, None),
        ("90s", 90.0),
        ("20m", 1200.0),
        ("1h", 3600.0),
        ("1h30m", 5400.0),
        ("1h 5min 3s", 3903.0),
        (" 2m ", 120.0),
    ],
)
def test_a_time_budget_is_hours_minutes_and_seconds(text: str | None, seconds: float | None):
    assert Request(time_budget=text).time_budget_s == seconds


def test_the_goal_is_the_contract_alone():
    goal = Request(max_accuracy_drop=0.02, min_speedup=1.5, max_size_ratio=0.4).goal

    assert goal.model_dump() == {
        "max_accuracy_drop": 0.02,
        "min_speedup": 1.5,
        "max_size_ratio": 0.4,
        "selection": "contract",
        "calibrate": True,
        "objective": "speed",
        "max_memory_ratio": None,
        "pins": (),
        "caps": (),
    }


@pytest.mark.parametrize(
    ("asked", "names"),
    [
        ("auto", ("eager", "inductor", "onnxruntime", "openvino")),
        ("openvino, eager", ("eager", "openvino")),
        ("onnxruntime", ("onnxruntime",)),
    ],
)
def test_runtimes_are_named_with_commas_between(asked: str, names: tuple[str, ...]):
    assert Request(runtimes=asked).runtime_names == names


@pytest.mark.parametrize("number", [10**30, 10**9 + 1, -1])
def test_a_budget_that_nobody_can_spend_is_refused(number: int):
    with pytest.raises(ValidationError, match=r"Input should be (less|greater) than or equal to"):
        Request(llm_tokens=number)


@pytest.mark.parametrize(
    ("old", "new", "lines"),
    [
        ({"advisor": "openai:m"}, {"llm": "openai:m"}, ["advisor is now llm: write llm=openai:m"]),
        ({"advisor": "rules"}, {"llm": "none"}, ["advisor is now llm: write llm=none"]),
        # A key in the environment is no longer enough, an address is.
        ({"advisor": "auto"}, {"llm": "none"}, ["advisor is now llm: write llm=none"]),
        ({"advisor": "auto", "base_url": "http://h/v1"}, {"llm": "openai"}, ["advisor is now llm: write llm=openai"]),
        (
            {"advisor": "openai:m", "advisor_tokens": 7, "advisor_timeout_s": 9.0, "advisor_requests": 3},
            {"llm": "openai:m", "llm_tokens": 7, "llm_timeout_s": 9.0},
            [
                "advisor is",
                "advisor_tokens is now llm_tokens: write llm_tokens=7",
                "advisor_timeout_s is",
                "advisor_requests has",
            ],
        ),
        ({"advisor": "openai:m", "advisor_requests": 0}, {"llm": "none"}, ["advisor is", "advisor_requests has"]),
    ],
)
def test_the_names_of_version_0_1_are_read_with_a_line_that_says_what_to_write(old: dict, new: dict, lines: list[str]):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        request = Request.model_validate(old)

    assert {name: getattr(request, name) for name in new} == new
    assert len(caught) == len(lines)
    assert all(str(warning.message).startswith(line) for warning, line in zip(caught, lines, strict=True))
    # Records in files are read without a word.
    assert Request.model_validate_json(json.dumps(old)) == request
