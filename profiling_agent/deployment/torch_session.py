"""Sessions of torch: a module as it is, and one that torch.compile turned into native code."""

import itertools
import time
from collections.abc import Callable
from types import FunctionType

import numpy as np
import torch
from torch import Tensor, nn

from profiling_agent.deployment.protocol import Batch
from profiling_agent.errors import ArtifactError
from profiling_agent.foreign import compiled_code
from profiling_agent.modules.inference import floating_dtype
from profiling_agent.quiet import muted

# Each batch size is compiled for itself; torch gives up, and runs eagerly, after this many.
MAX_SIZES = 32
NUMBERS = itertools.count()


def logits_function(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a classifier as a function of images to logits."""

    def logits(pixel_values: Tensor) -> Tensor:
        return module(pixel_values=pixel_values).logits

    return logits


class TorchSession:
    """A module on its device; `call` maps the images to logits, by default through the module itself."""

    def __init__(
        self,
        module: nn.Module,
        *,
        device: str,
        call: Callable[[Tensor], Tensor] | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
    ) -> None:
        """Take a module in eval mode that lies on `device` already."""
        self.module = module
        self.fixed_size: int | None = None
        self.device = torch.device(device)
        self._call = call or logits_function(module)
        self._memory_format = memory_format
        self._dtype = floating_dtype(module)

    def to_device(self, pixel_values: Batch) -> Tensor:
        """Return the images as the module takes them."""
        batch = torch.from_numpy(pixel_values).to(self.device, self._dtype)
        return batch.contiguous(memory_format=self._memory_format)

    def peak_bytes(self) -> int | None:
        """Return the most bytes that this process has had allocated on a CUDA device; None on the CPU."""
        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    @torch.inference_mode()
    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        return self._call(self.to_device(pixel_values)).float().cpu().numpy()

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        """Return a function that runs these images once and returns the milliseconds it took."""
        batch = self.to_device(pixel_values)
        return self._timed_on_cuda(batch) if batch.is_cuda else self._timed_on_cpu(batch)

    def _timed_on_cpu(self, batch: Tensor) -> Callable[[], float]:
        @torch.inference_mode()
        def run_once() -> float:
            started = time.perf_counter()
            self._call(batch)
            return (time.perf_counter() - started) * 1e3

        return run_once

    def _timed_on_cuda(self, batch: Tensor) -> Callable[[], float]:
        @torch.inference_mode()
        def run_once() -> float:
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._call(batch)
            end.record()
            end.synchronize()
            return begin.elapsed_time(end)

        return run_once


class InductorSession(TorchSession):
    """A compiled module; it is compiled for the sizes of batches that come more than once."""

    def __init__(self, module: nn.Module, *, device: str) -> None:
        """Compile `module`, in eval mode and on `device`, when it is first run."""
        layout = memory_format(module)
        module = module.to(memory_format=layout)  # pyright: ignore[reportCallIssue] - torch's stubs lack this overload
        super().__init__(module, device=device, call=_compiled(module), memory_format=layout)
        self._sizes: set[int] = set()
        self._last = 0

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        size, last = len(pixel_values), self._last
        self._last = size
        # A set that another thread adds to can't be walked through.
        larger = [other for other in tuple(self._sizes) if other > size]
        if size in self._sizes or size == last or not larger:
            self._sizes.add(size)
            return super().run(pixel_values)
        # A size that comes once, as the last batch of a split, isn't worth a compilation: no image changes another's
        # logits here, so it is filled up.
        filled = np.zeros((min(larger), *pixel_values.shape[1:]), np.float32)
        filled[:size] = pixel_values
        return super().run(filled)[:size]


def memory_format(module: nn.Module) -> torch.memory_format:
    """Return channels_last for networks of convolutions, for which their kernels are written."""
    dims = [tensor.dim() for tensor in module.state_dict().values()]
    return torch.channels_last if dims.count(4) > dims.count(2) else torch.contiguous_format


def _with_own_code(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return a function with a code object that equals no other: torch keeps what it compiles by that, and runs eagerly past so many.

    Without it the thirty-third model that a process opens would silently not be compiled.
    """
    assert isinstance(function, FunctionType), "it is one of ours"
    code, closure = function.__code__.replace(co_name=f"logits_{next(NUMBERS)}"), function.__closure__
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)


def _refused(said: str) -> ArtifactError:
    return ArtifactError(f"compiled by torch.compile the model can't be run ({said}): deploy it in another runtime")


def _compiled(module: nn.Module) -> Callable[[Tensor], Tensor]:
    with muted("torch.utils._pytree", "torchao"):
        # Without it, inductor doesn't see int8 arithmetic in quantize, dequantize and matmul.
        import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401 # pyright: ignore[reportUnusedImport]
    import torch._inductor.config as inductor

    compiled = torch.compile(_with_own_code(logits_function(module)), dynamic=False)
    known: set[torch.Size] = set()

    def call(pixel_values: Tensor) -> Tensor:
        if pixel_values.shape in known:
            return compiled(pixel_values)
        # Frozen weights are constants that kernels may lay out anew; what is set here counts while it is compiled. A
        # pool of compiling processes would outlive a killed worker.
        with (
            # First, since one thread at a time is muted: in older torch what is configured is so for all threads.
            muted("torch._inductor", "torch._dynamo"),
            inductor.patch(freezing=True, compile_threads=1),
            torch._dynamo.config.patch(recompile_limit=MAX_SIZES),  # pyright: ignore[reportPrivateUsage]
            compiled_code(_refused),
        ):
            logits = compiled(pixel_values)
        known.add(pixel_values.shape)
        return logits

    return call
