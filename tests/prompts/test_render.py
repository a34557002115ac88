import pytest

from profiling_agent.prompts import render  # pyright: ignore[reportMissingImports] - mapped on install


def test_a_prompt_is_filled_in():
    text = render("input_shape_resolver", config="{'image_size': 32}", rules="processor: 3x32x32")

    assert "{'image_size': 32}" in text
    assert "$" not in text


def test_a_missing_value_is_an_error():
    with pytest.raises(KeyError, match="rules"):
        render("input_shape_resolver", config="x")


def test_a_value_that_the_prompt_never_mentions_is_an_error():
    with pytest.raises(KeyError, match="never mentions"):
        render("input_shape_resolver", config="x", rules="y", extra="z")
