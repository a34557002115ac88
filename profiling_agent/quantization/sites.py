"""LayerNorms whose channels can be scaled down while the linear layers that read them scale them up again."""

import copy
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.modules.hooks import watching
from profiling_agent.quantization.calibrate import Observed, run

# Of each site's outputs, so many rows are kept, and so many values of them choose a grid.
ROWS, VALUES = 1024, 65_536
# Images that are run at once.
CHUNK = 8


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
            values=[ends, rows[drawn]],
            weights=[torch.ones_like(ends), torch.full((len(drawn),), weight)],
        )


def find_sites(model: nn.Module, images: Tensor) -> tuple[Site, ...]:
    """Return the LayerNorms whose output linear layers read, in the order in which they are called.

    A linear layer reads a LayerNorm if it is called after it and before the next one, and each channel's largest
    magnitude is, to the bit, the one that the LayerNorm gave out: cutting into windows, padding with zeros and merging
    patches keep that. Whether something else reads it too (a residual) is to be seen from what the model says.
    """
    norms = {name for name, module in model.named_modules() if _is_site(module)}
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
    shared = {name for name, count in _places(model).items() if count > 1}
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


def place_(model: nn.Module, modules: Mapping[str, nn.Module]) -> dict[str, nn.Module]:
    """Set modules in their places; return those that stood there."""
    before = {name: model.get_submodule(name) for name in modules}
    for name, module in modules.items():
        model.set_submodule(name, module)
    return before


def _is_site(module: nn.Module) -> bool:
    return type(module) is nn.LayerNorm and module.elementwise_affine and len(module.normalized_shape) == 1


def _peaks(x: Tensor) -> Tensor:
    return x.detach().abs().flatten(0, -2).amax(0)


def _places(model: nn.Module) -> dict[str, int]:
    """Return in how many places the module of each name stands."""
    named = list(model.named_modules(remove_duplicate=False))
    count = Counter(id(module) for _, module in named)
    return {name: count[id(module)] for name, module in named}


def _joined(parts: Sequence[Spread], generator: torch.Generator) -> Spread:
    rows = torch.cat([part.rows for part in parts])
    chosen = torch.randperm(len(rows), generator=generator)[:ROWS]
    return Spread(
        low=torch.stack([part.low for part in parts]).amin(0),
        high=torch.stack([part.high for part in parts]).amax(0),
        rows=rows[chosen],
        num_rows=sum(part.num_rows for part in parts),
    )
