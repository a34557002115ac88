"""`report.md`: the only place where fractions become percent."""

from jinja2 import Environment, PackageLoader, StrictUndefined

from profiling_agent.records import AccuracyDrop, Lap, Term
from profiling_agent.reporting.report import RunReport


def _percent(fraction: float) -> str:
    return f"{fraction:.2%}"


def _scaled(value: float, units: tuple[str, ...], factor: float) -> str:
    index = 0
    while value >= factor and index < len(units) - 1:
        value, index = value / factor, index + 1
    return f"{value:.4g} {units[index]}".rstrip()


def _count(number: float) -> str:
    return _scaled(number, ("", "K", "M", "G", "T"), 1000)


def _size(num_bytes: float) -> str:
    return _scaled(num_bytes, ("B", "KB", "MB", "GB"), 1000)


def _ms(milliseconds: float) -> str:
    return f"{milliseconds:.3g} ms" if milliseconds < 1000 else f"{milliseconds / 1000:.3g} s"


def _drop(drop: AccuracyDrop) -> str:
    return (
        f"{drop.drop * 100:+.2f} points [{drop.low * 100:+.2f}, {drop.high * 100:+.2f}]"
        f" (McNemar p = {drop.p_value:.2g})"
    )


def _speedup(lap: Lap) -> str:
    inside = " (inside the noise)" if lap.speedup_low <= 1 <= lap.speedup_high and lap.speedup != 1 else ""
    return f"{lap.speedup:.2f} [{lap.speedup_low:.2f}, {lap.speedup_high:.2f}]{inside}"


def _asked(term: Term) -> str:
    return {
        "accuracy": f"lose at most {term.required * 100:.2f} points",
        "speed": f"at least {term.required:.2f} times as fast",
        "size": f"at most {term.required:.0%} of the bytes",
    }[term.name]


def _measured(term: Term) -> str:
    return {
        "accuracy": f"{term.measured * 100:+.2f} points",
        "speed": f"{term.measured:.2f} times",
        "size": _percent(term.measured),
    }[term.name]


def code(text: object) -> str:
    """Return text of a stranger's (a label, a pattern, a plan's words) so that it can't break a line or a table."""
    flat = " ".join(str(text).split())[:500]
    return flat.replace("|", "\\|").replace("`", "'").replace("<", "&lt;")


FILTERS = {
    "percent": _percent,
    "count": _count,
    "size": _size,
    "ms": _ms,
    "drop": _drop,
    "speedup": _speedup,
    "asked": _asked,
    "measured": _measured,
    "code": code,
}


def render_markdown(report: RunReport) -> str:
    """Return the report as Markdown."""
    # Markdown, not HTML: autoescape would mangle it; strangers' text goes through `code`.
    jinja = Environment(
        loader=PackageLoader("profiling_agent.reporting", ""), undefined=StrictUndefined, autoescape=False
    )
    jinja.filters.update(FILTERS)
    return jinja.get_template("report.md.jinja").render(r=report)
