"""Hooks: callbacks around the forward passes of a model's modules, gone at the end."""

from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

Before = Callable[[str, Any], Any]
After = Callable[[str, Any, Any], Any]


@contextmanager
def watching(
    model: nn.Module, names: Iterable[str] | None = None, *, before: Before | None = None, after: After | None = None
) -> Generator[None]:
    """Call `before(name, input)` and `after(name, input, output)` around every call of the named modules, or of all.

    The input is the first argument, by position or by name; the root's name is ''. What they return counts for nothing.
    """
    with ExitStack() as hooks:
        for name in [name for name, _ in model.named_modules()] if names is None else names:
            module = model.get_submodule(name)
            if before is not None:
                tell = partial(_before, name=name, tell=before)
                hooks.callback(module.register_forward_pre_hook(tell, with_kwargs=True).remove)
            if after is not None:
                tell = partial(_after, name=name, tell=after)
                hooks.callback(module.register_forward_hook(tell, with_kwargs=True).remove)
        yield


def _before(_module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, name: str, tell: Before) -> None:
    tell(name, _first(args, kwargs))


def _after(
    _module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: Any, *, name: str, tell: After
) -> None:
    tell(name, _first(args, kwargs), output)


def _first(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    return next(iter((*args, *kwargs.values())), None)


@contextmanager
def counted_passes(*models: nn.Module) -> Generator[Callable[[], int]]:
    """Count the forward passes of `models`, each once if it is named twice; the value yielded gives the number."""
    passes: list[str] = []
    with ExitStack() as watched:
        for model in dict.fromkeys(models):
            watched.enter_context(watching(model, [""], after=lambda name, _input, _output: passes.append(name)))
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
