"""Channel spaces: channels that are made, changed and read together, and where they lie in a tensor."""

import math
from dataclasses import dataclass, field

from torch import nn


@dataclass(slots=True)
class Space:
    """The channels of one layer's outputs and of whatever is added to them or multiplied with them.

    `width` counts what can be cut on its own: fewer than `size` where a grouped convolution ties channels together. Of
    writers with several `stacks`, a channel has a row in each.
    """

    size: int
    width: int
    writers: list[nn.Module] = field(default_factory=list[nn.Module])
    inner: list[nn.Module] = field(default_factory=list[nn.Module])
    readers: list[nn.Module] = field(default_factory=list[nn.Module])
    is_added: bool = False
    is_image: bool = False
    is_logits: bool = False
    mask_exact: bool = True
    stacks: int = 1
    obstacle: str | None = None
    merged_into: "Space | None" = None

    def current(self) -> "Space":
        """Return the space that this one has become part of, itself if none."""
        space = self
        while space.merged_into is not None:
            space = space.merged_into
        return space

    def split(self, stacks: int) -> "Space | None":
        """Return the space that the channels become whose parts are taken for each other's; None where more than writers know them."""
        if self.size % stacks or self.stacks > 1 or self.inner or self.readers or self.is_added or self.is_image:
            return None
        size = self.size // stacks
        self.merged_into = Space(size, size, writers=self.writers, stacks=stacks, obstacle=self.obstacle)
        return self.merged_into

    def block(self, obstacle: str) -> None:
        """Say what keeps the channels from being cut; the first obstacle stays."""
        self.obstacle = self.obstacle or obstacle


@dataclass(frozen=True, slots=True)
class Axis:
    """Which dimension of a tensor, counted from the last, -1, holds the channels of which space."""

    held: Space
    dim: int

    @property
    def space(self) -> Space:
        """Return the space as it is now."""
        return self.held.current()


def merge(first: Space, second: Space) -> bool:
    """Make two spaces of one size one, and say whether they were two.

    Groups of consecutive channels in one and others in the other: only what is whole in both can be cut.
    """
    if first is second:
        return False
    first.width = math.gcd(first.width, second.width)
    first.writers += second.writers
    first.inner += second.inner
    first.readers += second.readers
    first.is_added |= second.is_added
    first.is_image |= second.is_image
    first.is_logits |= second.is_logits
    first.mask_exact &= second.mask_exact
    first.obstacle = first.obstacle or second.obstacle
    if first.stacks != second.stacks:
        first.block("an operation of a part of a layer with another layer")
    second.merged_into = first
    return True
