"""What cuts save together, counted exactly."""

from collections.abc import Iterable, Sequence

from profiling_agent.pruning.crossings import crossings
from profiling_agent.records import Cut, Evidence, LayerProfile


def params_and_macs_saved(cuts: Sequence[Cut], layers: Iterable[LayerProfile]) -> tuple[int, int]:
    """Return the params and the MACs of one image that `cuts` remove from a model of `layers`."""
    shared_params, shared_macs = _counted_twice(cuts, layers)
    params = sum(cut.params_saved for cut in cuts) - shared_params
    return params, sum(cut.macs_saved for cut in cuts) - shared_macs


def _counted_twice(cuts: Sequence[Cut], layers: Iterable[LayerProfile]) -> tuple[int, int]:
    """Return the params and MACs where the columns of one cut cross the rows of the next: each removed them once.

    A layer's MACs are proportional to its params, so the share of one crossing is that of its weights.
    """
    rows = {row.name: row for row in layers}
    params = macs = 0
    for crossing in crossings(cuts):
        layer = rows[crossing.layer]
        # Kernel height times width: a bias is smaller than the product of the widths, and falls out.
        counted_twice = layer.params // crossing.whole * crossing.gone
        params += counted_twice
        macs += layer.macs * counted_twice // layer.params
    return params, macs


def latency_saved_ms(cuts: Sequence[Cut], evidence: Evidence) -> float:
    """Return the milliseconds of one batch that `cuts` save by the latency table; 0 where it has no times."""
    saved = 0.0
    for cut in cuts:
        row = evidence.of(cut.unit.name)
        saved += next((o.latency_saved_ms or 0.0 for o in (row.options if row else ()) if o.keep == cut.keep), 0.0)
    return saved


def predicted_kl(cuts: Sequence[Cut], evidence: Evidence) -> float | None:
    """Return the sum of the KL divergences of `cuts`, each alone, in nats; None where one has no evidence."""
    total = 0.0
    for cut in cuts:
        row = evidence.of(cut.unit.name)
        found = [option.kl for option in (row.options if row else ()) if option.keep == cut.keep]
        if not found:
            return None
        total += found[0]
    return total
