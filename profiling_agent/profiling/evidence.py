"""Evidence on units: KL divergence after cutting each one, predicted to second order and measured; cached for later runs.

T0 predicts the cost of each unit at every width from one forward and backward pass; T1 measures two widths. The measure is the KL divergence
to the unpruned model, with a prune's compensation included: paired, smooth and free of labels, whereas accuracy on as many images would be
noise (docs/facts.md, "KL, not accuracy").

Second runs usually change only the contract, and evidence costs them most, so the user's cache stores it, in a file named by all that the
evidence depends on.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from profiling_agent.errors import PruningError
from profiling_agent.lib.io import DocumentError, make_folders, read_record, sweep, write_text
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.machine import available_bytes
from profiling_agent.lib.modules import device_of, following_norms, has_bias, mean_kl, preserving_state
from profiling_agent.lib.replay import Walk, in_order
from profiling_agent.measure.latency_table import LatencyTable, spread_evenly
from profiling_agent.pruning.compensation import (
    MIN_IMAGES,
    Calibration,
    SingularError,
    columns_of,
    damp_,
    divide_,
    matrix_of,
    regrouped,
)
from profiling_agent.pruning.criteria import UnitMoments, best_for, gather_moments, order_with_kl
from profiling_agent.pruning.prune import masked_parameters
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.schemas import Cut, Evidence, Unit, UnitEvidence, WidthOption


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedUnit:
    """A unit's folded readers: the kept `columns` of its consumer's matrix, their `weight`, and the `shift` of its bias."""

    columns: list[int]
    weight: Tensor
    shift: Tensor
    masks: Mapping[str, Tensor]


def fold(model: nn.Module, unit: Unit, moments: UnitMoments, kept: Sequence[int], *, shifts: bool) -> FoldedUnit:
    """Return the ridge regression of the consumer's inputs on the kept columns: W' = W_K + W_P C_PK (C_KK + ridge m I)^-1.

    `shifts` means that the outputs' means can be restored; otherwise C isn't centred (ThiNet, 2017; He et al., 2017).
    """
    layer = model.get_submodule(unit.consumer)
    weight = matrix_of(layer).double()
    second_moment = moments.covariance.double() if shifts else moments.gram
    columns = columns_of(unit, layer, kept)
    is_cut = torch.ones(weight.shape[1], dtype=torch.bool, device=weight.device)
    is_cut[columns] = False
    mean_square = second_moment.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    coefficients = divide_(second_moment[is_cut][:, columns], damp_(second_moment[columns][:, columns], mean_square))
    folded = weight[:, columns] + weight[:, is_cut] @ coefficients
    mean = moments.mean.double()
    shift = weight @ mean - folded @ mean[columns]
    masked = masked_parameters(model, unit, kept)
    return FoldedUnit(
        columns=columns,
        weight=folded.float(),
        shift=(shift if shifts else torch.zeros_like(shift)).float(),
        masks={name: tensor for name, tensor in masked.items() if name != f"{unit.consumer}.weight"},
    )


def overlay(model: nn.Module, unit: Unit, folded: FoldedUnit, norm: str | None) -> dict[str, Tensor]:
    """Return, by name, the parameters and buffers with which `model` computes what the cut and folded one does.

    `norm` is the batch norm that reads the consumer's outputs: it takes the shift if the consumer has no bias.
    """
    layer = model.get_submodule(unit.consumer)
    weight = layer.get_parameter("weight")
    matrix = torch.zeros_like(matrix_of(layer))
    matrix[:, folded.columns] = folded.weight
    tensors = {**folded.masks, f"{unit.consumer}.weight": matrix.reshape(weight.shape).to(weight.dtype)}
    if has_bias(layer):
        bias = layer.get_parameter("bias").detach()
        tensors[f"{unit.consumer}.bias"] = bias + folded.shift.to(bias.dtype)
    elif norm is not None:
        mean = model.get_submodule(norm).get_buffer("running_mean")
        tensors[f"{norm}.running_mean"] = mean - folded.shift.to(mean.dtype)
    return tensors


# Measured widths per unit; the KL of others is interpolated along the prediction. Every unit is measured on the same few images, because only the
# order of costs matters. A network of many units uses fewer images, so that the cost doesn't grow with both.
NUM_MEASURED, MIN_MEASURED_ON, MAX_MEASURED_ON, MAX_MEASUREMENTS = 2, 8, 16, 512
BATCH = 32
# A backward pass stores all layers' outputs: 11 GB for 32 images of 224 x 224 in a ViT-B/16. Batches of large images are smaller, and on a machine
# with little memory a third of it is enough.
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
    """Return the evidence on every unit at every aligned width; `model` is unchanged.

    `batches` begins a pass over the calibration images: (pixel_values (b, c, h, w), labels), labels unused. Three quarters are used for fitting; 8
    to 16 images of the rest for measuring, fewer if there are many units. `criterion` orders the channels: one of CRITERIA, or "auto" for the one
    that suits each kind of unit. `table` has the units' times, if known.

    Raises:
        PruningError: there are fewer than 128 different images, or the model, cut or unpruned, can't be measured on them.
    """
    started = time.perf_counter()
    weight = next(parameter for parameter in model.parameters() if parameter.is_floating_point())
    calibration = Calibration(batches=batches, device=device_of(model), dtype=weight.dtype)
    with preserving_state(model), torch.no_grad():
        model.eval()
        if (count := calibration.count_different(MIN_IMAGES)) < MIN_IMAGES:
            raise PruningError(
                f"{count} different calibration images are too few to measure sensitivity: at least {MIN_IMAGES} are needed"
            )
        progress("weighing channels", 0, 3)
        judged = torch.cat(list(calibration.judged()))
        num_images = len(judged) + sum(map(len, calibration.fitted()))
        max_judged = max(MIN_MEASURED_ON, min(MAX_MEASURED_ON, MAX_MEASUREMENTS // max(len(units), 1)))
        if not bool(torch.isfinite(model(pixel_values=judged[:BATCH]).logits).all()):
            raise PruningError("the model answers calibration images with logits that aren't finite: check its weights")
        try:
            studied = _order_and_fold(model, units, calibration, judged[:1], criterion, seed, progress)
        except SingularError as error:
            raise PruningError(f"what layers read varies too little beside its mean to be measured: {error}") from error
        progress("measuring sensitivity", 2, 3)
        judged = judged[:max_judged]
        measured = _measure_kl(model, units, studied, judged, progress)
    evidence = Evidence(
        units=tuple(_unit_evidence(unit, studied[unit.name], measured[unit.name]) for unit in units),
        num_images=num_images,
        num_judged=len(judged),
        seconds=time.perf_counter() - started,
    )
    return evidence if table is None else with_latencies(evidence, units, table)


@dataclass(frozen=True, slots=True)
class _StudiedUnit:
    """A unit's order of removal, the predicted KL of each width, and what `model` computes at the measured ones."""

    order: tuple[int, ...]
    predicted: Mapping[int, float]
    folds: Mapping[int, FoldedUnit]
    norm: str | None


def _order_and_fold(
    model: nn.Module,
    units: Sequence[Unit],
    calibration: Calibration,
    image: Tensor,
    criterion: str,
    seed: int,
    progress: Progress,
) -> dict[str, _StudiedUnit]:
    pixels = image.shape[-2] * image.shape[-1]
    max_batch = min(MAX_PIXELS, available_bytes() // GRADIENT_SHARE // BYTES_PER_PIXEL) // pixels
    fitted = regrouped(calibration.fitted(), max(1, min(BATCH, max_batch)), rest=True)
    moments = gather_moments(model, units, fitted, seed=seed) if units else {}
    norms = following_norms(model, [unit.consumer for unit in units], image)
    studied: dict[str, _StudiedUnit] = {}
    for index, unit in enumerate(units):
        progress("ordering channels", index, len(units))
        # A Gram matrix is as large as its layer, and not needed again.
        own_moments, norm = moments.pop(unit.name), norms.get(unit.consumer)
        unit_criterion = best_for(unit.kind) if criterion == "auto" else criterion
        result = order_with_kl(model, unit, own_moments, unit_criterion, seed=seed)
        widths = aligned_widths(unit.width, unit.step)[::-1]
        shifts = norm is not None or has_bias(model.get_submodule(unit.consumer))
        studied[unit.name] = _StudiedUnit(
            order=result.order,
            predicted={keep: result.loss[unit.width - keep] for keep in widths},
            folds={
                keep: fold(model, unit, own_moments, sorted(result.order[unit.width - keep :]), shifts=shifts)
                for keep in spread_evenly(widths, NUM_MEASURED)
            },
            norm=norm,
        )
    return studied


def _measure_kl(
    model: nn.Module, units: Sequence[Unit], studied: Mapping[str, _StudiedUnit], images: Tensor, progress: Progress
) -> dict[str, dict[int, float]]:
    """Return the KL of the model on `images` by unit and measured width, one unit cut at a time."""
    changed = {
        unit.name: (*(() if unit.mask_exact else (*unit.producers, *unit.inner)), unit.consumer, *unit.side_readers)
        for unit in units
    }
    order = in_order(model, [name for names in changed.values() for name in names], images[:1])
    begins = {unit.name: min(changed[unit.name], key=order.index) for unit in units}
    walk = Walk(model, sorted(set(begins.values()), key=order.index), images[:1])
    expected = model(pixel_values=images).logits
    measured: dict[str, dict[int, float]] = {}
    for index, unit in enumerate(sorted(units, key=lambda unit: order.index(begins[unit.name]))):
        measured[unit.name] = {}
        walk.reach(begins[unit.name], 0, images)
        for keep, folded in studied[unit.name].folds.items():
            logits = walk.logits_from_here(0, images, overlay(model, unit, folded, studied[unit.name].norm))
            kl = measured[unit.name][keep] = mean_kl(expected, logits)
            if not math.isfinite(kl):
                raise PruningError(f"the KL of the model with {unit.name!r} cut is {kl!r}: check its weights")
        progress("measuring sensitivity", index + 1, len(units))
    return measured


def _unit_evidence(unit: Unit, studied: _StudiedUnit, measured: Mapping[int, float]) -> UnitEvidence:
    kls = interpolate_kl(measured, studied.predicted)
    cuts = [Cut(unit=unit, keep=keep, requested_ratio=1 - keep / unit.width) for keep in studied.predicted]
    options = tuple(
        WidthOption(
            keep=cut.keep,
            params_saved=cut.params_saved,
            macs_saved=cut.macs_saved,
            predicted_kl=studied.predicted[cut.keep],
            kl=kls[cut.keep],
            measured=cut.keep in measured,
        )
        for cut in cuts
    )
    return UnitEvidence(unit=unit.name, order=studied.order, options=options)


def interpolate_kl(measured: Mapping[int, float], predicted: Mapping[int, float]) -> dict[int, float]:
    """Return a KL for every width of `predicted`, widest first, never below that of a wider one.

    Between two measured widths it follows the prediction; above the widest measured one, the prediction is scaled to meet it, because the only
    known value there is zero at full width.
    """
    widest_first = sorted(measured, reverse=True)
    xs = np.maximum.accumulate([0.0, *(predicted[keep] for keep in widest_first)])
    ys = np.maximum.accumulate([0.0, *(measured[keep] for keep in widest_first)])
    # Of widths with one prediction the widest counts.
    xs, firsts = np.unique(xs, return_index=True)
    keeps = sorted(predicted, reverse=True)
    kls = [
        max(measured[keep], 0.0) if keep in measured else float(np.interp(predicted[keep], xs, ys[firsts]))
        for keep in keeps
    ]
    return dict(zip(keeps, np.maximum.accumulate(kls).tolist(), strict=True))


def with_latencies(evidence: Evidence, units: Sequence[Unit], table: LatencyTable) -> Evidence:
    """Return the evidence with the table's times of these units, replacing earlier times."""

    def add_times(row: UnitEvidence, unit: Unit) -> UnitEvidence:
        options = tuple(
            option.model_copy(update={"latency_saved_ms": table.saved(unit, option.keep)}) for option in row.options
        )
        is_unsteady = unit.name in table.unsteady
        return row.model_copy(update={"options": options, "latency_ms": table.of(unit), "is_unsteady": is_unsteady})

    rows = tuple(add_times(row, unit) for row, unit in zip(evidence.units, units, strict=True))
    return evidence.model_copy(update={"units": rows})


# Each is a few megabytes at most.
MAX_FILES = 64


def evidence_path(folder: Path, depends_on: Mapping[str, Any]) -> Path:
    """Return the file of the evidence that depends on exactly these JSON values."""
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
    return folder / f"{digest[:32]}.json"


def read_evidence(path: Path) -> Evidence | None:
    """Return the stored evidence; None if it is missing or damaged."""
    try:
        return read_record(Evidence, path)
    except (OSError, DocumentError):
        return None


def store_evidence(path: Path, evidence: Evidence) -> None:
    """Store evidence for later runs, which add their own times, and delete the oldest files; write errors are ignored."""
    with suppress(OSError):
        make_folders(path.parent)
        write_text(path, evidence.model_dump_json())
    # If another process holds the lock, that one deletes them.
    with suppress(OSError, Timeout), FileLock(path.parent / "evidence.lock", timeout=0):
        sweep(path.parent, path.name)
        for oldest in sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-MAX_FILES]:
            oldest.unlink(missing_ok=True)
