"""Torch sessions: eager, captured in CUDA graphs, or compiled by torch.compile."""

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
from profiling_agent.lib.logs import compiled_code, muted
from profiling_agent.lib.machine import available_threads
from profiling_agent.lib.modules import floating_dtype
from profiling_agent.lib.third_party import compiled_code, muted
from profiling_agent.runtimes.base import Batch

# Each batch size is compiled separately; after this many torch stops compiling and runs eagerly.
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
    """Let CUDA round float32 products to TF32, or not; restore the process's setting afterwards."""
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
    """A module on its device; `call` maps images to logits, by default through the module itself.

    On CUDA `tf32` rounds its float32 products to TF32, independently of the process's other sessions.
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
        """Return the images on the device, in the module's dtype and memory format."""
        batch = torch.from_numpy(pixel_values).to(self.device, self._dtype)
        return batch.contiguous(memory_format=self._memory_format)

    def peak_bytes(self) -> int | None:
        """Return the peak of this process's allocations on a CUDA device; None on the CPU."""
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
    """A session that prepares its module for each batch size that comes more than once."""

    def __init__(self, module: nn.Module, *, device: str, call: Callable[[Tensor], Tensor], tf32: bool = False) -> None:
        super().__init__(module, device=device, call=call, memory_format=memory_format(module), tf32=tf32)
        self._sizes: set[int] = set()
        self._last = 0

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        size, last = len(pixel_values), self._last
        self._last = size
        # A copy, because another thread may add to the set.
        larger = [known for known in tuple(self._sizes) if known > size]
        if size in self._sizes or size == last or not larger:
            self._sizes.add(size)
            return super().run(pixel_values)
        # A size that comes once, as the last batch of a split, isn't worth the preparation. Images don't change each
        # other's logits here, so the batch is padded.
        padded = np.zeros((min(larger), *pixel_values.shape[1:]), np.float32)
        padded[:size] = pixel_values
        return super().run(padded)[:size]


class InductorSession(SizedSession):
    """A session whose module torch.compile compiles at its first run."""

    def __init__(self, module: nn.Module, *, device: str) -> None:
        module = to_kernel_layout(module)
        call = _compile_for_cuda(module) if device == "cuda" else _compile_for_cpu(module)
        super().__init__(module, device=device, call=call)


@dataclass(frozen=True, slots=True)
class _CapturedPass:
    """A pass in a CUDA graph, with the tensors that it reads and writes."""

    graph: torch.cuda.CUDAGraph
    images: Tensor
    logits: Tensor


class GraphedSession(SizedSession):
    """A session that captures a CUDA graph for each batch size and replays it: kernels are launched at once."""

    def __init__(self, module: nn.Module, *, tf32: bool = False) -> None:
        module = to_kernel_layout(module)
        self._graphs: dict[torch.Size, _CapturedPass] = {}
        self._lock = threading.Lock()
        super().__init__(module, device="cuda", call=self._replay, tf32=tf32)

    def _replay(self, images: Tensor) -> Tensor:
        # Threads share the tensors of a graph.
        with self._lock:
            captured = self._graphs.get(images.shape)
            if captured is None:
                captured = self._graphs[images.shape] = self._capture(images)
            captured.images.copy_(images)
            captured.graph.replay()
            return captured.logits.clone()

    def _capture(self, images: Tensor) -> _CapturedPass:
        """Capture a pass over images of this shape.

        Raises:
            ArtifactError: the pass waits for the device, or does something else that can't be captured.
        """
        static_images, call = images.clone(), logits_function(self.module)
        current, side = torch.cuda.current_stream(self.device), torch.cuda.Stream(self.device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    call(static_images)
                # Waiting for the device is an error here already: during the capture it would leave the allocator inconsistent.
                with _forbid_waiting():
                    call(static_images)
            current.wait_stream(side)
            graph = torch.cuda.CUDAGraph()
            # cuBLAS keeps a workspace for each stream; the graph's has to be in the graph's own memory.
            torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
            try:
                with torch.cuda.graph(graph):
                    logits = call(static_images)
            finally:
                torch._C._cuda_clearCublasWorkspaces()  # pyright: ignore[reportPrivateUsage]
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            raise ArtifactError(
                f"the model's pass can't be captured in a CUDA graph ({first_line(error)}): deploy it in another runtime"
            ) from error
        return _CapturedPass(graph, static_images, logits)


@contextmanager
def _forbid_waiting() -> Generator[None]:
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def to_kernel_layout(module: nn.Module) -> nn.Module:
    """Return the module with its weights in the memory format of its kernels."""
    return module.to(memory_format=memory_format(module))  # pyright: ignore[reportCallIssue] - torch's stubs lack this overload


def memory_format(module: nn.Module) -> torch.memory_format:
    """Return channels_last for networks of convolutions, whose kernels are written for it."""
    dims = [tensor.dim() for tensor in module.state_dict().values()]
    return torch.channels_last if dims.count(4) > dims.count(2) else torch.contiguous_format


def _with_unique_code(function: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """Return the function with a unique code object, by which torch caches what it compiles, up to a limit.

    Otherwise the thirty-third model that a process opens would silently not be compiled.
    """
    assert isinstance(function, FunctionType), "it is one of ours"
    code, closure = function.__code__.replace(co_name=f"logits_{next(NUMBERS)}"), function.__closure__
    return FunctionType(code, function.__globals__, function.__name__, function.__defaults__, closure)


def _compile_error(message: str) -> ArtifactError:
    return ArtifactError(f"compiled by torch.compile the model can't be run ({message}): deploy it in another runtime")


def _compile_for_cuda(module: nn.Module) -> Callable[[Tensor], Tensor]:
    import torch._inductor.config as inductor
    from torch._inductor.async_compile import shutdown_compile_workers

    compiled = torch.compile(_with_unique_code(logits_function(module)), dynamic=False, mode="reduce-overhead")
    compiled_shapes: set[torch.Size] = set()

    def call(pixel_values: Tensor) -> Tensor:
        torch.compiler.cudagraph_mark_step_begin()
        if pixel_values.shape in compiled_shapes:
            # The next pass writes into the same memory.
            return compiled(pixel_values).clone()
        with (
            muted("torch._inductor", "torch._dynamo"),
            inductor.patch(compile_threads=available_threads()),
            torch._dynamo.config.patch(recompile_limit=MAX_SIZES),  # pyright: ignore[reportPrivateUsage]
            compiled_code(_compile_error),
        ):
            try:
                logits = compiled(pixel_values).clone()
            finally:
                # Compile processes would outlive a killed worker.
                shutdown_compile_workers()
        compiled_shapes.add(pixel_values.shape)
        return logits

    return call


def _compile_for_cpu(module: nn.Module) -> Callable[[Tensor], Tensor]:
    with muted("torch.utils._pytree", "torchao"):
        # Without it, inductor doesn't see int8 arithmetic in quantize, dequantize and matmul.
        import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401 # pyright: ignore[reportUnusedImport]
    import torch._inductor.config as inductor

    compiled = torch.compile(_with_unique_code(logits_function(module)), dynamic=False)
    compiled_shapes: set[torch.Size] = set()

    def call(pixel_values: Tensor) -> Tensor:
        if pixel_values.shape in compiled_shapes:
            return compiled(pixel_values)
        # Frozen weights are constants that kernels may lay out anew; the settings count while it is compiled. A pool of
        # compile processes would outlive a killed worker.
        with (
            # First, since only one thread at a time is muted: older torch has one configuration for all threads.
            muted("torch._inductor", "torch._dynamo"),
            inductor.patch(freezing=True, compile_threads=1),
            torch._dynamo.config.patch(recompile_limit=MAX_SIZES),  # pyright: ignore[reportPrivateUsage]
            compiled_code(_compile_error),
        ):
            logits = compiled(pixel_values)
        compiled_shapes.add(pixel_values.shape)
        return logits

    return call
