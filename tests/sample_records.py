"""Records made by hand, small enough to check in the head."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from scipy import stats

from profiling_agent import schemas
from profiling_agent.pruning.widths import aligned_widths

GOAL = schemas.Goal(max_accuracy_drop=0.01, min_speedup=1.0, max_size_ratio=0.5, selection="contract")
STATS = schemas.LatencyStats(batch_size=4, median_ms=2.0, low_ms=1.9, high_ms=2.1, samples_ms=(1.9, 2.0, 2.1))
MLP = "vit.layers.{}.mlp"
# Of widths 480 to 128 by steps of 32: 0.0001 to 0.2 nats.
DOUBLING = tuple(0.0001 * 2**step for step in range(12))


def ref(name: str, size_bytes: int = 1000) -> schemas.ArtifactRef:
    return schemas.ArtifactRef(path=f"jobs/{name}", sha256=name, size_bytes=size_bytes)


def drop(lost: int, gained: int, num_images: int = 1000) -> schemas.AccuracyDrop:
    difference = (lost - gained) / num_images
    return schemas.AccuracyDrop(
        drop=difference,
        low=difference - 0.01,
        high=difference + 0.01,
        p_value=1.0,
        num_lost=lost,
        num_gained=gained,
        num_images=num_images,
    )


def evaluation(
    name: str,
    variant: schemas.Variant,
    *,
    correct: int = 900,
    against: int | None = 900,
    macs: int = 1000,
    params: int = 1000,
    size_bytes: int = 4000,
) -> schemas.Evaluation:
    return schemas.Evaluation(
        variant=variant,
        model=ref(name, size_bytes=size_bytes),
        footprint=schemas.Footprint(params=params, macs=macs, parameter_bytes=size_bytes, size_bytes=size_bytes),
        predictions=schemas.Predictions(
            split="search", num_images=1000, num_correct=correct, files=(ref(f"{name}/predictions"),)
        ),
        drop=None if against is None else drop(max(against - correct, 0), max(correct - against, 0)),
    )


BASELINE = evaluation("m0", schemas.Variant.BASELINE, against=None)


def race_result(name: str, speedup: float, low: float, high: float) -> schemas.RaceResult:
    """Return times of five sessions whose Student's t interval reaches from `low` to `high`, about the middle of both."""
    centre, reach = math.log(low * high) / 2, math.log(high / low) / 2
    # Of -1, 0, 0, 0, 1 the standard error is sqrt(2 / 20).
    step = reach / (stats.t.ppf(0.975, 4) * math.sqrt(0.1))
    return schemas.RaceResult(
        model=ref(name),
        latency=STATS,
        speedup=speedup,
        speedup_low=low,
        speedup_high=high,
        turns=tuple((math.exp(centre + number * step),) for number in (-1, 0, 0, 0, 1)),
    )


def race(*results: schemas.RaceResult) -> schemas.Race:
    """Return the race of a baseline and these, in five sessions."""
    first = race_result("m0", 1.0, 1.0, 1.0)
    return schemas.Race(results=(first, *results), num_sessions=5)


def plan(ratio: float, layer: str = r"mlp\.fc1") -> schemas.Plan:
    return schemas.Plan(
        pruning=(schemas.PruningRecommendation(layer=layer, pruning_type="structured", pruning_ratio=ratio),),
        quantization=(schemas.QuantizationRecommendation(layer="all", dtype="qint8"),),
    )


def attempt(number: int, ratio: float, *, accepted: bool, **measured) -> schemas.Attempt:
    deployed = evaluation(f"both{number}", schemas.Variant.BOTH, **measured) if measured else None
    return schemas.Attempt(
        number=number, plan=plan(ratio), deployed=deployed, accepted=accepted, reason="made", pruned_model=None
    )


def journal(*attempts: schemas.Attempt, search: schemas.DeploymentSearch | None = None) -> schemas.Journal:
    return schemas.Journal(baseline=BASELINE, deployment_search=search, attempts=attempts)


def with_attempt(journal: schemas.Journal, attempt: schemas.Attempt) -> schemas.Journal:
    return journal.model_copy(update={"attempts": (*journal.attempts, attempt)})


def named_unit(
    name: str, kind: schemas.UnitKind, producers: Sequence[str], consumer: str, width: int, **stated: Any
) -> schemas.Unit:
    """Return a unit whose channels own one param and one MAC each, unless stated otherwise."""
    plain: dict[str, Any] = {"step": 1, "params_per_channel": 1, "macs_per_channel": 1}
    return schemas.Unit(
        name=name, kind=kind, producers=tuple(producers), consumer=consumer, width=width, **(plain | stated)
    )


def unit(index: int, width: int = 512) -> schemas.Unit:
    holder, costs = MLP.format(index), {"params_per_channel": 10, "macs_per_channel": 20}
    return named_unit(holder, schemas.UnitKind.MLP, [f"{holder}.fc1"], f"{holder}.fc2", width, step=32, **costs)


def profile(num_layers: int = 2, width: int = 512, pass_s: float = 0.0005) -> schemas.ModelProfile:
    """A transformer whose MLP channels own 10 params and 20 MACs each, half of them on either side."""
    latency = STATS.model_copy(update={"median_ms": pass_s * STATS.batch_size * 1e3})
    rows = [
        schemas.LayerProfile(name="vit.norm", kind="LayerNorm", params=64, macs=0, latency_ms=1.0, activation_bytes=8)
    ]
    rows += [
        schemas.LayerProfile(
            name=f"{MLP.format(index)}.{side}",
            kind="Linear",
            params=5 * width,
            macs=10 * width,
            latency_ms=2.0,
            activation_bytes=4 * width,
        )
        for index in range(num_layers)
        for side in ("fc1", "fc2")
    ]
    return schemas.ModelProfile(
        architecture="ViTForImageClassification",
        input=schemas.InputSpec(channels=3, height=32, width=32, source="made"),
        batch_size=4,
        device="cpu",
        params=sum(row.params for row in rows),
        macs=sum(row.macs for row in rows),
        parameter_bytes=4000,
        size_bytes=4100,
        headline=schemas.Headline(latency=latency, peak_memory_bytes=10**8),
        layers=tuple(rows),
        operators=(),
        units=tuple(unit(index, width) for index in range(num_layers)),
        refusals={"classifier": "classifier: its outputs are the labels"},
    )


def evidence(
    units: tuple[schemas.Unit, ...],
    kls: Mapping[str, Sequence[float]],
    *,
    latency: Callable[[int], float | None] = lambda keep: None,
) -> schemas.Evidence:
    """Evidence on each unit at as many of its aligned widths down to a quarter, evenly spread, as it has KLs, widest first.

    `latency` gives the milliseconds that a width saves, of the 10 that a unit takes.
    """
    rows = []
    for one in units:
        widths = [width for width in aligned_widths(one.width, one.step)[::-1] if width >= one.width / 4]
        values = kls[one.name]
        keeps = [widths[(index + 1) * len(widths) // len(values) - 1] for index in range(len(values))]
        cuts = [schemas.Cut(unit=one, keep=keep, requested_ratio=1 - keep / one.width) for keep in dict.fromkeys(keeps)]
        options = tuple(
            schemas.WidthOption(
                keep=cut.keep,
                params_saved=cut.params_saved,
                macs_saved=cut.macs_saved,
                latency_saved_ms=latency(cut.keep),
                predicted_kl=kl,
                kl=kl,
                measured=True,
            )
            for cut, kl in zip(cuts, values[-len(cuts) :], strict=True)
        )
        whole = None if latency(one.width) is None else 10.0
        rows.append(
            schemas.UnitEvidence(unit=one.name, latency_ms=whole, order=tuple(range(one.width)), options=options)
        )
    return schemas.Evidence(units=tuple(rows), num_images=256, seconds=1.0)


def judged(
    num_layers: int = 4, kls: Mapping[int, Sequence[float]] | None = None, each: Sequence[float] = DOUBLING
) -> schemas.ModelProfile:
    """Return a profile with evidence: each unit's KL doubles by each step of its width, unless told otherwise."""
    found = profile(num_layers)
    rows = {unit.name: (kls or {}).get(index, each) for index, unit in enumerate(found.units)}
    return found.model_copy(update={"evidence": evidence(found.units, rows)})
