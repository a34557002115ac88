"""Numbers in a text of an LLM or a person, in any language, and those of an answer that no source has."""

import math
import re
import unicodedata
from collections.abc import Iterable

NUMBER = re.compile(r"(?<![\w.])[-+]?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?", re.IGNORECASE | re.ASCII)
# A comma that is followed by other than three digits is a decimal point, as in German.
DECIMAL_COMMA = re.compile(r"(?<=\d),(?=\d{1,2}(?!\d|,\d)|\d{4})", re.ASCII)
# A number of a text counts as that of a record in another unit: a percentage or points of a fraction, MB of bytes, minutes of seconds.
SCALES = (1.0, 100.0, 1e-3, 1e-6, 1 / 60)


def numbers_in(text: str) -> list[tuple[float, int]]:
    """Return each number of a text, and how many digits follow its point."""
    plain = DECIMAL_COMMA.sub(".", unicodedata.normalize("NFKC", text))
    found = [match.group().replace(",", "") for match in NUMBER.finditer(plain)]
    return [(float(number), len(re.split(r"[eE]", number)[0].partition(".")[2])) for number in found]


def unsupported_numbers(answer: str, sources: Iterable[str]) -> list[str]:
    """Return the numbers of an answer that no source has, rounded as the answer rounds, whatever their sign or unit.

    Whole numbers up to ten count as words, because answers number and count things.
    """
    known = sorted({abs(number) * scale for text in sources for number, _ in numbers_in(text) for scale in SCALES})
    # What is left of a share is a fact as well: 31% of the bytes are 69% less.
    known += [abs(whole - number) for number in known for whole in (1.0, 100.0) if number <= whole]
    missing: list[str] = []
    for number, digits in numbers_in(answer):
        value, tolerance = abs(number), 0.5 * 10.0**-digits
        is_word = digits == 0 and value <= 10
        if not is_word and not any(
            math.isclose(value, fact, rel_tol=1e-9, abs_tol=tolerance * 1.001) for fact in known
        ):
            missing.append(f"{number:.{digits}f}")
    return missing
