"""Numbers in a text of an LLM or a person, in any language, and those of an answer that no source has."""

import math
import re
import unicodedata
from collections.abc import Iterable

NUMBER = re.compile(r"(?<![\w.])\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE | re.ASCII)
# A comma that is followed by other than three digits is a decimal point, as in German.
DECIMAL_COMMA = re.compile(r"(?<=\d),(?=\d{1,2}(?!\d|,\d)|\d{4})", re.ASCII)
# A number of a text counts as that of a record in another unit: a percentage or points of a fraction, MB of bytes, minutes of seconds.
SCALES = (1.0, 100.0, 1e-3, 1e-6, 1 / 60)


def numbers_in(text: str) -> list[tuple[str, float, float]]:
    """Return each number of a text without its sign: as written, its value, and the unit of its last digit."""
    plain = DECIMAL_COMMA.sub(".", unicodedata.normalize("NFKC", text))
    numbers: list[tuple[str, float, float]] = []
    for match in NUMBER.finditer(plain):
        digits = match.group().replace(",", "")
        mantissa, _, exponent = digits.lower().partition("e")
        numbers.append((digits, float(digits), 10.0 ** (int(exponent or 0) - len(mantissa.partition(".")[2]))))
    return numbers


def unsupported_numbers(answer: str, sources: Iterable[str]) -> list[str]:
    """Return the numbers of an answer that no source has, rounded as the answer rounds, whatever their sign or unit.

    Whole numbers up to ten count as words, because answers number and count things.
    """
    known = sorted({value * scale for text in sources for _, value, _ in numbers_in(text) for scale in SCALES})
    # What is left of a share is a fact as well: 31% of the bytes are 69% less.
    known += [abs(whole - number) for number in known for whole in (1.0, 100.0) if number <= whole]
    return [
        number
        for number, value, unit in numbers_in(answer)
        if not (unit == 1 and value <= 10)
        and not any(math.isclose(value, fact, rel_tol=1e-9, abs_tol=0.5005 * unit) for fact in known)
    ]
