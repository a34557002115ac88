"""Tuning of a float model for int8: SmoothQuant per LayerNorm, and the cost of quantizing each layer."""

import copy
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, Self

import torch
from torch import Tensor, nn

from profiling_agent.errors import QuantizationError
from profiling_agent.lib.progress import Progress, silent
from profiling_agent.modules.complexity import count_complexity
from profiling_agent.modules.hooks import watching
from profiling_agent.modules.inference import mean_kl, module_counts
from profiling_agent.quantization.calibrate import Observed, is_near, run
from profiling_agent.quantization.layers import QuantizedModule
from profiling_agent.quantization.quantize import NUM_CHECKED, quantize_model, quantized_layer
from profiling_agent.quantization.sensitivity import (
    CHUNK,
    mark_float_layers,
    measure_layers,
    place_,
    spec_of,
    swapped_logits,
)
from profiling_agent.schemas import EVERYTHING, FoldedSite, LayerCost, QuantizationRecommendation

ALPHAS = (0.5, 0.7)
# A smaller gain may be noise of 32 images.
MIN_GAIN = 0.05
# Rows of outputs that are stored per site, and values of them that choose a grid.
ROWS, VALUES = 1024, 65_536


@dataclass(frozen=True, slots=True)
class Site:
    """A LayerNorm and every linear layer that reads all of its output."""

    norm: str
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Ranges:
    """A LayerNorm's outputs on calibration images: each channel's range, and some rows, (rows, channels)."""

    low: Tensor
    high: Tensor
    rows: Tensor
    num_rows: int

    def scaled(self, scales: Tensor) -> Observed:
        """Return its readers' inputs after dividing each channel by its scale."""
        low, high = self.low / scales, self.high / scales
        ends, rows = torch.cat([low, high]), (self.rows / scales).flatten()
        indices = torch.randint(len(rows), (min(VALUES, len(rows)),), generator=torch.Generator().manual_seed(0))
        weight = self.num_rows * len(scales) / len(indices)
        return Observed(
            low=min(0.0, float(low.min())),
            high=max(0.0, float(high.max())),
            values=torch.cat([ends, rows[indices]]),
            weights=torch.cat([torch.ones_like(ends), torch.full((len(indices),), weight)]),
        )


@dataclass(frozen=True, slots=True)
class Smoothed:
    """The float model and the quantized one, both new copies with the same sites folded; KL in nats."""

    model: nn.Module
    quantized: nn.Module
    sites: tuple[FoldedSite, ...]
    kl: float
    kl_unfolded: float


@dataclass(frozen=True, slots=True)
class _Divergence:
    """KL on all images, and on those at even and odd indices, nats."""

    kl: float
    halves: tuple[float, float]

    @classmethod
    def between(cls, expected: Tensor, logits: Tensor) -> Self:
        even, odd = (mean_kl(expected[start::2], logits[start::2]) for start in (0, 1))
        return cls(mean_kl(expected, logits), (even, odd))

    def is_better_than(self, other: "_Divergence") -> bool:
        is_lower_on_both = all(ours < theirs for ours, theirs in zip(self.halves, other.halves, strict=True))
        return is_lower_on_both and self.kl < other.kl * (1 - MIN_GAIN)


def smooth(
    model: nn.Module,
    quantized: nn.Module,
    images: Tensor,
    *,
    num_judged: int | None = None,
    progress: Progress = silent,
) -> Smoothed:
    """Fold every LayerNorm's scales into its readers if that lowers the KL to `model` on `images` (b, c, h, w).

    `quantized` is `model` on the CPU with linear layers quantized, dynamically or statically; both are unchanged. A site is judged with only its
    readers quantized: otherwise the error of other layers hides its gain (of 18 sites of a Swin with outliers, 2 gained so, and all 18 by
    themselves). It must gain 5%, on both halves of the images, and is rejected if folding moves the float model's logits by more than 1e-4
    (relative). All accepted sites together must gain as much with every layer quantized, or none is folded. The KL is over the first `num_judged`
    images, by default all; the channels' peaks are over all.

    Raises:
        QuantizationError: the model doesn't accept the images.
    """
    smoothed, candidate = copy.deepcopy(model).cpu().eval(), copy.deepcopy(quantized).eval()
    with torch.no_grad():
        judged = images[:num_judged]
        unfolded = _Divergence.between(run(smoothed, judged), run(candidate, judged))
        spreads = measure_spreads(smoothed, find_sites(smoothed, images[:NUM_CHECKED]), images)
        sites = _fold_sites_(smoothed, candidate, spreads, judged, progress)
        folded = _Divergence.between(run(smoothed, judged), run(candidate, judged)) if sites else unfolded
    if folded.is_better_than(unfolded):
        return Smoothed(model=smoothed, quantized=candidate, sites=tuple(sites), kl=folded.kl, kl_unfolded=unfolded.kl)
    return Smoothed(model=model, quantized=quantized, sites=(), kl=unfolded.kl, kl_unfolded=unfolded.kl)


def _fold_sites_(
    smoothed: nn.Module, quantized: nn.Module, spreads: Mapping[Site, Ranges], images: Tensor, progress: Progress
) -> list[FoldedSite]:
    """Fold, in both models, each site that gains by itself; return the folded sites."""
    sites = [
        site for site in spreads if any(isinstance(quantized.get_submodule(n), QuantizedModule) for n in site.readers)
    ]
    options = {_option_key(site, alpha): (site, alpha) for site in sites for alpha in ALPHAS}
    swaps: dict[str, dict[str, nn.Module]] = {}
    for key, (site, alpha) in options.items():
        swaps[key] = _build_swap(smoothed, quantized, site, spreads[site], alpha)
    unfolded = {site.norm: {name: quantized.get_submodule(name) for name in site.readers} for site in sites}
    expected, logits = swapped_logits(smoothed, unfolded | swaps, images, message="smooth", progress=progress)
    divergences = {key: _Divergence.between(expected, option_logits) for key, option_logits in logits.items()}
    folded_sites = list[FoldedSite]()
    for site in sites:
        best = min((_option_key(site, alpha) for alpha in ALPHAS), key=lambda key: divergences[key].kl)
        before, after = divergences[site.norm], divergences[best]
        alpha = options[best][1]
        float_modules = folded_modules(smoothed, site, smoothing_scales(smoothed, site, spreads[site], alpha))
        if not after.is_better_than(before):
            continue
        logits_before = run(smoothed, images[:NUM_CHECKED])
        originals = place_(smoothed, float_modules)
        if not is_near(run(smoothed, images[:NUM_CHECKED]), logits_before):
            place_(smoothed, originals)
            continue
        place_(quantized, swaps[best])
        folded_sites.append(
            FoldedSite(norm=site.norm, readers=site.readers, alpha=alpha, kl_before=before.kl, kl_after=after.kl)
        )
    return folded_sites


def _option_key(site: Site, alpha: float) -> str:
    return f"{site.norm} {alpha}"


def _build_swap(
    model: nn.Module, quantized: nn.Module, site: Site, spread: Ranges, alpha: float
) -> dict[str, nn.Module]:
    """Return the modules that replace a folded site's; readers are quantized as in `quantized`."""
    scales = smoothing_scales(model, site, spread, alpha)
    modules, observed = folded_modules(model, site, scales), spread.scaled(scales)
    replacements: dict[str, nn.Module] = {site.norm: modules[site.norm]}
    for name in site.readers:
        reader, current = modules[name], quantized.get_submodule(name)
        assert isinstance(reader, nn.Linear), "readers are linear layers"
        replacements[name] = (
            quantized_layer(reader, current.kind, current.dtype, observed, reduce_range=current.reduce_range)
            if isinstance(current, QuantizedModule)
            else reader
        )
    return replacements


def find_sites(model: nn.Module, images: Tensor) -> tuple[Site, ...]:
    """Return the LayerNorms whose outputs linear layers read, in call order.

    A linear layer reads a LayerNorm if it is called after it and before the next one, and each channel's largest magnitude is bit-exactly that of
    the LayerNorm's output: window partition, zero padding and patch merging keep that. Whether another layer reads it too (a residual) is checked
    by the model's logits.
    """
    norms = {
        name
        for name, module in model.named_modules()
        if type(module) is nn.LayerNorm and module.elementwise_affine and len(module.normalized_shape) == 1
    }
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    calls = Counter[str]()
    last_norm: list[tuple[str, Tensor]] = []
    readers: dict[str, list[str]] = {}

    def begin(name: str, x: Any) -> None:
        if name in norms:
            return
        calls[name] += 1
        if last_norm and torch.equal(_channel_peaks(x), last_norm[0][1]):
            readers.setdefault(last_norm[0][0], []).append(name)

    def end(name: str, _input: Any, output: Any) -> None:
        if name in norms:
            calls[name] += 1
            last_norm[:] = [(name, _channel_peaks(output))]

    with watching(model, [*norms, *linears], before=begin, after=end):
        run(model, images)
    shared = {name for name, count in module_counts(model).items() if count > 1}
    return tuple(
        Site(norm, tuple(reader_names))
        for norm, reader_names in readers.items()
        if all(calls[name] == 1 and name not in shared for name in (norm, *reader_names))
    )


def measure_spreads(model: nn.Module, sites: Sequence[Site], images: Tensor) -> dict[Site, Ranges]:
    """Return the spread of each site's LayerNorm on the images."""
    spreads: dict[str, list[Ranges]] = {site.norm: [] for site in sites}
    generator = torch.Generator().manual_seed(0)

    def record(name: str, _input: Any, output: Any) -> None:
        rows: Tensor = output.detach().float().cpu().flatten(0, -2)
        indices = torch.randint(len(rows), (min(ROWS, len(rows)),), generator=generator)
        spreads[name].append(Ranges(rows.amin(0), rows.amax(0), rows[indices], len(rows)))

    with watching(model, spreads, after=record):
        for chunk in images.split(CHUNK):
            run(model, chunk)
    return {site: _merge_spreads(spreads[site.norm], generator) for site in sites}


def smoothing_scales(model: nn.Module, site: Site, spread: Ranges, alpha: float) -> Tensor:
    """Return max|X_j|^alpha / max|W_j|^(1 - alpha) for each channel j, W all readers' weights together.

    SmoothQuant's migration (Xiao et al., 2023, equation 4); a channel that is always zero, or whose weights are, has scale 1.
    """
    peaks = torch.maximum(spread.low.abs(), spread.high.abs())
    readers = [model.get_submodule(name).get_parameter("weight").detach().cpu() for name in site.readers]
    weights = torch.stack([weight.abs().amax(0) for weight in readers]).amax(0)
    scales = peaks.pow(alpha) / weights.pow(1 - alpha)
    return torch.where((peaks > 0) & (weights > 0) & scales.isfinite() & (scales > 0), scales, torch.ones_like(scales))


def folded_modules(model: nn.Module, site: Site, scales: Tensor) -> dict[str, nn.LayerNorm | nn.Linear]:
    """Return copies of the site's modules: the LayerNorm's channels divided by their scales, its readers' multiplied."""
    norm = copy.deepcopy(model.get_submodule(site.norm))
    assert isinstance(norm, nn.LayerNorm), "sites are LayerNorms"
    modules: dict[str, nn.LayerNorm | nn.Linear] = {site.norm: norm}
    with torch.no_grad():
        norm.weight.div_(scales)
        if norm.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            norm.bias.div_(scales)
        for name in site.readers:
            reader = copy.deepcopy(model.get_submodule(name))
            assert isinstance(reader, nn.Linear), "readers are linear layers"
            reader.weight.mul_(scales)
            modules[name] = reader
    return modules


def _channel_peaks(x: Tensor) -> Tensor:
    return x.detach().abs().flatten(0, -2).amax(0)


def _merge_spreads(parts: Sequence[Ranges], generator: torch.Generator) -> Ranges:
    rows = torch.cat([part.rows for part in parts])
    indices = torch.randperm(len(rows), generator=generator)[:ROWS]
    return Ranges(
        low=torch.stack([part.low for part in parts]).amin(0),
        high=torch.stack([part.high for part in parts]).amax(0),
        rows=rows[indices],
        num_rows=sum(part.num_rows for part in parts),
    )


# More images give the same result at a higher cost.
MAX_IMAGES = 32
# Below this KL in nats, a third of what goes with a point of top-1, single layers aren't measured: on models without outliers folding gains next to
# nothing and no layer is worth float (docs/decisions/LOG.md, 2026-11-21: 0.0001 to 0.0004 nats in all, with outliers 0.007 to 0.017), and measuring
# costs more than the rest of a conversion.
SMALL_KL = 5e-3
# Minimum number of images for KLs, and the MACs of one pass over them. About one pass per layer is run: for a ViT-B/16 that is minutes with 8
# images, and four times as many with 32.
MIN_JUDGED, JUDGED_MACS = 8, 64e9

TunedScheme = Literal["dynamic", "static"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """`model` is the given one if no site was folded; KLs are with all layers quantized, nats, on `num_images`.

    `rows` are empty if single layers were not measured.
    """

    model: nn.Module
    sites: tuple[FoldedSite, ...]
    rows: tuple[LayerCost, ...]
    kl: float
    kl_unfolded: float
    num_images: int


def tune(
    model: nn.Module,
    images: Iterable[Tensor],
    scheme: TunedScheme,
    latency_shares: Mapping[str, float] | None = None,
    *,
    progress: Progress = silent,
) -> Tuning:
    """Quantize all layers; if that costs more than a little, fold LayerNorm scales and measure each layer's cost.

    `model` is a float model on the CPU and is unchanged; of `images`, batches (b, c, h, w), the first 32 are used. All of them set ranges and
    scales; a large model's KLs are measured on fewer, at least 8. `latency_shares` has the layers' shares of the time by name, if known.

    Raises:
        QuantizationError: the model has no layer that the scheme supports; images are missing, too few for the scheme, or don't fit; or a weight
            isn't finite.
    """
    sample = _first_images(images)
    everything = QuantizationRecommendation(layer=EVERYTHING, quantization_type=scheme, dtype="qint8")
    quantized = quantize_model(model, [everything], calibration=partial(sample.split, CHUNK))
    macs = sum(row.macs for row in count_complexity(model, spec_of(sample)).values())
    num_judged = min(len(sample), max(MIN_JUDGED, int(JUDGED_MACS / max(macs, 1))))
    models, chunks = (copy.deepcopy(model).cpu().eval(), quantized.model), sample[:num_judged].split(CHUNK)
    with torch.no_grad():
        kl = mean_kl(*(torch.cat([run(m, chunk) for chunk in chunks]) for m in models))
    if kl < SMALL_KL:
        return Tuning(model=model, sites=(), rows=(), kl=kl, kl_unfolded=kl, num_images=num_judged)
    smoothed = smooth(model, quantized.model, sample, num_judged=num_judged, progress=progress)
    best = smoothed.model if smoothed.sites else model
    smoothed_quantized = replace(quantized, model=smoothed.quantized)
    rows = measure_layers(
        best, smoothed_quantized, sample[:num_judged], latency_shares=latency_shares, progress=progress
    )
    return Tuning(
        model=best,
        sites=smoothed.sites,
        rows=mark_float_layers(rows),
        kl=smoothed.kl,
        kl_unfolded=smoothed.kl_unfolded,
        num_images=num_judged,
    )


def _first_images(images: Iterable[Tensor]) -> Tensor:
    """Return the first 32 images, or all if fewer."""
    batches = list[Tensor]()
    for batch in images:
        if batches and batch.shape[1:] != batches[0].shape[1:]:
            raise QuantizationError(
                f"calibration images have the shapes {tuple(batches[0].shape[1:])!r} and {tuple(batch.shape[1:])!r}: "
                "give them one"
            )
        batches.append(batch)
        if sum(map(len, batches)) >= MAX_IMAGES:
            break
    if not batches:
        raise QuantizationError("calibration images are needed, none were given: raise num_samples")
    return torch.cat(batches)[:MAX_IMAGES]
