"""Evidence on units: KL divergence after pruning each one, predicted to second order, measured at two widths, and cached.

The KL divergence to the unpruned model, with a prune's compensation included, is paired, smooth and free of labels; accuracy on
as many images would be noise (docs/facts.md, "KL, not accuracy"). Second runs usually change only the contract, and evidence
costs them most: the user's cache stores it, in a file named by all that the evidence depends on.
"""

import hashlib
import json
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import torch
from scipy.linalg import LinAlgError
from torch import Tensor, nn

from profiling_agent.errors import PruningError
from profiling_agent.lib import io
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.machine import available_bytes
from profiling_agent.lib.modules import following_norms, has_bias, mean_kl, preserving_state
from profiling_agent.lib.replay import Walk, in_order
from profiling_agent.profiling.profile import LatencyTable, spread_evenly
from profiling_agent.pruning import criteria
from profiling_agent.pruning.compensation import MIN_IMAGES, Calibration, divide_, regrouped
from profiling_agent.pruning.prune import masked_parameters
from profiling_agent.pruning.widths import aligned_widths
from profiling_agent.schemas import Evidence, Unit, UnitEvidence, WidthOption


def fold(
    model: nn.Module, unit: Unit, moments: criteria.UnitMoments, kept: Sequence[int], norm: str | None
) -> dict[str, Tensor]:
    """Return, by name, parameters and buffers that simulate the compensated cut at full width.

    The consumer's weight is the ridge regression on the kept columns: W' = W_K + W_P C_PK (C_KK + ridge m I)^-1, zero
    elsewhere (ThiNet, 2017; He et al., 2017). Its bias takes the shift of the means, or else `norm`, the batch norm that
    reads its outputs; with neither C isn't centred.
    """
    layer = model.get_submodule(unit.consumer)
    weight, matrix, mean = layer.get_parameter("weight"), criteria.matrix_of(layer).double(), moments.mean.double()
    is_centred = norm is not None or has_bias(layer)
    second_moment = moments.covariance.double()
    if not is_centred:
        second_moment.addr_(mean, mean)
    columns = criteria.expanded(kept, matrix.shape[1] // unit.width)
    is_cut = torch.ones(matrix.shape[1], dtype=torch.bool, device=matrix.device)
    is_cut[columns] = False
    mean_square = second_moment.diagonal().mean().clamp_min(torch.finfo(torch.float32).tiny)
    damped = criteria.damp_(second_moment[columns][:, columns], mean_square)
    coefficients = divide_(second_moment[is_cut][:, columns], damped)
    folded = matrix[:, columns] + matrix[:, is_cut] @ coefficients
    shift = matrix @ mean - folded @ mean[columns]
    overlay = torch.zeros_like(matrix, dtype=torch.float32)
    overlay[:, columns] = folded.float()
    tensors = masked_parameters(model, unit, kept)
    tensors[f"{unit.consumer}.weight"] = overlay.reshape(weight.shape).to(weight.dtype)
    if has_bias(layer):
        bias = layer.get_parameter("bias").detach()
        tensors[f"{unit.consumer}.bias"] = bias + shift.to(torch.float32).to(bias.dtype)
    elif norm is not None:
        running_mean = model.get_submodule(norm).get_buffer("running_mean")
        tensors[f"{norm}.running_mean"] = running_mean - shift.to(torch.float32).to(running_mean.dtype)
    return tensors


# Measured widths per unit; the KL of others is interpolated along the prediction. Every unit is measured on the same few images,
# because only the order of costs matters. A network of many units uses fewer images, so that the cost doesn't grow with both.
NUM_MEASURED, MIN_MEASURED_ON, MAX_MEASURED_ON, MAX_MEASUREMENTS = 2, 8, 16, 512
# A backward pass stores all layers' outputs: 11 GB for 32 images of 224 x 224 in a ViT-B/16. Batches of large images are
# smaller, and on a machine with little memory a third of it is enough.
BATCH, MAX_PIXELS, BYTES_PER_PIXEL, GRADIENT_SHARE = 32, 8 * 224 * 224, 7_000, 3


def measure_sensitivity(
    model: nn.Module,
    units: Sequence[Unit],
    batches: Callable[[], Iterable[tuple[Tensor, Tensor]]],
    *,
    orders: Mapping[str, Sequence[int]] | None = None,
    seed: int = 0,
    progress: Progress = silent,
) -> Evidence:
    """Return the evidence on every unit at every aligned width; `model` is unchanged.

    `batches` begins a pass over the calibration images: (pixel_values (b, c, h, w), labels), labels unused. Three quarters are
    used for fitting; 8 to 16 images of the rest for measuring, fewer if there are many units. `orders` has channels by unit
    name, the first to remove first, by default those of `order_channels`.

    Raises:
        PruningError: there are fewer than 128 images, or the model can't be measured on them.
    """
    started = time.perf_counter()
    calibration = Calibration(model, batches)
    eliminations, folds = dict[str, criteria.Elimination](), dict[str, dict[int, dict[str, Tensor]]]()
    with preserving_state(model), torch.no_grad():
        model.eval()
        if (num_images := sum(map(len, calibration.every()))) < MIN_IMAGES:
            raise PruningError(
                f"{num_images} calibration images are too few to measure sensitivity: at least {MIN_IMAGES} are needed"
            )
        progress("weighing channels", 0, 3)
        judged = torch.cat(list(calibration.judged()))
        if not bool(torch.isfinite(model(pixel_values=judged[:BATCH]).logits).all()):
            raise PruningError("the model answers calibration images with logits that aren't finite: check its weights")
        max_batch = min(MAX_PIXELS, available_bytes() // GRADIENT_SHARE // BYTES_PER_PIXEL) // judged[0, 0].numel()
        fitted = regrouped(calibration.fitted(), max(1, min(BATCH, max_batch)))
        norms = following_norms(model, [unit.consumer for unit in units], judged[:1])
        try:
            moments = criteria.gather_moments(model, units, fitted, seed=seed) if units else {}
            for index, unit in enumerate(units):
                progress("ordering channels", index, len(units))
                # A Gram matrix is as large as its layer, and not needed again.
                of_unit = moments.pop(unit.name)
                elimination = criteria.order_channels(model, unit, of_unit, orders[unit.name] if orders else None)
                eliminations[unit.name] = elimination
                folds[unit.name] = {
                    keep: fold(
                        model, unit, of_unit, sorted(elimination.order[unit.width - keep :]), norms.get(unit.consumer)
                    )
                    for keep in spread_evenly(aligned_widths(unit.width, unit.step)[::-1], NUM_MEASURED)
                }
        except (LinAlgError, torch.linalg.LinAlgError) as error:  # pyright: ignore[reportPrivateImportUsage]
            raise PruningError(
                f"what layers read varies too little next to its mean to be measured: {error}"
            ) from error
        progress("measuring sensitivity", 2, 3)
        judged = judged[: max(MIN_MEASURED_ON, min(MAX_MEASURED_ON, MAX_MEASUREMENTS // max(len(units), 1)))]
        changed = {
            unit.name: (*(() if unit.mask_exact else (*unit.producers, *unit.inner)), unit.consumer, *unit.side_readers)
            for unit in units
        }
        reached = in_order(model, [name for names in changed.values() for name in names], judged[:1])
        begins = {unit.name: min(changed[unit.name], key=reached.index) for unit in units}
        walk = Walk(model, sorted(set(begins.values()), key=reached.index), judged[:1])
        expected = model(pixel_values=judged).logits
        rows: dict[str, UnitEvidence] = {}
        for index, unit in enumerate(sorted(units, key=lambda unit: reached.index(begins[unit.name]))):
            walk.reach(begins[unit.name], 0, judged)
            measured: dict[int, float] = {}
            for keep, tensors in folds[unit.name].items():
                kl = measured[keep] = mean_kl(expected, walk.logits_from_here(0, judged, tensors), model)
                if not math.isfinite(kl):
                    raise PruningError(f"the KL of the model with {unit.name!r} cut is {kl!r}: check its weights")
            rows[unit.name] = _unit_evidence(unit, eliminations[unit.name], measured)
            progress("measuring sensitivity", index + 1, len(units))
    seconds = time.perf_counter() - started
    in_model_order = tuple(rows[unit.name] for unit in units)
    return Evidence(units=in_model_order, num_images=num_images, seconds=seconds)


def _unit_evidence(unit: Unit, order: criteria.Elimination, measured: Mapping[int, float]) -> UnitEvidence:
    predicted = {keep: order.loss[unit.width - keep] for keep in aligned_widths(unit.width, unit.step)[::-1]}
    options = tuple(
        WidthOption(
            keep=keep,
            params_saved=(unit.width - keep) * unit.params_per_channel,
            macs_saved=(unit.width - keep) * unit.macs_per_channel,
            predicted_kl=predicted[keep],
            kl=kl,
            measured=keep in measured,
        )
        for keep, kl in interpolate_kl(measured, predicted).items()
    )
    return UnitEvidence(unit=unit.name, order=order.order, options=options)


def interpolate_kl(measured: Mapping[int, float], predicted: Mapping[int, float]) -> dict[int, float]:
    """Return a KL for every width of `predicted`, widest first, never below that of a wider one.

    Between two measured widths it follows the prediction; above the widest measured one, the prediction is scaled to meet it,
    because the only known value there is zero at full width.
    """
    widest_first = sorted(measured, reverse=True)
    xs = np.maximum.accumulate([0.0, *(predicted[keep] for keep in widest_first)])
    ys = np.maximum.accumulate([0.0, *(measured[keep] for keep in widest_first)])
    # Of widths with one prediction the widest counts.
    xs, firsts = np.unique(xs, return_index=True)
    drawn = {keep: float(np.interp(predicted[keep], xs, ys[firsts])) for keep in sorted(predicted, reverse=True)}
    kls = [max(measured[keep], 0.0) if keep in measured else kl for keep, kl in drawn.items()]
    return dict(zip(drawn, np.maximum.accumulate(kls).tolist(), strict=True))


def with_latencies(evidence: Evidence, units: Sequence[Unit], table: LatencyTable) -> Evidence:
    """Return the evidence with the table's times of these units, replacing earlier times."""
    rows: list[UnitEvidence] = []
    for row, unit in zip(evidence.units, units, strict=True):
        options = tuple(
            o.model_copy(update={"latency_saved_ms": table.latency_saved_ms(unit, o.keep)}) for o in row.options
        )
        times = {"latency_ms": table.full_latency_ms(unit), "is_unsteady": unit.name in table.unsteady}
        rows.append(row.model_copy(update={"options": options, **times}))
    return evidence.model_copy(update={"units": tuple(rows)})


# Each is a few megabytes at most.
MAX_FILES = 64


def evidence_path(folder: Path, depends_on: Mapping[str, Any]) -> Path:
    """Return the file of the evidence that depends on exactly these JSON values."""
    digest = hashlib.sha256(json.dumps(depends_on, sort_keys=True).encode()).hexdigest()
    return folder / f"{digest[:32]}.json"


def read_evidence(path: Path) -> Evidence | None:
    """Return the stored evidence; None if it is missing or damaged."""
    with suppress(OSError, io.DocumentError):
        return io.read_record(Evidence, path)
    return None


def store_evidence(path: Path, evidence: Evidence) -> None:
    """Store evidence for later runs, and delete the oldest files; write errors are ignored."""
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        io.write_text(path, evidence.model_dump_json())
        for oldest in sorted(path.parent.glob("*.json"), key=lambda file: file.stat().st_mtime)[:-MAX_FILES]:
            oldest.unlink(missing_ok=True)
