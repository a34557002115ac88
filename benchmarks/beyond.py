"""What may lose less than the engine does: evidence taken again after some of the cuts, and the classifier fitted to the dense logits.

    python benchmarks/beyond.py [--models DIR...] [--data DIR] [--share 0.5] [--json FILE]

Points of top-1 lost on the 9,000 test images of pruning_tradeoff.py, on three draws of calibration images, at one share of the params; paired with
what the engine does as it is. Nothing of it is in the engine; the log says what came of it (docs/decisions/LOG.md, 2026-11-24).
"""

import argparse
import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from checks import finish, stamped
from numpy.typing import NDArray
from pruning_tradeoff import DRAWS, NAMES, SHARED
from torch import Tensor, nn
from tradeoff_methods import Ours, folded
from tradeoff_subject import Draw, Subject
from transformers import AutoImageProcessor, AutoModelForImageClassification

from profiling_agent.modules.divergence import mean_kl

# The first images were looked at while the engine was written.
LOOKED_AT = 1000
# What the engine's own steps are fitted to, of 256 images; the others judge.
NUM_FITTED = 192
# Of the features' mean variance: of so few images a classifier learns nothing but where it was pushed to.
HEAD_RIDGE = 1.0


def again(draw: Draw, share: float, rounds: int) -> nn.Module:
    """Return the model cut in so many equal parts of the share, with new evidence for each; the first is what the engine does."""
    subject, model = draw.subject, draw.subject.model
    for number in range(1, rounds + 1):
        left = sum(parameter.numel() for parameter in model.parameters())
        wanted = (1 - share * number / rounds) * subject.params
        now = Draw(Subject(subject.name, model, subject.processor, subject.data, subject.num_test), draw.seed)
        model = folded(now, Ours.prepare(now).allocated(1 - wanted / left))
    return model


def with_head(draw: Draw, model: nn.Module) -> nn.Module:
    """Return the model with its last linear layer fitted to the dense model's logits, near its weights; as it is where no layer gives the logits."""
    fitted, images = copy.deepcopy(model).eval(), draw.images[0][:NUM_FITTED]
    heads = {name: layer for name, layer in fitted.named_modules() if isinstance(layer, nn.Linear)}
    seen: dict[str, tuple[Tensor, Tensor]] = {}

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        return lambda _layer, given, returned: seen.__setitem__(name, (given[0], returned))

    hooks = [layer.register_forward_hook(watch(name)) for name, layer in heads.items()]
    with torch.no_grad():
        logits = fitted(pixel_values=images).logits
        expected = draw.subject.model(pixel_values=images).logits
    for hook in hooks:
        hook.remove()
    for name, (features, returned) in seen.items():
        if returned.shape == logits.shape and torch.equal(returned, logits):
            _fit_(heads[name], features.double(), expected.double())
    return fitted


def _fit_(layer: nn.Linear, features: Tensor, expected: Tensor) -> None:
    start = layer.weight.detach().double()
    mean, target = features.mean(0), expected.mean(0)
    centred = features - mean
    gram = centred.T @ centred / len(features)
    missing = (expected - target - centred @ start.T).T @ centred / len(features)
    ridge = HEAD_RIDGE * gram.diagonal().mean() * torch.eye(len(gram), dtype=gram.dtype)
    weight = start + torch.linalg.solve(gram + ridge, missing.T).T
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(target - weight @ mean)


def judged_kl(draw: Draw, model: nn.Module) -> float:
    """Return the KL to the dense model, in nats, on images that nothing was fitted to."""
    images = draw.images[0][NUM_FITTED:]
    with torch.no_grad():
        return mean_kl(draw.subject.model(pixel_values=images).logits, model.eval()(pixel_values=images).logits)


def main() -> int:
    """Run and print; there is no bound, as nothing of this is in the engine."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", default=[str(SHARED / "models" / f"{name}-cifar10") for name in NAMES])
    parser.add_argument("--data", type=Path, default=SHARED / "data" / "cifar10")
    parser.add_argument("--share", type=float, default=0.5)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for folder in asked.models:
        loaded: Any = AutoModelForImageClassification.from_pretrained(folder, use_safetensors=True)
        processor = AutoImageProcessor.from_pretrained(folder, backend="pil")
        subject = Subject(Path(folder).name.removesuffix("-cifar10"), loaded.eval(), processor, asked.data)
        dense = subject.answers(subject.model)
        for seed in DRAWS:
            rows += _of_draw(Draw(subject, seed), asked.share, dense)
    return finish([], rows, asked.json)


def _of_draw(draw: Draw, share: float, dense: NDArray[np.bool_]) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []
    for rounds in (1, 2, 3):
        model = again(draw, share, rounds)
        for head, made in (("as it is", model), ("fitted", with_head(draw, model))):
            lost = float(dense[LOOKED_AT:].mean() - draw.subject.answers(made)[LOOKED_AT:].mean())
            row: dict[str, Any] = {
                "model": draw.subject.name,
                "draw": draw.seed,
                "rounds": rounds,
                "head": head,
                "kl": judged_kl(draw, made),
                "lost": lost,
            }
            rows.append(stamped(row))
            print(
                f"{row['model']:8} draw {draw.seed} evidence {rounds}x, head {head:8}: KL {row['kl']:.4f}, "
                f"{100 * lost:.2f} points lost",
                flush=True,
            )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())
