"""Patches cut and joined by reshaping, for an export: the exporter writes them as gathers by computed indices.

OpenVINO fails on such a gather among int8 layers (MobileViTV2's).
"""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
from torch.nn.functional import fold, unfold
from torch.overrides import TorchFunctionMode


class PlainPatches(TorchFunctionMode):
    """Within it `unfold` and `fold` reshape and permute, where patches lie side by side and fill the image."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        given = dict(kwargs or {})
        if func not in (unfold, fold):
            return func(*args, **given)
        bound = inspect.signature(func).bind(*args, **given)
        bound.apply_defaults()
        told: dict[str, Any] = bound.arguments
        image: Tensor = told["input"]
        height, width = _pair(told["output_size"]) if func is fold else image.shape[-2:]
        rows, columns = sides = _pair(told["kernel_size"])
        is_plain = (
            _pair(told["stride"]) == sides and _pair(told["padding"]) == (0, 0) and _pair(told["dilation"]) == (1, 1)
        )
        if not is_plain or height % rows or width % columns or image.dim() != (3 if func is fold else 4):
            return func(*args, **given)
        down, across = height // rows, width // columns
        if func is fold:
            channels = image.shape[1] // (rows * columns)
            parts = image.reshape(-1, channels, rows, columns, down, across).permute(0, 1, 4, 2, 5, 3)
            return parts.reshape(-1, channels, height, width)
        channels = image.shape[1]
        parts = image.reshape(-1, channels, down, rows, across, columns).permute(0, 1, 3, 5, 2, 4)
        return parts.reshape(-1, channels * rows * columns, down * across)


def _pair(sides: Any) -> tuple[int, int]:
    first, second = (sides, sides) if isinstance(sides, int) else sides
    return first, second
