"""How far a convolution pads its input on each side, whether it says so in numbers or by a name."""

from typing import Any

from torch import nn


def border_of(layer: nn.Conv2d) -> tuple[int, int, int, int]:
    """Return how many pixels `layer` puts to the left, right, top and bottom of its input, as `functional.pad` takes them."""
    padding: Any = layer.padding
    if not isinstance(padding, str):
        # torch's own code takes one number for both as well, alone or in a list.
        sides = (padding,) if isinstance(padding, int) else tuple(padding)
        top, left = sides * (2 // len(sides))
        return left, left, top, top
    if padding == "valid":
        return 0, 0, 0, 0
    # As torch's own "same": where they aren't equal, the last side has one more.
    height, width = (step * (size - 1) for size, step in zip(layer.kernel_size, layer.dilation, strict=True))
    return width // 2, width - width // 2, height // 2, height - height // 2
