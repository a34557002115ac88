"""Notations for the numbers and names of a contract: 1%, 1pt, 50%, 2x, int8, fp16."""

import re
from collections.abc import Mapping
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

QUANTITY = re.compile(r"((?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:e[-+]?[0-9]+)?)\s*([a-z%]*)", re.ASCII)
# Each unit with its divisor.
PERCENT, TIMES = {"": 1, "%": 100}, {"": 1, "x": 1}
POINTS = PERCENT | dict.fromkeys(("pt", "pts", "pp", "point", "points"), 100)
DTYPE_SYNONYMS = {
    "int8": "qint8",
    "fp16": "float16",
    "half": "float16",
    "fp8": "float8",
    "bf16": "bfloat16",
    "fp32": "float32",
}


def _limit(bounds: Any, units: Mapping[str, int], advice: str) -> BeforeValidator:
    """Return a validator of a number within `bounds`, or of text with one of `units`; its error gives the `advice`."""
    bounded = TypeAdapter[float](Annotated[float, bounds])

    def read(value: object) -> float:
        number = value
        if isinstance(value, str) and (parts := QUANTITY.fullmatch(value.strip().lower())) and parts[2] in units:
            number = float(parts[1]) / units[parts[2]]
        try:
            return bounded.validate_python(number, strict=True)
        except ValidationError:
            raise ValueError(f"give {advice}") from None

    return BeforeValidator(read, json_schema_input_type=Annotated[float, bounds] | str)


DropLimit = Annotated[float, _limit(Field(ge=0, lt=1), POINTS, "a fraction from 0 to below 1, such as 0.01 or 1%")]
RatioLimit = Annotated[float, _limit(Field(gt=0, le=2), PERCENT, "a fraction above 0, up to 2: 0.5 is half, or 50%")]
SpeedupLimit = Annotated[float, _limit(Field(ge=1, le=1000), TIMES, "a number from 1 to 1000, such as 1.5 or 1.5x")]


def canonical(value: object, synonyms: Mapping[str, str]) -> object:
    """Return a name, or each of several separated by commas, in its canonical form."""
    if not isinstance(value, str):
        return value
    return ",".join(synonyms.get(name.strip().lower(), name.strip()) for name in value.split(","))
