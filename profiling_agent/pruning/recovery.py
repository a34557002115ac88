"""Recovery of a pruned model: a few epochs of distillation from the dense model."""

import copy
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from profiling_agent.errors import PruningError
from profiling_agent.lib.logs import Progress, silent
from profiling_agent.lib.modules import device_of, divergences, mean_kl, preserving_state

# The shared ViT, cut by 57% and compensated to a KL of 0.20, gets to 0.14, 0.11 and 0.09 in 3 epochs of 1,000 images at 1e-5, 5e-5 and 2e-4; at
# 1e-3 it diverges, and so does the ResNet. Large pretrained models want the lower rates.
LEARNING_RATE = 5e-5
# On the ViT, temperatures 1, 2 and 4 end at 0.095, 0.089 and 0.086 (rate 2e-4), on the ResNet at 0.175, 0.170 and 0.171.
TEMPERATURE = 2.0
MAX_GRADIENT_NORM = 1.0
# Epochs without a lower KL before training stops.
PATIENCE = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovered:
    """The model of the best epoch, and its KL divergence to the dense model on the held-out images, in nats.

    `model` is the pruned model itself if no epoch lowered the KL. `stopped` is the reason why training ended.
    """

    model: nn.Module
    epochs_run: int
    kl_before: float
    kl_after: float
    stopped: str


def recover(
    dense: nn.Module,
    pruned: nn.Module,
    batches: Callable[[int], Iterable[Tensor]],
    judged: Callable[[], Iterable[Tensor]],
    *,
    epochs: int,
    learning_rate: float = LEARNING_RATE,
    expected: Tensor | None = None,
    progress: Progress = silent,
) -> Recovered:
    """Return a copy of `pruned` trained to reproduce the logits of `dense`; both are unchanged.

    `batches(epoch)` gives the training images of an epoch, counted from 0; `judged()` gives held-out ones that choose the best epoch. Both are
    pixel_values (b, c, h, w). `expected` are the logits of `dense` on the latter, if known, (images, classes). The loss is the KL divergence of
    logits at temperature 2, times its square (Hinton et al., 2015); AdamW without decay, its rate a cosine over epochs. All is in eval mode: batch
    norms keep their statistics, and dropout is off.

    Raises:
        PruningError: there are no images, no parameter is trainable, or a model returns logits that aren't finite.
    """
    with preserving_state(dense), preserving_state(pruned):
        dense.eval()
        student = copy.deepcopy(pruned).eval()
        expected = _logits(dense, judged()) if expected is None else expected.to(device_of(dense))
        if not (trainable := [parameter for parameter in student.parameters() if parameter.requires_grad]):
            raise PruningError("no parameter of the pruned model requires gradients; there is nothing to train")
        optimizer = torch.optim.AdamW(trainable, lr=learning_rate, weight_decay=0.0)
        kls = [mean_kl(expected, _logits(student, judged()))]
        if not math.isfinite(kls[0]):
            raise PruningError(f"the KL of the pruned model to the dense one is {kls[0]!r}; cut less")
        best_weights, stopped = list[Tensor](), f"all of {epochs} epochs were run"
        for epoch in range(epochs):
            progress("recovering", epoch, epochs)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate * (1 + math.cos(math.pi * epoch / epochs)) / 2
            kl = math.nan
            if _train(dense, student, trainable, optimizer, batches(epoch)):
                kl = mean_kl(expected, _logits(student, judged()))
            if not math.isfinite(kl):
                stopped = f"in epoch {epoch + 1} the loss or the logits were not finite"
                break
            if kl < min(kls):
                best_weights = [parameter.detach().clone() for parameter in trainable]
            kls.append(kl)
            if len(kls) - 1 - kls.index(min(kls)) >= PATIENCE:
                stopped = f"the KL did not fall for {PATIENCE} epochs"
                break
        progress("recovering", epochs, epochs)
    if best_weights:
        with torch.no_grad():
            for parameter, saved in zip(trainable, best_weights, strict=True):
                parameter.copy_(saved)
                parameter.grad = None
        for module, original in zip(student.modules(), pruned.modules(), strict=True):
            module.training = original.training
    return Recovered(
        model=student if best_weights else pruned,
        epochs_run=len(kls) - 1,
        kl_before=kls[0],
        kl_after=min(kls),
        stopped=stopped,
    )


def _train(
    dense: nn.Module,
    student: nn.Module,
    trainable: list[nn.Parameter],
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Tensor],
) -> bool:
    """Train one epoch, and return whether every loss was finite; the first that isn't ends it."""
    device, count = device_of(student), 0
    for images in batches:
        pixel_values = images.to(device, trainable[0].dtype)
        with torch.no_grad():
            target = dense(pixel_values=pixel_values).logits
        with torch.enable_grad():
            loss = distillation(target, student(pixel_values=pixel_values).logits)
            optimizer.zero_grad()
            loss.backward()
        norm = nn.utils.clip_grad_norm_(trainable, MAX_GRADIENT_NORM)
        if not torch.isfinite(loss) or not torch.isfinite(norm):
            return False
        optimizer.step()
        count += len(images)
    if not count:
        raise PruningError("there are 0 images to recover with; give training images")
    return True


def distillation(target: Tensor, logits: Tensor, temperature: float = TEMPERATURE) -> Tensor:
    """Return the mean KL(target || logits), both (images, classes) and divided by `temperature`, times its square.

    The square restores the gradient's size, which falls with it (Hinton et al., 2015, section 2).
    """
    return divergences(target / temperature, logits / temperature).mean() * temperature**2


def _logits(model: nn.Module, batches: Iterable[Tensor]) -> Tensor:
    device, dtype = device_of(model), next(model.parameters()).dtype
    with torch.no_grad():
        logits = [model(pixel_values=images.to(device, dtype)).logits for images in batches]
    if not logits:
        raise PruningError("there are 0 images to judge the recovery by; give some that it isn't trained on")
    return torch.cat(logits)
