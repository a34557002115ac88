"""Watch named modules in forward passes."""

from collections.abc import Callable, Generator, Iterable
from contextlib import contextmanager
from functools import partial
from typing import Any

from torch import nn
from torch.utils.hooks import RemovableHandle


def _before(_module: nn.Module, inputs: tuple[Any, ...], *, name: str, tell: Callable[[str, Any], None]) -> None:
    tell(name, inputs[0] if inputs else None)


def _after(
    _module: nn.Module, inputs: tuple[Any, ...], output: Any, *, name: str, tell: Callable[[str, Any, Any], None]
) -> None:
    tell(name, inputs[0] if inputs else None, output)


@contextmanager
def watching(
    model: nn.Module,
    names: Iterable[str],
    *,
    before: Callable[[str, Any], None] | None = None,
    after: Callable[[str, Any, Any], None] | None = None,
) -> Generator[None]:
    """Call `before(name, input)` and `after(name, input, output)` around every call of the named modules."""
    handles: list[RemovableHandle] = []
    try:
        for name in names:
            module = model.get_submodule(name)
            if before is not None:
                handles.append(module.register_forward_pre_hook(partial(_before, name=name, tell=before)))
            if after is not None:
                handles.append(module.register_forward_hook(partial(_after, name=name, tell=after)))
        yield
    finally:
        for handle in handles:
            handle.remove()
