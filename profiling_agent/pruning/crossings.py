"""Layers that lose columns to one cut and rows to another: what lies in both is gone once."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from profiling_agent.records import Cut


@dataclass(frozen=True, slots=True)
class Crossing:
    """A layer that ends one unit and begins the next, as a ResNet bottleneck's middle convolution.

    Of its `whole` pairs of input and output channels `gone` are counted by both cuts.
    """

    layer: str
    gone: int
    whole: int


def crossings(cuts: Sequence[Cut]) -> Iterator[Crossing]:
    """Yield every layer in which one of `cuts` ends and another begins."""
    begins = {producer: cut for cut in cuts for producer in cut.unit.producers}
    for ending in cuts:
        if (beginning := begins.get(ending.unit.consumer)) is not None:
            gone = (ending.unit.width - ending.keep) * (beginning.unit.width - beginning.keep)
            yield Crossing(ending.unit.consumer, gone, ending.unit.width * beginning.unit.width)
