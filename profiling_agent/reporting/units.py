"""Number formats for reports and tables, the only place where fractions become percent."""

import math
from collections.abc import Callable
from pathlib import Path

from profiling_agent.data import is_local
from profiling_agent.schemas import AccuracyDrop, RaceResult, Term


def _scaled(value: float, units: tuple[str, ...]) -> str:
    power = min(int(math.log10(max(value, 1)) // 3), len(units) - 1)
    return f"{value / 1000**power:.4g} {units[power]}".rstrip()


def percent(fraction: float) -> str:
    """Return a fraction as percent."""
    return f"{fraction:.2%}"


def points(fraction: float) -> str:
    """Return a difference of accuracies in points."""
    return f"{fraction * 100:.2f} points"


def count(number: float) -> str:
    """Return a number of parameters or MACs."""
    return _scaled(number, ("", "K", "M", "G", "T"))


def size(num_bytes: float) -> str:
    """Return a number of bytes."""
    return _scaled(num_bytes, ("B", "KB", "MB", "GB"))


def ms(milliseconds: float) -> str:
    """Return a time."""
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"


def drop(drop: AccuracyDrop) -> str:
    """Return an accuracy drop in points, with its 95% interval and test."""
    return (
        f"{drop.drop * 100:+.2f} points [{drop.low * 100:+.2f}, {drop.high * 100:+.2f}]"
        f" ({'McNemar' if drop.num_looks == 1 else 'sequential'} p = {drop.p_value:.2g})"
    )


def speedup(race_result: RaceResult) -> str:
    """Return a speedup with its 95% interval, marked if it is inside the noise."""
    is_noise = race_result.speedup_low <= 1 <= race_result.speedup_high and race_result.speedup != 1
    interval = f"{race_result.speedup:.2f} [{race_result.speedup_low:.2f}, {race_result.speedup_high:.2f}]"
    return f"{interval} (inside the noise)" if is_noise else interval


def format_requirement(term: Term) -> str:
    """Return what the contract requires of a term."""
    return {
        "accuracy": f"lose at most {term.required * 100:.2f} points",
        "speed": f"at least {term.required:.2f} times as fast",
        "size": f"at most {term.required:.0%} of the bytes",
    }[term.name]


def format_measurement(term: Term) -> str:
    """Return a term's measured value, and its certain bound if that is another number."""
    if term.bound is None or term.bound == term.measured:
        return _text(term, term.measured)
    return f"{_text(term, term.measured)}, at {'least' if term.name == 'speed' else 'most'} {_text(term, term.bound)}"


def _text(term: Term, value: float) -> str:
    if term.name == "accuracy":
        return f"{value * 100:+.2f} points"
    return f"{value:.2f} times" if term.name == "speed" else percent(value)


def sessions(race_result: RaceResult) -> str:
    """Return the speed-up of each session."""
    return ", ".join(f"{speedup:.2f}" for speedup in race_result.by_session)


def origin(name: str) -> str:
    """Return a model's or a data set's id on the Hub, or the last name of its folder."""
    return Path(name).name if is_local(name) else name


# Filters of the report's templates, by the names that they use.
_FILTERS = (count, size, ms, percent, points, drop, speedup, sessions, origin, format_requirement, format_measurement)
FORMATS: dict[str, Callable[..., str]] = {format_.__name__: format_ for format_ in _FILTERS}
