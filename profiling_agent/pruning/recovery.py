"""Recovery: a few epochs of distillation from the dense model, with a checkpoint after each."""

import copy
import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from pydantic import Field
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor, nn

from profiling_agent.documents import DocumentError, read_record
from profiling_agent.errors import PruningError, RequestError
from profiling_agent.files import file_sha256, write_bytes, write_text
from profiling_agent.modules.divergence import divergences, mean_kl
from profiling_agent.modules.inference import device_of, left_as_found
from profiling_agent.progress import Progress, silent
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


# The shared ViT, cut by 57% and compensated to a KL of 0.20, comes to 0.14, 0.11 and 0.09 in 3 epochs of 1,000 images at
# 1e-5, 5e-5 and 2e-4; 1e-3 undoes it, and the ResNet's too. Large pretrained models want the lower ones.
LEARNING_RATE = 5e-5
# There 1, 2 and 4 end at 0.095, 0.089 and 0.086 (2e-4), the ResNet's at 0.175, 0.170 and 0.171.
TEMPERATURE = 2.0
MAX_GRADIENT_NORM = 1.0
# Epochs without a lower KL after which there is nothing more to hope for.
PATIENCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The model of the best epoch, and its KL divergence to the dense model on the judged images, in nats.

    `model` is the pruned model itself where no epoch lowered the KL. `stopped` says why there were no more epochs,
    `note` why a checkpoint that was there was not gone on from.
    """

    model: nn.Module
    epochs_run: int
    kl_before: float
    kl_after: float
    stopped: str
    note: str | None = None


def recover(  # noqa: PLR0913 (all that the result depends on)
    dense: nn.Module,
    pruned: nn.Module,
    batches: Callable[[int], Iterable[Tensor]],
    judged: Callable[[], Iterable[Tensor]],
    *,
    epochs: int,
    folder: Path,
    seed: int = 0,
    learning_rate: float = LEARNING_RATE,
    expected: Tensor | None = None,
    progress: Progress = silent,
) -> Recovered:
    """Return a copy of `pruned` that was trained to say what `dense` says; both are left as found.

    `batches(epoch)` gives the training images of an epoch from 0 on, `judged()` others that choose the best epoch;
    both are pixel_values (b, c, h, w) and the same for the same `seed`, which belongs to them. `expected` are the logits
    of `dense` on the latter, where they are known, (images, classes). The loss is the KL
    divergence of logits at temperature 2, times its square (Hinton et al., 2015); AdamW without decay, its rate a
    cosine over epochs. All is in eval mode: batch norms keep their statistics and nothing is drawn at random, so a
    recovery that was interrupted goes on after its last whole epoch, kept in `folder`, and ends with the same weights.

    Raises:
        RequestError: `epochs` isn't positive.
        PruningError: there are no images, nothing can be trained, or a model gives logits that aren't finite.
    """
    if epochs < 1:
        raise RequestError(f"a recovery of {epochs!r} epochs trains nothing; ask for at least 1")
    with left_as_found(dense), left_as_found(pruned):
        dense.eval()
        student = copy.deepcopy(pruned).eval()
        expected = _logits(dense, judged()) if expected is None else expected.to(device_of(dense))
        optimizer = torch.optim.AdamW(_trained(student), lr=learning_rate, weight_decay=0.0)
        kl_before = mean_kl(expected, _logits(student, judged()))
        if not math.isfinite(kl_before):
            raise PruningError(f"the KL of the pruned model to the dense one is {kl_before!r}; cut less")
        key = fingerprint(dense, pruned, {"epochs": epochs, "seed": seed, "learning_rate": learning_rate})
        reached, note = read_state(folder, key, kl_before, student, optimizer)
        while (stopped := _reason_to_stop(reached, epochs)) is None:
            epoch = len(reached.kls)
            progress("recovering", epoch, epochs)
            rate = learning_rate * (1 + math.cos(math.pi * epoch / epochs)) / 2
            for group in optimizer.param_groups:
                group["lr"] = rate
            kl = math.nan
            if _train(dense, student, optimizer, batches(epoch)):
                kl = mean_kl(expected, _logits(student, judged()))
            if not math.isfinite(kl):
                stopped = f"in epoch {epoch + 1} the loss or the logits were not finite"
                break
            reached = reached.after(kl, student)
            write_state(folder, key, reached, student, optimizer)
        progress("recovering", epochs, epochs)
    return _best(pruned, student, reached, stopped, note)


def _reason_to_stop(reached: Reached, epochs: int) -> str | None:
    if len(reached.kls) - reached.best_epoch >= PATIENCE:
        return f"the KL did not fall for {PATIENCE} epochs"
    return f"all of {epochs} epochs were run" if len(reached.kls) >= epochs else None


def _trained(student: nn.Module) -> list[nn.Parameter]:
    if not (trained := trained_parameters(student)):
        raise PruningError("no parameter of the pruned model requires gradients; there is nothing to train")
    return list(trained.values())


def _train(dense: nn.Module, student: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterable[Tensor]) -> bool:
    """Train one epoch, and say whether every loss was finite; the first that isn't ends it."""
    device, count = device_of(student), 0
    trained = _trained(student)
    for images in batches:
        pixel_values = images.to(device, trained[0].dtype)
        with torch.no_grad():
            target = dense(pixel_values=pixel_values).logits
        with torch.enable_grad():
            loss = distillation(target, student(pixel_values=pixel_values).logits)
            optimizer.zero_grad()
            loss.backward()
        norm = nn.utils.clip_grad_norm_(trained, MAX_GRADIENT_NORM)
        if not torch.isfinite(loss) or not torch.isfinite(norm):
            return False
        optimizer.step()
        count += len(images)
    if not count:
        raise PruningError("there are 0 images to recover with; give training images")
    return True


def distillation(target: Tensor, logits: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Return the mean KL(target || logits), both (images, classes) and divided by `temperature`, times its square.

    The square keeps the gradient's size, which falls with it (Hinton et al., 2015, section 2).
    """
    return divergences(target / temperature, logits / temperature).mean() * temperature**2


def _logits(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    device, dtype = device_of(model), next(model.parameters()).dtype
    with torch.no_grad():
        logits = [model(pixel_values=images.to(device, dtype)).logits for images in batches]
    if not logits:
        raise PruningError("there are 0 images to judge the recovery by; give some that it isn't trained on")
    return torch.cat(logits)


def _best(pruned: nn.Module, student: nn.Module, reached: Reached, stopped: str, note: str | None) -> Recovered:
    """Return the best epoch's weights in the modes of `pruned`, or `pruned`."""
    model = pruned
    if reached.best_epoch:
        model = student
        with torch.no_grad():
            for name, parameter in trained_parameters(model).items():
                parameter.copy_(reached.best[name])
                parameter.grad = None
        for module, like in zip(model.modules(), pruned.modules(), strict=True):
            module.training = like.training
    return Recovered(
        model=model,
        epochs_run=len(reached.kls),
        kl_before=reached.kl_before,
        kl_after=reached.best_kl,
        stopped=stopped,
        note=note,
    )
