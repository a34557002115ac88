"""Sessions of torch: a module as it is, captured in CUDA graphs, or compiled by torch.compile."""

import itertools
import threading
import time
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FunctionType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.io import first_line
from profiling_agent.lib.machine import available_threads
from profiling_agent.lib.third_party import compiled_code, muted
from profiling_agent.modules.inference import floating_dtype
from profiling_agent.runtimes.registry import Batch

# Each batch size is compiled for itself; torch gives up, and runs eagerly, after this many.
MAX_SIZES = 32
NUMBERS = itertools.count()
WARM_UPS = 3


def logits_function(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a classifier as a function of images to logits."""

    def logits(pixel_values: Tensor) -> Tensor:
        return module(pixel_values=pixel_values).logits

    return logits


@contextmanager
def tf32_products(*, allowed: bool) -> Generator[None]:
    """Let CUDA round float32 products to TF32, or not; afterwards the process is as before."""
    # Not by `fp32_precision`, after which exporting a model is an error in torch 2.11 to 2.13.
    products: Any = torch.backends.cuda.matmul
    convolutions: Any = torch.backends.cudnn
    before = products.allow_tf32, convolutions.allow_tf32
    products.allow_tf32 = convolutions.allow_tf32 = allowed
    try:
        yield
    finally:
        products.allow_tf32, convolutions.allow_tf32 = before


class TorchSession:
    """A module on its device; `call` maps the images to logits, by default through the module itself.

    On CUDA `tf32` rounds its float32 products to TF32, whatever other sessions of the process do.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        device: str,
        call: Callable[[Tensor], Tensor] | None = None,
        memory_format: torch.memory_format = torch.contiguous_format,
        tf32: bool = False,
    ) -> None:
        self.module = module
        self._tf32 = tf32
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
    def _pass(self, batch: Tensor) -> Tensor:
        if not batch.is_cuda:
            return self._call(batch)
        with tf32_products(allowed=self._tf32):
            return self._call(batch)

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        return self._pass(self.to_device(pixel_values)).float().cpu().numpy()

    def enqueued(self, pixel_values: Batch, passes: int) -> float | None:
        """Return the milliseconds of a pass by CUDA events around `passes` that don't wait for each other; None on the CPU."""
        batch = self.to_device(pixel_values)
        if not batch.is_cuda:
            return None
        self._pass(batch)
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        begin.record()
        for _ in range(passes):
            self._pass(batch)
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / passes

    def bound(self, pixel_values: Batch) -> Callable[[], float]:
        """Return a function that runs these images once and returns the milliseconds it took."""
        batch = self.to_device(pixel_values)

        def run_once() -> float:
            self._synchronize()
            started = time.perf_counter()
            self._pass(batch)
            self._synchronize()
            return (time.perf_counter() - started) * 1e3

        return run_once

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


class SizedSession(TorchSession):
    """A module that is prepared for each size of batches that comes more than once."""

    def __init__(self, module: nn.Module, *, device: str, call: Callable[[Tensor], Tensor], tf32: bool = False) -> None:
        super().__init__(module, device=device, call=call, memory_format=memory_format(module), tf32=tf32)
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
        # A size that comes once, as the last batch of a split, isn't worth the preparation: no image changes another's
        # logits here, so it is filled up.
        filled = np.zeros((min(larger), *pixel_values.shape[1:]), np.float32)
        filled[:size] = pixel_values
        return super().run(filled)[:size]


class InductorSession(SizedSession):
    """A module that torch.compile compiles when it is first run."""

    def __init__(self, module: nn.Module, *, device: str) -> None:
        module = in_its_layout(module)
        call = _compiled_on_cuda(module) if device == "cuda" else _compiled(module)
        super().__init__(module, device=device, call=call)


@dataclass(frozen=True, slots=True)
class _Captured:
    """A pass in a CUDA graph: what it reads, and what it writes."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    logits: Tensor


class GraphedSession(SizedSession):
    """A module whose pass is captured in a CUDA graph for each size, and replayed: its kernels are launched at once."""

    def __init__(self, module: nn.Module, *, tf32: bool = False) -> None:
        module = in_its_layout(module)
        self._graphs: dict[torch.Size, _Captured] = {}
        self._lock = threading.Lock()
        super().__init__(module, device="cuda", call=self._replayed, tf32=tf32)

    def _replayed(self, images: Tensor) -> Tensor:
        # Threads share what a graph reads and writes.
        with self._lock:
            captured = self._graphs.get(images.shape)
            if captured is None:
                captured = self._graphs[images.shape] = self._capture(images)
            captured.images.copy_(images)
            captured.graph.replay()
            return captured.logits.clone()

    def _capture(self, images: Tensor) -> _Captured:
        """Capture a pass over images of this shape.

        Raises:
            ArtifactError: the pass waits for the device, or does something else that a graph can't hold.
        """
        held, call = images.clone(), logits_function(self.module)
        here, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(here)
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    call(held)
                # What waits for the device is an error here already: amid a capture it would leave the allocator in disorder.
                with _waiting_refused():
                    call(held)
            here.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # cuBLAS keeps one workspace for each stream: the graph's has to lie in the graph's own memory.
            torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
            try:
                with torch.cuda.graph(graph):
                    logits = call(held)
            finally:
                torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ArtifactError(
                f"the model's pass can't be captured in a CUDA graph ({first_line(error)}): deploy it in another runtime"
            ) from error
        return _Captured(graph, held, logits)


@contextmanager
def _waiting_refused() -> Generator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def in_its_layout(module: nn.Module) -> nn.Module:
    """Return the module with its weights in the memory format that its kernels are written for."""
    return module.to(memory_format=memory_format(module))  # pyright: ignore[reportCallIssue] - torch's stubs lack this overload


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


def _compiled_on_cuda(module: nn.Module) -> Callable[[Tensor], Tensor]:
    """Return a module compiled to CUDA graphs."""
    import torch._inductor.config as inductor
    from torch._inductor.async_compile import shutdown_compile_workers

    compiled = torch.compile(_with_own_code(logits_function(module)), dynamic=False, mode="reduce-overhead")
    known: set[torch.Size] = set()

    def call(pixel_values: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        if pixel_values.shape in known:
            # The next pass writes into the same memory.
            return compiled(pixel_values).clone()
        with (
            muted("torch._inductor", "torch._dynamo"),
            inductor.patch(compile_threads=available_threads()),
            torch._dynamo.config.patch(recompile_limit=MAX_SIZES),  # pyright: ignore[reportPrivateUsage]
            compiled_code(_refused),
        ):
            try:
                logits = compiled(pixel_values).clone()
            finally:
                # Compiling processes would outlive a killed worker.
                shutdown_compile_workers()
        known.add(pixel_values.shape)
        return logits

    return call


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
