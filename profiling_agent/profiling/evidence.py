"""Evidence on units: KL divergence after cutting each one, predicted to second order and measured; kept in the cache.

T0 predicts the cost of each unit at every width from one forward and backward pass, T1 measures two widths. The measure is the KL divergence to the
unpruned model, with the compensation that a prune would get folded in: paired, smooth and free of labels, where accuracy on as many images would be
noise (docs/facts.md, "KL, not accuracy").

A second run with another contract is the most common one, and evidence is what costs it most, so it is kept in the user's cache. A file is named by all
that the evidence depends on; its content is checked against the units, and a wrong one costs the time to measure again.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from profiling_agent.errors import PruningError
from profiling_agent.lib.io import DocumentError, make_folders, read_record, sweep, write_text
from profiling_agent.lib.machine import available_bytes
from profiling_agent.lib.progress import Progress, silent
from profiling_agent.measure.latency_table import MAX_AGE_S, LatencyTable
from profiling_agent.modules.inference import device_of, left_as_found, mean_kl
from profiling_agent.modules.norms import following_norms, has_bias
from profiling_agent.modules.prefix import Replay, find_prefixes
from profiling_agent.pruning.compensation import (
    MIN_IMAGES,
    Calibration,
    SingularError,
    UnitMoments,
    columns_of,
    damp_,
    divide_,
    gather_moments,
    matrix_of,
    regrouped,
)
from profiling_agent.pruning.criteria import best_for, ordered
from profiling_agent.pruning.verify import masked_parameters
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.schemas import Cut, Evidence, Record, Unit, UnitEvidence, WidthOption


@dataclass(frozen=True, slots=True, kw_only=True)
class Folded:
    """What a unit's readers hold once it keeps `columns` of its consumer's matrix; `shift` is a new bias' addition."""

    columns: list[int]
    weight: Tensor
    shift: Tensor
    masks: Mapping[str, Tensor]


def fold(model: nn.Module, unit: Unit, moments: UnitMoments, kept: Sequence[int], *, shifts: bool) -> Folded:
    """Return the ridge regression of what the consumer read on what is kept: W' = W_K + W_P C_PK (C_KK + ridge m I)^-1.

    `shifts` says that the outputs' means can be restored; C isn't centred otherwise (ThiNet, 2017; He et al., 2017).
    """
    layer = model.get_submodule(unit.consumer)
    weight = matrix_of(layer).double()
    second = moments.covariance.double() if shifts else moments.gram
    columns = columns_of(unit, layer, kept)
    lost = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
    lost[columns] = False
    mean_square = second.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    taken = divide_(second[lost][:, columns], damp_(second[columns][:, columns], mean_square))
    folded = weight[:, columns] + weight[:, lost] @ taken
    mean = moments.mean.double()
    shift = weight @ mean - folded @ mean[columns]
    masked = masked_parameters(model, unit, kept)
    return Folded(
        columns=columns,
        weight=folded.float(),
        shift=(shift if shifts else torch.zeros_like(shift)).float(),
        masks={name: tensor for name, tensor in masked.items() if name != f"{unit.consumer}.weight"},
    )


def overlay(model: nn.Module, unit: Unit, folded: Folded, norm: str | None) -> dict[str, Tensor]:
    """Return, by name, the parameters and buffers that make `model` compute what the cut and folded one does.

    `norm` is the batch norm that reads the consumer's outputs: it takes the shift where the consumer has no bias.
    """
    layer = model.get_submodule(unit.consumer)
    weight = layer.get_parameter("weight")
    matrix = torch.zeros_like(matrix_of(layer))
    matrix[:, folded.columns] = folded.weight
    laid = {**folded.masks, f"{unit.consumer}.weight": matrix.reshape(weight.shape).to(weight.dtype)}
    if has_bias(layer):
        bias = layer.get_parameter("bias").detach()
        laid[f"{unit.consumer}.bias"] = bias + folded.shift.to(bias.dtype)
    elif norm is not None:
        mean = model.get_submodule(norm).get_buffer("running_mean")
        laid[f"{norm}.running_mean"] = mean - folded.shift.to(mean.dtype)
    return laid


# Widths that are measured; the others are drawn along the prediction through them. On so many images: every unit is measured on the
# same ones, and what is asked is which of them costs more. A network of many units has fewer of them, so that the cost doesn't grow with both.
NUM_MEASURED, MIN_MEASURED_ON, MAX_MEASURED_ON, MAX_MEASUREMENTS = 2, 8, 16, 512
BATCH = 32
# A backward pass holds what all layers gave: 11 GB for 32 images of 224 x 224 in a ViT-B/16, so that there are fewer of so large ones, and of a
# machine with little memory a third is enough.
MAX_PIXELS, BYTES_PER_PIXEL, GRADIENT_SHARE = 8 * 224 * 224, 7_000, 3


def measure_sensitivity(
    model: nn.Module,
    units: Sequence[Unit],
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    *,
    criterion: str = "auto",
    table: LatencyTable | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Evidence:
    """Return the evidence on every unit at every aligned width; `model` is left as it was found.

    `batches` begins a pass over the calibration images: (pixel_values (b, c, h, w), labels), labels unused. Three
    quarters are fitted to, of the last 8 to 16 images are measured on, fewer where there are many units. `criterion`
    orders the channels: one of CRITERIA, or "auto" for the one that suits each kind of unit. `table` has the units'
    times, where they are known.

    Raises:
        PruningError: there are fewer than 128 different images, or the model, cut or unpruned, can't be measured on them.
    """
    started = time.perf_counter()
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    calibration = Calibration(batches=batches, device=device_of(model), dtype=weight.dtype)
    with left_as_found(model), torch.no_grad():
        model.eval()
        if (number := calibration.count_different(MIN_IMAGES)) < MIN_IMAGES:
            raise PruningError(
                f"{number} different calibration images are too few to measure sensitivity: at least {MIN_IMAGES} are needed"
            )
        study = _Study(model, units, calibration, seed)
        try:
            progress("weighing channels", 0, 3)
            study.gather()
            progress("measuring sensitivity", 2, 3)
            rows = study.measure(criterion, progress)
        except SingularError as error:
            raise PruningError(f"what layers read varies too little beside its mean to be measured: {error}") from error
    evidence = Evidence(
        units=rows,
        num_images=study.num_images,
        num_judged=study.num_measured_on,
        seconds=time.perf_counter() - started,
    )
    return evidence if table is None else timed(evidence, units, table)


def timed(evidence: Evidence, units: Sequence[Unit], table: LatencyTable) -> Evidence:
    """Return the evidence on these units with the times that a table has of them, whatever was known before."""

    def of(row: UnitEvidence, unit: Unit) -> UnitEvidence:
        options = tuple(
            option.model_copy(update={"latency_saved_ms": table.saved(unit, option.keep)}) for option in row.options
        )
        is_unsteady = unit.name in table.unsteady
        return row.model_copy(update={"options": options, "latency_ms": table.of(unit), "is_unsteady": is_unsteady})

    rows = tuple(of(row, unit) for row, unit in zip(evidence.units, units, strict=True))
    return evidence.model_copy(update={"units": rows})


def _finite(kl: float, cut: str) -> float:
    if not math.isfinite(kl):
        raise PruningError(f"the KL of the model with {str(cut)!r} cut is {kl!r}: check its weights")
    return kl


@dataclass
class _Study:
    """One model under study; `judged` are batches of the quarter of the images that nothing is fitted to."""

    model: nn.Module
    units: Sequence[Unit]
    calibration: Calibration
    seed: int

    def gather(self) -> None:
        """T0: the moments, and what the unpruned model answers."""
        self.judged = list(regrouped(self.calibration.judged(), BATCH, rest=True))
        self.num_images = sum(map(len, (*self.judged, *self.calibration.fitted())))
        at_most = max(MIN_MEASURED_ON, min(MAX_MEASURED_ON, MAX_MEASUREMENTS // max(len(self.units), 1)))
        self.num_measured_on = min(at_most, sum(map(len, self.judged)))
        if not bool(torch.isfinite(self.model(pixel_values=self.judged[0]).logits).all()):
            raise PruningError("the model answers calibration images with logits that aren't finite: check its weights")
        pixels = self.judged[0].shape[-2] * self.judged[0].shape[-1]
        at_once = min(MAX_PIXELS, available_bytes() // GRADIENT_SHARE // BYTES_PER_PIXEL) // pixels
        fitted = regrouped(self.calibration.fitted(), max(1, min(BATCH, at_once)), rest=True)
        self.moments = gather_moments(self.model, self.units, fitted, seed=self.seed) if self.units else {}
        consumers = [unit.consumer for unit in self.units]
        self.norms = following_norms(self.model, consumers, self.judged[0][:1])

    def fold(self, unit: Unit, kept: Sequence[int]) -> Folded:
        shifts = unit.consumer in self.norms or has_bias(self.model.get_submodule(unit.consumer))
        return fold(self.model, unit, self.moments[unit.name], sorted(kept), shifts=shifts)

    def laid(self, unit: Unit, folded: Folded) -> dict[str, Tensor]:
        return overlay(self.model, unit, folded, self.norms.get(unit.consumer))

    def measure(self, criterion: str, progress: Progress) -> tuple[UnitEvidence, ...]:
        """T1: the KL of some widths of every unit, one unit cut at a time."""
        orders: dict[str, tuple[int, ...]] = {}
        predicted: dict[str, dict[int, float]] = {}
        folds: dict[tuple[str, int], Folded] = {}
        for number, unit in enumerate(self.units):
            progress("ordering channels", number, len(self.units))
            named = best_for(unit.kind) if criterion == "auto" else criterion
            found = ordered(self.model, unit, self.moments[unit.name], named, seed=self.seed)
            widths = aligned_widths(unit.width, unit.step)[::-1]
            orders[unit.name] = found.order
            predicted[unit.name] = {keep: found.loss[unit.width - keep] for keep in widths}
            folds |= {(unit.name, keep): self.fold(unit, found.order[unit.width - keep :]) for keep in _spread(widths)}
            # A Gram matrix is as large as its layer; it has done its work.
            del self.moments[unit.name]
        measured = self._measured(folds, progress)
        return tuple(
            _evidence(unit, orders[unit.name], predicted[unit.name], measured[unit.name]) for unit in self.units
        )

    def _measured(self, folds: Mapping[tuple[str, int], Folded], progress: Progress) -> dict[str, dict[int, float]]:
        units = {unit.name: unit for unit in self.units}
        changed = {unit.name: _changed(unit) for unit in self.units}
        prefixes = find_prefixes(self.model, changed, self.judged[0][:1])
        sums = dict.fromkeys(folds, 0.0)
        batches = torch.cat(self.judged)[: self.num_measured_on].split(BATCH)
        for number, images in enumerate(batches):
            replay = Replay(self.model, prefixes, images)
            for name, keep in folds:
                logits = replay.run_from(name, self.laid(units[name], folds[name, keep]))
                sums[name, keep] += mean_kl(replay.logits, logits) * len(images)
            progress("measuring sensitivity", number + 1, len(batches))
        measured: dict[str, dict[int, float]] = {name: {} for name in units}
        for (name, keep), total in sums.items():
            measured[name][keep] = _finite(total / self.num_measured_on, name)
        return measured


def _changed(unit: Unit) -> tuple[str, ...]:
    """Return the layers whose weights a fold changes: the readers, and all that a mask has to change where it is more."""
    readers = (unit.consumer, *unit.side_readers)
    return readers if unit.mask_exact else (*unit.producers, *unit.inner, *readers)


def _spread(widths: Sequence[int]) -> list[int]:
    """Return up to NUM_MEASURED of `widths`, the last one among them, evenly spread."""
    count = min(NUM_MEASURED, len(widths))
    return [widths[(index + 1) * len(widths) // count - 1] for index in range(count)]


def _evidence(
    unit: Unit,
    order: tuple[int, ...],
    predicted: Mapping[int, float],
    measured: Mapping[int, float],
) -> UnitEvidence:
    drawn = through(measured, predicted)
    cuts = {keep: Cut(unit=unit, keep=keep, requested_ratio=1 - keep / unit.width) for keep in predicted}
    options = tuple(
        WidthOption(
            keep=keep,
            params_saved=cut.params_saved,
            macs_saved=cut.macs_saved,
            predicted_kl=predicted[keep],
            kl=drawn[keep],
            measured=keep in measured,
        )
        for keep, cut in cuts.items()
    )
    return UnitEvidence(unit=unit.name, order=order, options=options)


def through(measured: Mapping[int, float], predicted: Mapping[int, float]) -> dict[int, float]:
    """Return a KL for every width of `predicted`, widest first: at least that of any wider one.

    Between two measured widths it is drawn along the prediction; above the widest of them the prediction is scaled to
    meet it, none being known at the full width but zero.
    """
    widest_first = sorted(measured, reverse=True)
    along = np.maximum.accumulate([0.0, *(predicted[keep] for keep in widest_first)]).tolist()
    up = np.maximum.accumulate([0.0, *(measured[keep] for keep in widest_first)]).tolist()
    keeps = sorted(predicted, reverse=True)
    drawn = [max(measured[keep], 0.0) if keep in measured else _between(along, up, predicted[keep]) for keep in keeps]
    rising = dict(zip(keeps, np.maximum.accumulate(drawn).tolist(), strict=True))
    return {keep: rising[keep] for keep in predicted}


def _between(along: Sequence[float], up: Sequence[float], value: float) -> float:
    """Return the height at `value`; where several points have it, as that of a silent prediction, the first step up.

    `np.interp` gives the last.
    """
    for (left, low), (right, high) in pairwise(zip(along, up, strict=True)):
        if value <= right:
            return high if right == left else low + (high - low) * (value - left) / (right - left)
    return up[-1]


# A few megabytes each at most.
MAX_FILES = 64


class _Kept(Record):
    taken: float
    evidence: Evidence


def evidence_path(folder: Path, depends_on: Mapping[str, Any]) -> Path:
    """Return the file of the evidence that depends on this, JSON values by name, and on nothing else."""
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
    return folder / f"{digest[:32]}.json"


def read_evidence(path: Path, units: Sequence[Unit]) -> Evidence | None:
    """Return the evidence that was kept on these units; None where there is none, or it is old, damaged or of others."""
    try:
        kept = read_record(_Kept, path)
    except (OSError, DocumentError):
        return None
    is_fresh = 0 <= time.time() - kept.taken <= MAX_AGE_S
    return kept.evidence if is_fresh and _fits(kept.evidence, units) else None


def _fits(evidence: Evidence, units: Sequence[Unit]) -> bool:
    return [row.unit for row in evidence.units] == [unit.name for unit in units] and all(
        sorted(row.order) == list(range(unit.width))
        and [option.keep for option in row.options] == list(aligned_widths(unit.width, unit.step))[::-1]
        for row, unit in zip(evidence.units, units, strict=True)
    )


def keep_evidence(path: Path, evidence: Evidence) -> None:
    """Keep evidence for later runs, whose times are their own, and let go of the oldest. A cache that can't be written is none."""
    with suppress(OSError):
        make_folders(path.parent)
        write_text(path, _Kept(taken=time.time(), evidence=evidence).model_dump_json())
    # Whoever finds another at it leaves it to them.
    with suppress(OSError, Timeout), FileLock(path.parent / "evidence.lock", timeout=0):
        sweep(path.parent, path.name)
        for old in sorted(path.parent.glob("*.json"), key=lambda each: each.stat().st_mtime)[:-MAX_FILES]:
            old.unlink(missing_ok=True)
