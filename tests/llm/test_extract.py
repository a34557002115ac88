import pytest

from profiling_agent.llm.extract import NoJsonError, extract_object


@pytest.mark.parametrize(
    "text",
    [
        '{"a": 1}',
        'Here it is:\n```json\n{"a": 1}\n```\nHope that helps! {smile}',
        '<think>{"a": 2, "more": "of it"}</think>{"a": 1}',
        'the opening tag was cut off {"a": 3}</think>\n{"a": 1}',
        '{"b"} is wrong, {"a": 1} is right',
        '{}{"a": 1}',
    ],
)
def test_the_object_is_found_in_whatever_surrounds_it(text: str):
    assert extract_object(text) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("no braces here", "holds no JSON object"),
        ('{"a": [1, 2', "no valid JSON"),
        ('{"a": NaN}', "NaN is no number"),
        ('{"a": -Infinity}', "Infinity is no number"),
        ('<think>{"a": 1}', "holds no JSON object"),
        ("[1, 2]", "holds no JSON object"),
        ('{"a": ' * 3000 + "1" + "}" * 3000, "nested too deeply"),
        ("x" * 200_001, "longer than"),
        ('{"a": ' + "9" * 5000 + "}", "no valid JSON"),
    ],
)
def test_what_is_no_json_object_is_said_in_words_for_the_model(text: str, said: str):
    with pytest.raises(NoJsonError, match=said):
        extract_object(text)
