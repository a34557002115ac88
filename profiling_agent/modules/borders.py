"""How far a convolution pads its input on each side, whether it says so in numbers or by a name."""

from torch import nn


def border_of(layer: nn.Conv2d) -> tuple[int, int, int, int]:
    """Return how many pixels `layer` puts to the left, right, top and bottom of its input, as `functional.pad` takes them."""
    if not isinstance(layer.padding, str):
        top, left = layer.padding
        return left, left, top, top
    if layer.padding == "valid":
        return 0, 0, 0, 0
    # As torch's own "same": where they aren't equal, the last side has one more.
    height, width = (step * (size - 1) for size, step in zip(layer.kernel_size, layer.dilation, strict=True))
    return width // 2, width - width // 2, height // 2, height - height // 2
