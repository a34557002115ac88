"""Model card rows: what the returned model's card says of its measurements."""

from collections.abc import Callable

from profiling_agent.acquisition.hub import is_local
from profiling_agent.artifacts.card import CardRow, Judged
from profiling_agent.reporting.report import RunReport, Summary
from profiling_agent.reporting.units import count, drop, ms, percent, size, speedup


def card_rows(report: RunReport) -> tuple[CardRow, ...]:
    """Return before and after, as the report has them."""
    shown: tuple[tuple[str, Callable[[Summary], str]], ...] = (
        (f"top-1 on {report.best.num_images:,} held-out images", lambda s: percent(s.top1)),
        (f"latency of a batch of {report.request.batch_size}", lambda s: ms(s.latency_ms)),
        ("params", lambda s: count(s.params)),
        ("MACs of one image", lambda s: count(s.macs)),
        ("on disk", lambda s: size(s.size_bytes)),
        ("peak memory of a process", lambda s: size(s.peak_memory_bytes)),
    )
    return tuple(CardRow(name=name, before=text(report.baseline), after=text(report.best)) for name, text in shown)


def card_notes(report: RunReport) -> tuple[str, ...]:
    """Return the intervals, and where they were measured."""
    race_result = report.race_result
    here = report.environment
    notes = [f"{report.verdict.outcome}: {report.verdict.explanation}."]
    if report.heldout.drop:
        notes.append(f"Top-1 lost: {drop(report.heldout.drop)}.")
    if race_result:
        there = f"{len(race_result.turns)} sessions on one machine"
        notes.append(f"Times as fast as the baseline in eager float32, in {there}: {speedup(race_result)}.")
    notes.append(f"Measured on {here.machine}, {here.system}, device {report.acquired.source.device}.")
    return tuple(notes)


def card_judged(report: RunReport) -> Judged | None:
    """Return what the Hub is told of the held-out images; None where the data set isn't on it."""
    request = report.request
    if is_local(request.dataset) or "/" not in request.dataset:
        return None
    split = report.acquired.heldout.source_split
    return Judged(dataset=request.dataset, config=request.dataset_config, split=split, top1=report.best.top1)
