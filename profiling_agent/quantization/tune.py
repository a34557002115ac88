"""Tuning of a float model for int8: SmoothQuant site by site, and the cost of each layer."""

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
from profiling_agent.modules.inference import mean_kl, places
from profiling_agent.quantization.calibrate import Observed, is_near, run
from profiling_agent.quantization.layers import QuantizedModule
from profiling_agent.quantization.quantize import NUM_CHECKED, quantize_model, quantized_layer
from profiling_agent.quantization.sensitivity import CHUNK, mark_kept, measure_layers, place_, spec_of, swapped_logits
from profiling_agent.schemas import EVERYTHING, FoldedSite, LayerCost, QuantizationRecommendation

ALPHAS = (0.5, 0.7)
# What gains less may be an accident of 32 images.
MIN_GAIN = 0.05
# Of each site's outputs, so many rows are kept, and so many values of them choose a grid.
ROWS, VALUES = 1024, 65_536


@dataclass(frozen=True, slots=True)
class Site:
    """A LayerNorm and every linear layer that reads all of its output."""

    norm: str
    readers: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Spread:
    """What a LayerNorm gives out on calibration images: the ends of each channel, and some rows, (rows, channels)."""

    low: Tensor
    high: Tensor
    rows: Tensor
    num_rows: int

    def scaled(self, scales: Tensor) -> Observed:
        """Return what its readers are given once each channel is divided by its scale."""
        low, high = self.low / scales, self.high / scales
        ends, rows = torch.cat([low, high]), (self.rows / scales).flatten()
        drawn = torch.randint(len(rows), (min(VALUES, len(rows)),), generator=torch.Generator().manual_seed(0))
        weight = self.num_rows * len(scales) / len(drawn)
        return Observed(
            low=min(0.0, float(low.min())),
            high=max(0.0, float(high.max())),
            values=torch.cat([ends, rows[drawn]]),
            weights=torch.cat([torch.ones_like(ends), torch.full((len(drawn),), weight)]),
        )


@dataclass(frozen=True, slots=True)
class Smoothed:
    """The float model with folded sites, and the quantized one with the same: new copies; KL in nats."""

    model: nn.Module
    quantized: nn.Module
    sites: tuple[FoldedSite, ...]
    kl: float
    kl_unfolded: float


@dataclass(frozen=True, slots=True)
class _Divergence:
    """KL on all images, and on those of even and of odd places, nats."""

    kl: float
    halves: tuple[float, float]

    @classmethod
    def between(cls, expected: Tensor, logits: Tensor) -> Self:
        even, odd = (mean_kl(expected[start::2], logits[start::2]) for start in (0, 1))
        return cls(mean_kl(expected, logits), (even, odd))

    def is_better_than(self, other: "_Divergence") -> bool:
        both = all(mine < theirs for mine, theirs in zip(self.halves, other.halves, strict=True))
        return both and self.kl < other.kl * (1 - MIN_GAIN)


def smooth(
    model: nn.Module,
    quantized: nn.Module,
    images: Tensor,
    *,
    num_judged: int | None = None,
    progress: Progress = silent,
) -> Smoothed:
    """Fold every LayerNorm's scales into its readers where that lowers the KL to `model` on `images` (b, c, h, w).

    `quantized` is `model` on the CPU with linear layers quantized, dynamically or statically; neither is touched. A
    site is judged with its readers alone quantized: with all layers quantized, what the others add hides what it gains
    (of 18 sites of a Swin with outliers 2 were found to gain so, and all 18 alone). It has to gain 5%, and on both
    halves of the images; it is refused where folding moves the float model's logits by more than 1e-4 (relative). All that is
    left has to gain as much together, with every layer quantized, or nothing is folded. The KL is taken over the first
    `num_judged` images, or all of them; the channels' peaks over all.

    Raises:
        QuantizationError: the model doesn't take the images.
    """
    smoothed, tried = copy.deepcopy(model).cpu().eval(), copy.deepcopy(quantized).eval()
    with torch.no_grad():
        judged = images[:num_judged]
        start = _Divergence.between(run(smoothed, judged), run(tried, judged))
        spreads = measure_spreads(smoothed, find_sites(smoothed, images[:NUM_CHECKED]), images)
        kept = _fold_sites_(smoothed, tried, spreads, judged, progress)
        reached = _Divergence.between(run(smoothed, judged), run(tried, judged)) if kept else start
    if reached.is_better_than(start):
        return Smoothed(model=smoothed, quantized=tried, sites=tuple(kept), kl=reached.kl, kl_unfolded=start.kl)
    return Smoothed(model=model, quantized=quantized, sites=(), kl=start.kl, kl_unfolded=start.kl)


def _fold_sites_(
    smoothed: nn.Module, tried: nn.Module, spreads: Mapping[Site, Spread], images: Tensor, progress: Progress
) -> list[FoldedSite]:
    """Fold, in both models, each site that gains by itself; return what was folded."""
    sites = [site for site in spreads if any(isinstance(tried.get_submodule(n), QuantizedModule) for n in site.readers)]
    options = {_key(site, alpha): (site, alpha) for site in sites for alpha in ALPHAS}
    swaps: dict[str, dict[str, nn.Module]] = {}
    for key, (site, alpha) in options.items():
        swaps[key] = _modules(smoothed, tried, site, spreads[site], alpha)
    plain = {site.norm: {name: tried.get_submodule(name) for name in site.readers} for site in sites}
    expected, logits = swapped_logits(smoothed, plain | swaps, images, message="smooth", progress=progress)
    divergences = {key: _Divergence.between(expected, found) for key, found in logits.items()}
    kept = list[FoldedSite]()
    for site in sites:
        best = min((_key(site, alpha) for alpha in ALPHAS), key=lambda key: divergences[key].kl)
        before, after = divergences[site.norm], divergences[best]
        alpha = options[best][1]
        float_modules = folded_modules(smoothed, site, smoothing_scales(smoothed, site, spreads[site], alpha))
        if not after.is_better_than(before):
            continue
        as_it_was = run(smoothed, images[:NUM_CHECKED])
        replaced = place_(smoothed, float_modules)
        if not is_near(run(smoothed, images[:NUM_CHECKED]), as_it_was):
            place_(smoothed, replaced)
            continue
        place_(tried, swaps[best])
        kept.append(
            FoldedSite(norm=site.norm, readers=site.readers, alpha=alpha, kl_before=before.kl, kl_after=after.kl)
        )
    return kept


def _key(site: Site, alpha: float) -> str:
    return f"{site.norm} {alpha}"


def _modules(model: nn.Module, quantized: nn.Module, site: Site, spread: Spread, alpha: float) -> dict[str, nn.Module]:
    """Return what takes the places of a site once it is folded: readers are quantized as they are in `quantized`."""
    scales = smoothing_scales(model, site, spread, alpha)
    modules, given = folded_modules(model, site, scales), spread.scaled(scales)
    made: dict[str, nn.Module] = {site.norm: modules[site.norm]}
    for name in site.readers:
        reader, held = modules[name], quantized.get_submodule(name)
        assert isinstance(reader, nn.Linear), "readers are linear layers"
        made[name] = (
            quantized_layer(reader, held.kind, held.dtype, given, reduce_range=held.reduce_range)
            if isinstance(held, QuantizedModule)
            else reader
        )
    return made


def find_sites(model: nn.Module, images: Tensor) -> tuple[Site, ...]:
    """Return the LayerNorms whose output linear layers read, in the order in which they are called.

    A linear layer reads a LayerNorm if it is called after it and before the next one, and each channel's largest
    magnitude is, to the bit, the one that the LayerNorm gave out: cutting into windows, padding with zeros and merging
    patches keep that. Whether something else reads it too (a residual) is to be seen from what the model says.
    """
    norms = {
        name
        for name, module in model.named_modules()
        if type(module) is nn.LayerNorm and module.elementwise_affine and len(module.normalized_shape) == 1
    }
    linears = [name for name, module in model.named_modules() if type(module) is nn.Linear]
    calls = Counter[str]()
    last: list[tuple[str, Tensor]] = []
    readers: dict[str, list[str]] = {}

    def begin(name: str, x: Any) -> None:
        if name in norms:
            return
        calls[name] += 1
        if last and torch.equal(_peaks(x), last[0][1]):
            readers.setdefault(last[0][0], []).append(name)

    def end(name: str, _input: Any, output: Any) -> None:
        if name in norms:
            calls[name] += 1
            last[:] = [(name, _peaks(output))]

    with watching(model, [*norms, *linears], before=begin, after=end):
        run(model, images)
    shared = {name for name, count in places(model).items() if count > 1}
    return tuple(
        Site(norm, tuple(names))
        for norm, names in readers.items()
        if all(calls[name] == 1 and name not in shared for name in (norm, *names))
    )


def measure_spreads(model: nn.Module, sites: Sequence[Site], images: Tensor) -> dict[Site, Spread]:
    """Return what each site's LayerNorm gives out on the images."""
    held: dict[str, list[Spread]] = {site.norm: [] for site in sites}
    generator = torch.Generator().manual_seed(0)

    def take(name: str, _input: Any, output: Any) -> None:
        rows: Tensor = output.detach().float().cpu().flatten(0, -2)
        drawn = torch.randint(len(rows), (min(ROWS, len(rows)),), generator=generator)
        held[name].append(Spread(rows.amin(0), rows.amax(0), rows[drawn], len(rows)))

    with watching(model, held, after=take):
        for chunk in images.split(CHUNK):
            run(model, chunk)
    return {site: _joined(held[site.norm], generator) for site in sites}


def smoothing_scales(model: nn.Module, site: Site, spread: Spread, alpha: float) -> Tensor:
    """Return max|X_j|^alpha / max|W_j|^(1 - alpha) for each channel j, W all readers' weights together.

    SmoothQuant's migration (Xiao et al., 2023, equation 4); a channel that is never used, or never read, keeps its own.
    """
    peaks = torch.maximum(spread.low.abs(), spread.high.abs())
    readers = [model.get_submodule(name).get_parameter("weight").detach().cpu() for name in site.readers]
    weights = torch.stack([weight.abs().amax(0) for weight in readers]).amax(0)
    scales = peaks.pow(alpha) / weights.pow(1 - alpha)
    return torch.where((peaks > 0) & (weights > 0) & scales.isfinite() & (scales > 0), scales, torch.ones_like(scales))


def folded_modules(model: nn.Module, site: Site, scales: Tensor) -> dict[str, nn.LayerNorm | nn.Linear]:
    """Return copies of the site's modules, the LayerNorm's channels divided by their scales, its readers' multiplied."""
    norm = copy.deepcopy(model.get_submodule(site.norm))
    assert isinstance(norm, nn.LayerNorm), "sites are LayerNorms"
    made: dict[str, nn.LayerNorm | nn.Linear] = {site.norm: norm}
    with torch.no_grad():
        norm.weight.div_(scales)
        if norm.bias is not None:  # pyright: ignore[reportUnnecessaryComparison]
            norm.bias.div_(scales)
        for name in site.readers:
            reader = copy.deepcopy(model.get_submodule(name))
            assert isinstance(reader, nn.Linear), "readers are linear layers"
            reader.weight.mul_(scales)
            made[name] = reader
    return made


def _peaks(x: Tensor) -> Tensor:
    return x.detach().abs().flatten(0, -2).amax(0)


def _joined(parts: Sequence[Spread], generator: torch.Generator) -> Spread:
    rows = torch.cat([part.rows for part in parts])
    chosen = torch.randperm(len(rows), generator=generator)[:ROWS]
    return Spread(
        low=torch.stack([part.low for part in parts]).amin(0),
        high=torch.stack([part.high for part in parts]).amax(0),
        rows=rows[chosen],
        num_rows=sum(part.num_rows for part in parts),
    )


# More tell the same at a higher price.
MAX_IMAGES = 32
# Below that many nats, a third of what goes with a point of top-1, nobody looks for layers to blame: on models without outliers folding gains
# next to nothing and no layer is worth float (docs/decisions/LOG.md, 2026-11-21: 0.0001 to 0.0004 nats in all, with outliers 0.007 to 0.017),
# and looking costs more than everything else about a conversion.
SMALL_KL = 5e-3
# Images on which KLs are measured, at least, and the MACs of one pass over them. About a pass for each layer is run: for
# a ViT-B/16 that is minutes with 8 images, and four times as many with 32.
MIN_JUDGED, JUDGED_MACS = 8, 64e9

TunedScheme = Literal["dynamic", "static"]


@dataclass(frozen=True, slots=True)
class Tuning:
    """`model` is the given one where no site was folded; KLs are with all layers quantized, nats, on `num_images`.

    There are no `rows` where nobody looked at single layers.
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
    """Quantize all layers, and where that costs more than a little, fold LayerNorm scales where that helps and measure what each layer costs.

    `model` is a float model on the CPU and isn't touched; of `images`, batches (b, c, h, w), the first 32 are used.
    All of them set ranges and scales; a large model's KLs are measured on fewer, at least 8.
    `latency_shares` has the layers' shares of the time by name, where they are known.

    Raises:
        QuantizationError: the model has no layer that the scheme takes; images are missing, too few for the scheme, or don't fit; or a weight isn't finite.
    """
    taken = _first(images)
    everything = QuantizationRecommendation(layer=EVERYTHING, quantization_type=scheme, dtype="qint8")
    quantized = quantize_model(model, [everything], calibration=partial(taken.split, CHUNK))
    macs = sum(row.macs for row in count_complexity(model, spec_of(taken)).values())
    num_judged = min(len(taken), max(MIN_JUDGED, int(JUDGED_MACS / max(macs, 1))))
    both, chunks = (copy.deepcopy(model).cpu().eval(), quantized.model), taken[:num_judged].split(CHUNK)
    with torch.no_grad():
        kl = mean_kl(*(torch.cat([run(each, chunk) for chunk in chunks]) for each in both))
    if kl < SMALL_KL:
        return Tuning(model=model, sites=(), rows=(), kl=kl, kl_unfolded=kl, num_images=num_judged)
    smoothed = smooth(model, quantized.model, taken, num_judged=num_judged, progress=progress)
    best = smoothed.model if smoothed.sites else model
    made = replace(quantized, model=smoothed.quantized)
    rows = measure_layers(best, made, taken[:num_judged], latency_shares=latency_shares, progress=progress)
    return Tuning(
        model=best,
        sites=smoothed.sites,
        rows=mark_kept(rows),
        kl=smoothed.kl,
        kl_unfolded=smoothed.kl_unfolded,
        num_images=num_judged,
    )


def _first(images: Iterable[Tensor]) -> Tensor:
    """Return the first 32 images, or as many as there are."""
    taken = list[Tensor]()
    for batch in images:
        if taken and batch.shape[1:] != taken[0].shape[1:]:
            raise QuantizationError(
                f"calibration images have the shapes {tuple(taken[0].shape[1:])!r} and {tuple(batch.shape[1:])!r}: "
                "give them one"
            )
        taken.append(batch)
        if sum(map(len, taken)) >= MAX_IMAGES:
            break
    if not taken:
        raise QuantizationError("calibration images are needed, none were given: raise num_samples")
    return torch.cat(taken)[:MAX_IMAGES]
