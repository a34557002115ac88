"""Two threads of which one loads a model while the other loads or builds one: neither does anything to the other."""

import threading
from collections.abc import Callable, Generator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import zoo
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import PreTrainedModel

from profiling_agent.runtimes.torch_artifact import load_module, save_model

# How long the second thread has to begin: all of it passes where it is made to wait, as it should be.
CHANCE_S = 0.2
LONG_S = 30


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    save_model(zoo.vit(), tmp_path / "model", spec=zoo.SPEC, processor=zoo.processor(), base_model="zoo")
    return tmp_path / "model"


@contextmanager
def at_first_parameters(first: Callable[[], None], second: Callable[[], None]) -> Generator[tuple[Any, Any]]:
    """Give two threads, one worker each, that call these as soon as a module of theirs is given its first parameter."""
    with ThreadPoolExecutor(1) as one, ThreadPoolExecutor(1) as other:
        waiting = {one.submit(threading.get_ident).result(): first, other.submit(threading.get_ident).result(): second}

        def begin(_module: nn.Module, _name: str, _held: Any) -> None:
            waiting.pop(threading.get_ident(), lambda: None)()

        handle = register_module_parameter_registration_hook(begin)
        try:
            yield one, other
        finally:
            one.shutdown()
            other.shutdown()
            handle.remove()


def test_two_threads_that_load_at_once_leave_torchs_initialisers_to_others(
    folder: Path, monkeypatch: pytest.MonkeyPatch
):
    first_in, second_in, first_out = threading.Event(), threading.Event(), threading.Event()
    places = ((nn.init, "kaiming_uniform_"), (nn.init, "normal_"), (PreTrainedModel, "init_weights"))
    before = [getattr(place, name) for place, name in places]
    for (place, name), held in zip(places, before, strict=True):
        # Put back by pytest, so that no other test suffers where this one fails.
        monkeypatch.setattr(place, name, held)

    def first_begins() -> None:
        first_in.set()
        second_in.wait(CHANCE_S)

    def second_begins() -> None:
        second_in.set()
        first_out.wait(LONG_S)

    def load_first() -> nn.Module:
        try:
            return load_module(folder)
        finally:
            first_out.set()

    def load_second() -> nn.Module:
        first_in.wait(LONG_S)
        return load_module(folder)

    with at_first_parameters(first_begins, second_begins) as (one, other):
        models = [running.result() for running in (one.submit(load_first), other.submit(load_second))]

    weights, others = (model.state_dict() for model in models)
    assert all(torch.equal(tensor, others[name]) for name, tensor in weights.items())
    assert [getattr(place, name) for place, name in places] == before
