"""Notations for the numbers and names of a contract: 1%, 1pt, 50%, 2x, int8, fp16."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

QUANTITY = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?)\s*([a-z%]*)", re.ASCII)
# Each unit with its divisor.
PERCENT = {"": 1, "%": 100}
POINTS = PERCENT | dict.fromkeys(("pt", "pts", "pp", "point", "points"), 100)
TIMES = {"": 1, "x": 1}
DTYPE_SYNONYMS = {"int8": "qint8", "fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32"}


def _limit(bounded: Any, units: Mapping[str, int], advice: str) -> BeforeValidator:
    """Return a validator of a `bounded` number, or of text with one of `units`; its error is `advice`."""
    bounds = TypeAdapter[float](bounded)

    def read(value: object) -> float:
        number = value
        if isinstance(value, str) and (parts := QUANTITY.fullmatch(value.strip().lower())) and parts[2] in units:
            number = float(parts[1]) / units[parts[2]]
        try:
            return bounds.validate_python(number, strict=True)
        except ValidationError:
            raise ValueError(advice) from None

    return BeforeValidator(read, json_schema_input_type=bounded | str)


DropLimit = Annotated[
    float,
    _limit(
        Annotated[float, Field(ge=0, lt=1)],
        POINTS,
        "give a fraction from 0 to below 1, such as 0.01, which is also written 1% or 1pt",
    ),
]
RatioLimit = Annotated[
    float,
    _limit(
        Annotated[float, Field(gt=0, le=2)],
        PERCENT,
        "give a fraction of the baseline's, above 0 and at most 2: 0.5 is half, which is also written 50%",
    ),
]
SpeedupLimit = Annotated[
    float,
    _limit(
        Annotated[float, Field(ge=1, le=1000)],
        TIMES,
        "give how many times as fast as the baseline, from 1 to 1000, such as 1.5, which is also written 1.5x",
    ),
]


def canonical(synonyms: Mapping[str, str]) -> BeforeValidator:
    """Return a validator that replaces each name of a comma-separated list by its canonical one."""

    def read(value: object) -> object:
        if not isinstance(value, str):
            return value
        names = (name.strip() for name in value.split(","))
        return ",".join(synonyms.get(name.lower(), name) for name in names)

    return BeforeValidator(read)
