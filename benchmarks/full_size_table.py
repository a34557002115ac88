"""Full size: what every runtime and scheme brings, and pruning, and both, beside two peers and the speed-ups of the paper's Table 4.

    python benchmarks/full_size_table.py [--models NAME...] [--sessions N] [--quick] [--json FILE]

Batch 1, random weights: accuracy isn't measured here (quantization_accuracy.py, pruning_tradeoff.py), the distance of the logits to
the float32 model's is. Every deployment is made by the product's own jobs and raced in one session, which chooses ours: the fastest
that is small enough and no further from float32 than `MAX_ERROR`. Ours, the model pruned to aligned widths, both together, the
paper's recipe (torch.ao's quantize_dynamic as it comes), ONNX Runtime's dynamic int8 as it comes (what torch.onnx.export and
quantize_dynamic make of the model; ours has its attention fused) and eager float32 then meet in sessions of their own, as many as was
said beforehand and as far apart as the other models' take, which the checks are read from.
"""

import math
import os
import tempfile
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import astuple, dataclass
from pathlib import Path
from typing import Any

import torch
from checks import Check, Estimate, finish, parser_of, stamped
from full_size import MODELS, SPEC, build, cuts_for_macs, macs_by_module
from paper.numbers import TABLE_4
from peers import worker_of_papers, worker_of_peer, write_peer
from rates import rates
from sessions import Sessions, add_option
from torch import nn
from transformers import ViTImageProcessorPil
from workshop import Made, Workshop, deployments

from profiling_agent.measure.worker import worker_command
from profiling_agent.pruning.prune import prune_model
from profiling_agent.pruning.units import find_units
from profiling_agent.runtimes.registry import noise_batch
from profiling_agent.schemas import ArtifactRef, Deployment
from profiling_agent.search.deployments import INT8

NUM_CALIBRATION = 16
# What int8 with attention products costs (0.11 on ViT-B when first tried) passes; what computes something else does not.
MAX_ERROR = 0.15
PEER_FILE = "peer.onnx"
BASELINE, PEER, PAPERS = "eager float32", "ONNX Runtime dynamic (as it comes)", "torch.ao dynamic (the paper's)"
QUICK = (BASELINE, "onnxruntime dynamic", "openvino static")
# They compile for minutes, and were never near the fastest: a sixth of this table's time for nothing.
LEFT_OUT = ("inductor float32", "inductor bfloat16")
# Of the MACs, what pruning takes; with int8 the larger share.
SHARES = (0.25, 0.45)
MAX_SIZE = 0.26
MIN_OVER_PEER = {"ViT-B/16": 1.15, "DeiT-B/16": 1.15, "Swin-B": 1.15, "ResNet-101": 3.0}
# Of the share of MACs that is gone, at least this part has to be gained: what isn't MACs takes time too.
MIN_GAIN = 0.7
# Both together over the better of what the paper has alone. How much int8 is worth depends on the processor, so this is no multiple of ours.
MIN_OVER_PAPER = 2.0


def wanted(*, is_quick: bool) -> list[Deployment]:
    """Return the deployments of the table, eager float32 first."""
    found = [one for one in deployments() if one.name not in LEFT_OUT and (not is_quick or one.name in QUICK)]
    return sorted(found, key=lambda one: one.name != BASELINE)


def deployed(shop: Workshop, model: ArtifactRef, asked: Sequence[Deployment]) -> list[Made]:
    """Bring a model into deployments; what can't be made is said and left out."""
    calibration = shop.noise(NUM_CALIBRATION, SPEC.width)
    made: list[Made] = []
    for deployment in asked:
        started = time.perf_counter()
        made.append(shop.deploy(model, deployment, calibration, batch_size=1))
        print(f"  {deployment.name}: {time.perf_counter() - started:.0f} s", flush=True)
    return [one for one in made if one.deployed]


@dataclass(frozen=True)
class PrunedModel:
    """A pruned model, and the share of MACs that it lacks."""

    model: ArtifactRef
    macs_saved: float

    @property
    def name(self) -> str:
        """Return what a row calls it."""
        return f"pruned, {self.macs_saved:.0%} fewer MACs"


def prepare(name: str, shop: Workshop) -> tuple[nn.Module, ArtifactRef, list[PrunedModel]]:
    """Return the dense model, saved, and the pruned ones."""
    dense, processor = build(name), ViTImageProcessorPil()
    macs = macs_by_module(dense)
    units = find_units(dense, SPEC, macs).units
    cuts: list[PrunedModel] = []
    for share in SHARES:
        plan = cuts_for_macs(dense, units, macs, share)
        pruned = prune_model(dense, plan, spec=SPEC).model
        gone = 1 - sum(macs_by_module(pruned).values()) / sum(macs.values())
        cuts.append(PrunedModel(shop.add(pruned, f"cut-{share:g}", spec=SPEC, processor=processor, cuts=plan), gone))
    write_peer(dense, torch.from_numpy(noise_batch(SPEC, 2)), shop.root / PEER_FILE)
    return dense, shop.add(dense, "float32", spec=SPEC, processor=processor), cuts


def row_of(
    model: str, made: Made, whole: int, race: Sessions, place: int, macs_of_limit: dict[str, float]
) -> dict[str, Any]:
    """Return a deployment's line of the table, of the one session in which all of them raced: it has no interval."""
    assert made.deployed is not None
    lasted = place in race.lasting
    kind = "int8" if made.deployment.scheme in INT8 else "float32"
    return {
        "model": model,
        "deployment": made.name,
        "size_bytes": made.deployed.model.size_bytes,
        "size": made.deployed.model.size_bytes / whole,
        "error": made.deployed.distance,
        "seconds_to_make": made.deployed.seconds,
        "latency_ms": race.median_ms(place) if lasted else None,
        "over_fp32": math.exp(race.logs(place)[0]) if lasted else None,
        # What the model's MACs would take at the machine's own rate, over what a pass takes.
        "of_limit": macs_of_limit[kind] * 1e3 / race.median_ms(place) if lasted else None,
        "dropped": race.dropped.get(place),
    }


def choose(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return ours: the fastest deployment that is small enough and near enough to float32."""
    able = [row for row in rows if row["over_fp32"]]
    good = [row for row in able if row["size"] <= MAX_SIZE and row["error"] <= MAX_ERROR]
    return max(good or able, key=lambda row: row["over_fp32"])


@dataclass(frozen=True)
class Chosen:
    """One model's deployments, which of them is ours, and the field of all that meet in the sessions."""

    name: str
    rows: list[dict[str, Any]]
    ours: dict[str, Any]
    # Of each in the field: its name, and the share of MACs that it lacks.
    entered: Sequence[tuple[str, float]]
    field: Sessions

    @property
    def both(self) -> str:
        """Return what the pruned model in our deployment is called."""
        return f"pruned, {self.ours['deployment']}"


def search(name: str, shop: Workshop, limits: dict[str, float], *, is_quick: bool) -> Chosen:
    """Make every deployment, race them in one session, and choose ours."""
    print(f"\n{name}", flush=True)
    dense, plain, cuts = prepare(name, shop)
    made, seconds_per_model = deployed(shop, plain, wanted(is_quick=is_quick)), 4.0 if is_quick else 8.0
    race = Sessions([worker_command(shop.path(one)) for one in made], 1, seconds_per_model)
    race.hold(chooses=True)
    assert made[0].deployed is not None
    macs = sum(macs_by_module(dense).values())
    seconds = {kind: macs / rate for kind, rate in limits.items()}
    whole = made[0].deployed.model.size_bytes
    rows = [stamped(row_of(name, one, whole, race, place, seconds)) for place, one in enumerate(made)]
    ours = choose(rows)
    chosen = next(one for one in made if one.name == ours["deployment"])
    both = deployed(shop, cuts[-1].model, [chosen.deployment])
    field: list[tuple[str, float, list[str]]] = [
        (BASELINE, 0.0, worker_command(shop.path(made[0]))),
        (PAPERS, 0.0, worker_of_papers(shop.root / "float32")),
        (PEER, 0.0, worker_of_peer(shop.root / PEER_FILE)),
        (chosen.name, 0.0, worker_command(shop.path(chosen))),
        *((cut.name, cut.macs_saved, worker_command(shop.root / cut.model.path)) for cut in cuts),
        *((f"pruned, {one.name}", cuts[-1].macs_saved, worker_command(shop.path(one))) for one in both),
    ]
    entered = [(told, gone) for told, gone, _ in field]
    return Chosen(name, rows, ours, entered, Sessions([command for *_, command in field], 1, seconds_per_model))


def finals(chosen: Chosen) -> list[dict[str, Any]]:
    """Return all that met over all sessions: over eager float32, ONNX Runtime's dynamic int8, and our int8 deployment."""
    field = chosen.field
    places = {name: place for place, (name, _) in enumerate(chosen.entered) if place in field.lasting}
    beside = {"over_fp32": BASELINE, "over_peer": PEER, "over_int8": chosen.ours["deployment"]}
    return [
        {
            "model": chosen.name,
            "final": name,
            "macs_saved": chosen.entered[place][1],
            "latency_ms": field.median_ms(place),
            **{key: _triple(field, place, places.get(other)) for key, other in beside.items()},
            **field.told(place),
        }
        for name, place in places.items()
    ]


def _triple(field: Sessions, place: int, other: int | None) -> list[float] | None:
    return None if other is None else list(astuple(field.over(place, other)))


def checks_of(chosen: Chosen, last: Sequence[dict[str, Any]]) -> list[Check]:
    """Return what must hold; what didn't last holds nothing."""
    rows = {row["final"]: row for row in last}
    ours, both = chosen.ours, chosen.both
    steps = next(steps for name, steps in TABLE_4.items() if name == chosen.name)
    pruned, quantized = steps["pruning"][-1], steps["quantization"][-1]

    def over(final: str, key: str = "over_fp32") -> Estimate | float:
        triple = rows[final][key] if final in rows else None
        return Estimate(*triple) if triple else 0.0

    int8, who, pair = ours["deployment"], f"{chosen.name}: {ours['deployment']}", f"{chosen.name}: pruned and int8"
    found = [
        Check.at_least(f"{who} over eager float32, beside the paper's", over(int8), quantized),
        Check.at_least(f"{who} over ONNX Runtime dynamic", over(int8, "over_peer"), MIN_OVER_PEER[chosen.name]),
        Check.at_most(f"{who}, size on disk of float32's", ours["size"], MAX_SIZE),
        Check.at_most(f"{who}, relative distance of logits", ours["error"], MAX_ERROR),
        Check.at_least(f"{pair} over int8 alone", over(both, "over_int8"), 1.0),
        Check.at_least(f"{pair} over eager float32", over(both), MIN_OVER_PAPER * max(pruned, quantized)),
    ]
    for name, gone in chosen.entered:
        if gone and name != both:
            least = 1 + MIN_GAIN * gone
            found.append(Check.at_least(f"{chosen.name}: {name}, over eager float32", over(name), least))
    return found


def _told(triple: list[float] | None) -> str:
    return f"{triple[0]:.2f} [{triple[1]:.2f}, {triple[2]:.2f}]" if triple else "-"


def show(chosen: Chosen, last: Sequence[dict[str, Any]]) -> None:
    """Print one model's table."""
    print(f"\n{chosen.name}, all deployments in one session")
    print(f"  {'deployment':<35}{'MB':>7}{'of fp32':>9}{'error':>8}{'ms':>8}  over eager fp32, of the limit")
    for row in chosen.rows:
        took = f"{'-':>8}"
        if row["latency_ms"]:
            took = f"{row['latency_ms']:>8.1f}  {row['over_fp32']:.2f} {row['of_limit']:>6.0%}"
        print(
            f"{'*' if row is chosen.ours else ' '} {row['deployment']:<35}{row['size_bytes'] / 1e6:>7.1f}{row['size']:>9.1%}"
            f"{row['error']:>8.4f}{took}" + (f"  {row['dropped']}" if row["dropped"] else "")
        )
    print(f"  {len(chosen.field.held)} sessions:{'over eager fp32, ORT dynamic, our int8':>72}")
    for row in last:
        told = "".join(f"{_told(row[key]):<20}" for key in ("over_fp32", "over_peer", "over_int8"))
        print(f"  {row['final']:<35}{row['latency_ms']:>8.1f} ms  {told}")
    print(flush=True)


def main() -> int:
    """Run the benchmark."""
    parser = parser_of(__doc__)
    parser.add_argument("--models", nargs="+", choices=tuple(MODELS), metavar="NAME")
    parser.add_argument("--quick", action="store_true", help="one model, three deployments, few repeats, two sessions")
    add_option(parser)
    asked = parser.parse_args()
    # The peers' functions are found there.
    os.environ["PYTHONPATH"] = str(Path(__file__).parent)
    rows: list[dict[str, Any]] = []
    checks: list[Check] = []
    names = asked.models or (["ResNet-101"] if asked.quick else list(MODELS))
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        shops = {name: stack.enter_context(Workshop(Path(scratch) / name.replace("/", "-"))) for name in names}
        limits = rates()
        print(", ".join(f"{kind} {rate / 1e9:.0f} GMAC/s" for kind, rate in limits.items()), flush=True)
        found = [search(name, shop, limits, is_quick=asked.quick) for name, shop in shops.items()]
        for session in range(2 if asked.quick else asked.sessions):
            for chosen in found:
                print(f"session {session + 1}: {chosen.name}", flush=True)
                chosen.field.hold()
        for chosen in found:
            last = [stamped(row) for row in finals(chosen)]
            show(chosen, last)
            rows += [*chosen.rows, *last]
            checks += checks_of(chosen, last)
    print()
    return finish(checks, rows, asked.json)


if __name__ == "__main__":
    raise SystemExit(main())
