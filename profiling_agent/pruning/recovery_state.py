"""Checkpoints of a recovery on disk: safetensors and JSON, each epoch whole or not at all."""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from profiling_agent.documents import DocumentError, read_record
from profiling_agent.files import file_sha256, write_bytes, write_text
from profiling_agent.records import Record

STATE = "recovery.json"
# Sums of floats differ this much between numbers of threads; other images or weights differ by more.
SAME_KL = 1e-4
# What AdamW keeps of each parameter.
MOMENTS = ("step", "exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True, kw_only=True)
class Reached:
    """The judged KL before and after each epoch, and the weights of the best epoch; 0 is the model as it was given."""

    kl_before: float
    kls: tuple[float, ...] = ()
    best: Mapping[str, Tensor]

    @property
    def best_epoch(self) -> int:
        """Return the number of the epoch with the lowest KL, the first of equal ones."""
        kls = (self.kl_before, *self.kls)
        return kls.index(min(kls))

    @property
    def best_kl(self) -> float:
        """Return the lowest KL."""
        return min((self.kl_before, *self.kls))

    def after(self, kl: float, student: nn.Module) -> "Reached":
        """Return what is reached after one more epoch, which left `student` with this `kl`."""
        best = _snapshot(student) if kl < self.best_kl else self.best
        return Reached(kl_before=self.kl_before, kls=(*self.kls, kl), best=best)


class _State(Record):
    key: str
    kl_before: float
    kls: tuple[float, ...] = Field(min_length=1)
    sha256: str


class _MismatchError(Exception):
    """A checkpoint isn't one of this recovery; says why."""


def trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters that are trained, shared ones once."""
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def fingerprint(dense: nn.Module, pruned: nn.Module, settings: Mapping[str, Any]) -> str:
    """Return a hash of both models' tensors and of `settings`: what else but the images decides the result."""
    digest = hashlib.sha256(json.dumps(settings, sort_keys=True).encode())
    for model in (dense, pruned):
        for name, tensor in model.state_dict().items():
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def write_state(folder: Path, key: str, reached: Reached, student: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Write weights, moments and the best weights after a whole epoch; the epoch before is removed afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    epoch = len(reached.kls)
    path = _tensors_path(folder, epoch)
    write_bytes(path, save(_tensors(reached, student, optimizer)))
    state = _State(key=key, kl_before=reached.kl_before, kls=reached.kls, sha256=file_sha256(path))
    # From here on the new epoch counts.
    write_text(folder / STATE, state.model_dump_json() + "\n")
    _tensors_path(folder, epoch - 1).unlink(missing_ok=True)


def read_state(
    folder: Path, key: str, kl_before: float, student: nn.Module, optimizer: torch.optim.Optimizer
) -> tuple[Reached, str | None]:
    """Bring `student` and `optimizer` to the last whole epoch in `folder`; return what was reached, and None.

    Where there is none both are left alone; where it is damaged or another recovery's too, and the reason is returned.
    """
    start = Reached(kl_before=kl_before, best={})
    if not (folder / STATE).exists():
        return start, None
    try:
        state, tensors = _read(folder, key, kl_before)
    except (OSError, DocumentError, SafetensorError, _MismatchError) as error:
        reason = " ".join(str(error).split())[:160]
        return start, f"the checkpoint in {str(folder)!r} was not gone on from: {reason}"
    with torch.no_grad():
        for name, parameter in trained_parameters(student).items():
            parameter.copy_(tensors[f"model.{name}"])
    moments = {index: _moments(tensors, name) for index, name in enumerate(trained_parameters(student))}
    optimizer.load_state_dict(optimizer.state_dict() | {"state": {i: held for i, held in moments.items() if held}})
    reached = Reached(kl_before=state.kl_before, kls=state.kls, best={})
    if reached.best_epoch:
        of = "model" if reached.best_epoch == len(reached.kls) else "best"
        reached = replace(reached, best={name: tensors[f"{of}.{name}"] for name in trained_parameters(student)})
    return reached, None


def _tensors_path(folder: Path, epoch: int) -> Path:
    return folder / f"epoch-{epoch:04}.safetensors"


def _snapshot(student: nn.Module) -> dict[str, Tensor]:
    return {name: parameter.detach().clone() for name, parameter in trained_parameters(student).items()}


def _tensors(reached: Reached, student: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return all that the next epoch depends on; the best weights too, unless they are the model's or the given ones."""
    tensors = {f"model.{name}": tensor for name, tensor in _snapshot(student).items()}
    for name, parameter in trained_parameters(student).items():
        tensors |= {f"{kind}.{name}": held for kind, held in optimizer.state.get(parameter, {}).items()}
    if reached.best_epoch not in (0, len(reached.kls)):
        tensors |= {f"best.{name}": tensor for name, tensor in reached.best.items()}
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}


def _moments(tensors: Mapping[str, Tensor], name: str) -> dict[str, Tensor]:
    """Return AdamW's state of one parameter, empty where no image reached it."""
    return {kind: tensors[f"{kind}.{name}"] for kind in MOMENTS if f"{kind}.{name}" in tensors}


def _read(folder: Path, key: str, kl_before: float) -> tuple[_State, dict[str, Tensor]]:
    """Return a checkpoint that is of this recovery in all that can be told, or raise."""
    state = read_record(_State, folder / STATE)
    if state.key != key:
        raise _MismatchError("it is of other models or settings")
    if not math.isclose(state.kl_before, kl_before, rel_tol=SAME_KL, abs_tol=SAME_KL**2):
        raise _MismatchError("it was judged by other images")
    content = _tensors_path(folder, len(state.kls)).read_bytes()
    if hashlib.sha256(content).hexdigest() != state.sha256:
        raise _MismatchError("its tensors are not those that were written")
    return state, load(content)
