"""Even out activations before they are quantized, where that is measured to help: SmoothQuant, site by site."""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor, nn

from profiling_agent.modules.divergence import mean_kl
from profiling_agent.progress import Progress, silent
from profiling_agent.quantization.calibrate import run
from profiling_agent.quantization.module import QuantizedModule
from profiling_agent.quantization.norms import is_near
from profiling_agent.quantization.quantize import NUM_CHECKED, quantized_layer
from profiling_agent.quantization.sites import (
    Site,
    Spread,
    find_sites,
    folded_modules,
    measure_spreads,
    place_,
    smoothing_scales,
)
from profiling_agent.quantization.swaps import swapped_logits
from profiling_agent.records import FoldedSite

ALPHAS = (0.5, 0.7)
# What gains less may be an accident of 32 images.
MIN_GAIN = 0.05


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
    swaps = {key: _modules(smoothed, tried, site, spreads[site], alpha) for key, (site, alpha) in options.items()}
    plain = {site.norm: {name: tried.get_submodule(name) for name in site.readers} for site in sites}
    expected, logits = swapped_logits(smoothed, plain | swaps, images, message="smooth", progress=progress)
    divergences = {key: _Divergence.between(expected, found) for key, found in logits.items()}
    kept = list[FoldedSite]()
    for site in sites:
        best = min((_key(site, alpha) for alpha in ALPHAS), key=lambda key: divergences[key].kl)
        before, after = divergences[site.norm], divergences[best]
        alpha = options[best][1]
        float_modules = folded_modules(smoothed, site, smoothing_scales(smoothed, site, spreads[site], alpha))
        if not after.is_better_than(before) or not _preserves(smoothed, float_modules, images[:NUM_CHECKED]):
            continue
        place_(smoothed, float_modules)
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
            quantized_layer(reader, held.kind, held.dtype, given) if isinstance(held, QuantizedModule) else reader
        )
    return made


def _preserves(model: nn.Module, modules: Mapping[str, nn.Module], images: Tensor) -> bool:
    expected = run(model, images)
    before = place_(model, modules)
    found = run(model, images)
    place_(model, before)
    return is_near(found, expected)
