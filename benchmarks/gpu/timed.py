"""One model in a process of its own on the GPU; answers each request on standard input with one line of JSON.

    python benchmarks/gpu/timed.py ARTIFACT|PEER FOLDER BATCH_SIZE DEVICE

Requests: `turn SECONDS` (latencies of single passes, ms), `throughput PASSES` (ms a pass, enqueued without waiting), `memory`
(bytes allocated and reserved at most).
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from profiling_agent.runtimes.artifact import open_session
from profiling_agent.runtimes.registry import noise_batch
from profiling_agent.runtimes.torch_artifact import load_module, load_recipe
from profiling_agent.runtimes.torch_session import TorchSession

# A turn begins with passes that bring the clocks up.
WARM_S, MIN_PASSES = 0.1, 20
# What a user gets in a few lines without this package.
PEERS = ("torch default", "compile bfloat16", "torchao int8", "torchao float8")


def peer(name: str, folder: Path, device: str) -> TorchSession:
    """Return a float32 model as other tools deploy it: torch as it comes, compiled in bfloat16, or with torchao's int8 or float8 under it."""
    model: nn.Module = load_module(folder, verify=False).eval()
    if name == "torch default":
        return TorchSession(model.to(device), device=device)
    model = model.to(device, torch.bfloat16)
    if name.startswith("torchao"):
        from torchao.quantization import (
            Float8DynamicActivationFloat8WeightConfig,
            Int8DynamicActivationInt8WeightConfig,
            PerRow,
            quantize_,
        )

        config: Any = (
            Int8DynamicActivationInt8WeightConfig()
            if name == "torchao int8"
            else Float8DynamicActivationFloat8WeightConfig(granularity=PerRow())
        )
        head = [module for module in model.modules() if isinstance(module, nn.Linear)][-1]
        quantize_(model, config, filter_fn=lambda module, _name: isinstance(module, nn.Linear) and module is not head)

    def logits(pixel_values: Tensor) -> Tensor:
        return model(pixel_values=pixel_values).logits

    compiled = torch.compile(logits, mode="reduce-overhead", dynamic=False)
    session = TorchSession(model, device=device, call=lambda images: compiled(images).clone())
    # Quantized weights say nothing of the images' type.
    session._dtype = torch.bfloat16  # pyright: ignore[reportPrivateUsage]
    return session


class Timer:
    """Requests by name, for one session and one batch."""

    def __init__(self, session: Any, images: Any) -> None:
        """Run the batch once, so that everything is compiled and captured."""
        self._session, self._images = session, images
        self.logits = session.run(images)
        session.run(images)
        self._run_once: Callable[[], float] = session.bound(images)

    def turn(self, seconds: float) -> list[float]:
        """Return the latencies of passes for so many seconds, at least `MIN_PASSES`, in ms; the warm-up is left out."""
        self._passes_for(WARM_S, 1)
        return self._passes_for(seconds, MIN_PASSES)

    def _passes_for(self, seconds: float, at_least: int) -> list[float]:
        began, times = time.monotonic(), list[float]()
        while len(times) < at_least or time.monotonic() - began < seconds:
            times.append(self._run_once())
        return times

    def throughput(self, passes: float) -> float | None:
        """Return ms a pass of passes that are enqueued without waiting, None on the CPU."""
        enqueued = getattr(self._session, "enqueued", None)
        return None if enqueued is None else enqueued(self._images, int(passes))

    def memory(self, _: float = 0.0) -> list[int]:
        """Return the most bytes allocated and reserved; zeros on the CPU."""
        if not torch.cuda.is_initialized():
            return [0, 0]
        return [torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()]


def main() -> None:
    """Open the model, tell its first logits, and answer until standard input ends."""
    name, folder, batch_size, device = sys.argv[1:]
    began = time.monotonic()
    session = peer(name, Path(folder), device) if name in PEERS else open_session(Path(folder), device=device)
    images = noise_batch(load_recipe(Path(folder)).input, int(batch_size))
    timer = Timer(session, images)
    _answer({"ready_s": time.monotonic() - began, "logits": timer.logits[:8].tolist()})
    for line in sys.stdin:
        request, *argument = line.split()
        _answer(getattr(timer, request)(*map(float, argument)))


def _answer(content: object) -> None:
    print(json.dumps(content), file=sys.__stdout__, flush=True)


if __name__ == "__main__":
    main()
