"""Watch every module of a model go in and out of its forward pass."""

from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle


@contextmanager
def watched(model: nn.Module, entered: Callable[[str], Any], left: Callable[[str, Any], Any]) -> Generator[None]:
    """Call `entered(name)` and `left(name, output)` around the forward pass of every module, the root being ''."""
    with ExitStack() as hooks:
        for name, module in model.named_modules():
            before = module.register_forward_pre_hook(partial(_tell, entered, name))
            hooks.callback(before.remove)
            after = module.register_forward_hook(partial(_tell_output, left, name))
            hooks.callback(after.remove)
        yield


def _tell(entered: Callable[[str], Any], name: str, _module: nn.Module, _inputs: Any) -> None:
    entered(name)


def _tell_output(left: Callable[[str, Any], Any], name: str, _module: nn.Module, _inputs: Any, output: Any) -> None:
    left(name, output)


@contextmanager
def counted_passes(*models: nn.Module) -> Generator[Callable[[], int]]:
    """Count the forward passes of `models`, each once if it is named twice; the value yielded gives the number."""
    passes: list[nn.Module] = []
    with ExitStack() as hooks:
        for model in dict.fromkeys(models):
            handle = model.register_forward_hook(lambda module, _inputs, _output: passes.append(module))
            hooks.callback(handle.remove)
        yield lambda: len(passes)


def tensors(output: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in what a module returned, through mappings (ModelOutput is one), tuples and lists."""
    if isinstance(output, torch.Tensor):
        yield output
    elif isinstance(output, dict):
        for part in output.values():
            yield from tensors(part)
    elif isinstance(output, (tuple, list)):
        for part in output:
            yield from tensors(part)


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
