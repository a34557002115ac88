import json
import re

import pytest
from pydantic import ValidationError

from profiling_agent.errors import RequestError
from profiling_agent.request import Request
from profiling_agent.schemas import Plan, QuantizationRecommendation
from profiling_agent.search.attempt import read_answer


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        *(
            ({"max_accuracy_drop": value}, "from 0 to below 1, such as 0.01 or 1%")
            for value in (-0.1, float("nan"), 1, "100%", "-1%", "1%%", "1x", "", "0,5%", True, [0.1])
        ),
        *(
            ({"min_speedup": value}, "from 1 to 1000, such as 1.5 or 1.5x")
            for value in (0.5, "0.5x", "50%", "twice", 1001)
        ),
        *(
            ({"max_size_ratio": value}, "above 0, up to 2: 0.5 is half, or 50%")
            for value in (0, 50, "50", "201%", "1pt", "half", float("inf"))
        ),
        *(({"llm_tokens": number}, "than or equal to") for number in (10**9 + 1, -1)),
        ({"run_id": "../elsewhere"}, "run_id\n  String should match pattern"),
        ({"device": "tpu"}, "'auto', 'cpu' or 'cuda'"),
        ({"max_acuracy_drop": 0.2}, "unknown term 'max_acuracy_drop': did you mean 'max_accuracy_drop'?"),
        ({"runtime": "eager"}, "unknown term 'runtime': did you mean 'runtimes'?"),
        ({"zzz": 1}, "unknown term 'zzz': `profiling-agent run --help` lists all terms"),
        ({"quantize_dtype": "int4"}, "'auto', 'qint8', 'float8', 'float16', 'bfloat16' or 'none'"),
        ({"seed": 1.5}, "valid integer"),
        ({"revision": "main"}, "reference models have no revision"),
        ({"dataset_config": "full_size"}, "has no configuration"),
        ({"runtimes": "eager,tensorrt"}, "runtimes names 'tensorrt'"),
        ({"fresh_ledger": "two\nlines"}, "a reason of one printable line"),
        ({"fresh_ledger": " "}, "a reason of one printable line"),
        ({"quantize_dtype": "none", "quantize_layers": "fc1"}, "quantize_dtype is 'none'"),
        *(({"time_budget": text}, "is no duration") for text in ("", "soon", "30", "-5m", "1.5h", "\uff13m")),
        *(({"time_budget": text}, "a minute at least, and 30 days at most") for text in ("59s", "9999h")),
    ],
)
def test_what_can_not_be_carried_out_is_refused_and_named(asked: dict[str, object], says: str):
    with pytest.raises(ValidationError, match=re.escape(says)):
        Request.model_validate(asked)


@pytest.mark.parametrize(
    ("name", "written", "value"),
    [
        *(("max_accuracy_drop", written, 0.01) for written in (0.01, "0.01", "1%", "1pt", " 1 % ", "1 point", "1e-2")),
        *(("max_accuracy_drop", written, 0.005) for written in ("0.5pt", ".5%", "0.50 points")),
        ("max_accuracy_drop", 0, 0.0),
        *(("max_size_ratio", written, 0.5) for written in (0.5, "0.5", "50%", "50.0 %")),
        ("max_size_ratio", 2, 2.0),
        *(("min_speedup", written, 2.0) for written in (2, "2", "2x", "2 X", "2.0x")),
        ("quantize_dtype", "int8", "qint8"),
        ("quantize_dtype", "FP16", "float16"),
        ("quantize_dtype", "bf16", "bfloat16"),
        ("quantize_dtype", "fp32", "none"),
        ("runtimes", "onnx", "onnxruntime"),
        ("runtimes", "ort, torch", "onnxruntime,eager"),
        ("runtimes", "auto", "auto"),
        ("device", "gpu", "cuda"),
        ("objective", "latency", "speed"),
    ],
)
def test_other_notations_of_a_value_are_stored_as_its_canonical_one(name: str, written: object, value: object):
    request = Request.model_validate({name: written})

    assert getattr(request, name) == value
    assert Request.model_validate_json(request.model_dump_json()) == request
    assert getattr(Request.model_validate_json(json.dumps({name: written})), name) == value


def test_an_edit_and_a_plan_are_read_in_the_same_notations():
    answer = read_answer(
        {"decision": "edit", "max_accuracy_drop": "0.5pt", "max_size_ratio": "25%", "min_speedup": "2x"}
    )
    plan = Plan.model_validate({"quantization": [{"layer": "all", "dtype": "int8"}]})

    assert (answer.max_accuracy_drop, answer.max_size_ratio, answer.min_speedup) == (0.005, 0.25, 2.0)
    assert plan.quantization == (QuantizationRecommendation(layer="all", dtype="qint8"),)
    with pytest.raises(RequestError, match=r"0\.5 is half"):
        read_answer({"decision": "edit", "max_size_ratio": 25})


def test_a_time_budget_is_hours_minutes_and_seconds_and_runtimes_come_in_our_order():
    texts = ("90s", "20m", "1h30m", "1h 5min 3s", " 2m ")

    assert [Request(time_budget=text).time_budget_s for text in texts] == [90.0, 1200.0, 5400.0, 3903.0, 120.0]
    assert Request().time_budget_s is None
    assert Request(runtimes="auto").runtime_names == ("eager", "graphed", "inductor", "onnxruntime", "openvino")
    assert Request(runtimes="openvino, eager").runtime_names == ("eager", "openvino")
