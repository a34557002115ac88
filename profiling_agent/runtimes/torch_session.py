"""Torch's runtimes: eager, CUDA graphs and torch.compile. torch is imported when a model is converted or opened."""

import itertools
import os
import shutil
import threading
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from types import FunctionType
from typing import TYPE_CHECKING, Any

import numpy as np

from profiling_agent.errors import ArtifactError
from profiling_agent.lib.io import first_line
from profiling_agent.lib.logs import muted, third_party_errors
from profiling_agent.lib.machine import available_threads
from profiling_agent.runtimes.artifact import WEIGHTS, Recipe
from profiling_agent.runtimes.registry import Batch, ModelSession, Runtime, Source, recommended, timed
from profiling_agent.schemas import Deployment

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

# FBGEMM has int8 kernels for AVX-512's VNNI only (source: docs/facts.md).
TORCH_VNNI = ("avx512_vnni",)
# Compilers in the order that torch tries them; CXX names another one.
COMPILERS = ("g++", "clang++")
# Each batch size is compiled separately; after this many torch stops compiling and runs eagerly.
MAX_SIZES = 32
NUMBERS = itertools.count()
WARM_UPS = 3


class TorchRuntime(Runtime):
    """A runtime that executes torch modules, always available."""

    files = (WEIGHTS,)
    is_torch = True
    # Dynamic layers use 7 bits where 8 would saturate, and static ones compute in float32 unless compiled.
    saturating_kinds = ()

    @classmethod
    def convert(cls, source: Source, deployment: Deployment, folder: Path) -> dict[str, Any]:
        """Write `weights.safetensors`; on the CPU the chosen layers are quantized.

        On CUDA half precision is for the whole model, int8 and float8 for the chosen linear layers of a bfloat16 model.
        """
        import torch

        from profiling_agent.quantization.quantize import quantize_model, quantize_rowwise
        from profiling_agent.runtimes.torch_artifact import HALVES, write_weights

        chosen = recommended(deployment)
        if source.device == "cuda":
            is_rowwise = deployment.scheme in ("dynamic", "float8")
            model = quantize_rowwise(source.module, chosen) if is_rowwise else source.module
            dtype = torch.bfloat16 if is_rowwise else HALVES.get(deployment.scheme)
            return write_weights(model, folder, folded=source.recipe.folded, dtype=dtype)
        calibration = torch.from_numpy(source.calibration).split(source.batch_size)
        quantized = quantize_model(source.module, chosen, calibration=calibration)
        return write_weights(quantized.model, folder, folded=(*source.recipe.folded, *quantized.folded))

    @classmethod
    def open(cls, folder: Path, recipe: Recipe, *, device: str, num_threads: int | None) -> "TorchSession":
        """Open a saved folder; without `num_threads` the process keeps its threads."""
        from profiling_agent.lib.modules import on_device, pin_threads
        from profiling_agent.runtimes.torch_artifact import load_module

        if num_threads:
            pin_threads(num_threads)
        module = on_device(load_module(folder, verify=False), device)
        is_tf32 = recipe.deployment.scheme == "tf32"
        return TorchSession(module, device=device, call=cls.prepared(module, device), tf32=is_tf32)

    @classmethod
    def prepared(cls, module: "nn.Module", device: str) -> "Callable[[Tensor], Tensor] | None":  # noqa: ARG003
        """Return the module as a function that is prepared for each batch size; None to call it as it is."""
        return None


class Eager(TorchRuntime):
    """Eager torch."""

    name = "eager"
    on_cpu = ("float32", "bfloat16", "float16", "dynamic")
    # Int8 without a CUDA graph exists only on the CPU.
    on_cuda = ("float32", "tf32", "bfloat16", "float16")
    int8_instructions = TORCH_VNNI
    mixture = ("dynamic", frozenset({"dynamic", "float16", "bfloat16"}))


class Graphed(TorchRuntime):
    """Torch's own kernels in a CUDA graph, launched at once; the CPU runs it eagerly."""

    name = "graphed"
    on_cuda = ("tf32", "bfloat16", "float16", "dynamic", "float8")

    @classmethod
    def prepared(cls, module: "nn.Module", device: str) -> "CudaGraphs | None":
        """Return the module with its CUDA graphs; None on the CPU."""
        return CudaGraphs(module) if device == "cuda" else None


class Inductor(TorchRuntime):
    """torch.compile with frozen weights, compiled when opened, so only weights are stored."""

    name = "inductor"
    extra = "inductor"
    requires = ("torchao",)
    on_cpu = ("float32", "bfloat16", "static")
    on_cuda = ("float32", "bfloat16", "float16", "dynamic", "float8")
    is_slow_to_convert = True
    int8_instructions = TORCH_VNNI
    saturating_kinds = ("static",)
    mixture = ("static", frozenset({"static", "bfloat16"}))

    @classmethod
    def missing(cls, device: str) -> str | None:
        """Return what is missing: Triton on CUDA; on the CPU torchao's int8 patterns, or a compiler."""
        if device == "cuda":
            advice = "triton isn't installed, with which torch.compile compiles for CUDA: pip install triton"
            return None if find_spec("triton") else advice
        names = (os.environ["CXX"],) if os.environ.get("CXX") else COMPILERS
        if (line := super().missing(device)) or any(map(shutil.which, names)):
            return line
        return f"there is no {names[0]}, with which torch.compile compiles: install a C++ compiler (apt install g++)"

    @classmethod
    def prepared(cls, module: "nn.Module", device: str) -> "Compiled":
        """Return the module that torch.compile compiles."""
        return Compiled(module, device=device)


def logits_function(module: "nn.Module") -> "Callable[[Tensor], Tensor]":
    """Return a classifier as a function of images to logits."""
    return lambda pixel_values: module(pixel_values=pixel_values).logits


class TorchSession(ModelSession):
    """A module on its device.

    `call` maps images to logits and prepares the module for each batch size, which only a size that comes more than
    once is worth; by default the module runs as it is. On CUDA `tf32` rounds its float32 products to TF32,
    independently of the process's other sessions.
    """

    def __init__(
        self,
        module: "nn.Module",
        *,
        device: str,
        call: "Callable[[Tensor], Tensor] | None" = None,
        tf32: bool = False,
    ) -> None:
        import torch

        from profiling_agent.lib.modules import floating_dtype

        dims = [value.dim() for value in module.state_dict().values() if isinstance(value, torch.Tensor)]
        self._memory_format = torch.contiguous_format
        # Kernels of convolutions are written for it, but for those of eager torch on the CPU.
        if dims.count(4) > dims.count(2) and (call is not None or device == "cuda"):
            self._memory_format = torch.channels_last
            module.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue] - torch's stubs lack this overload
        self.module, self.device = module, torch.device(device)
        self._call, self._dtype, self._tf32 = call or logits_function(module), floating_dtype(module), tf32
        self._is_sized, self._sizes, self._last = call is not None, set[int](), 0

    def to_device(self, pixel_values: Batch) -> "Tensor":
        """Return the images on the device, in the module's dtype and memory format."""
        import torch

        batch = torch.from_numpy(pixel_values).to(self.device, self._dtype)
        return batch.contiguous(memory_format=self._memory_format)

    def peak_bytes(self) -> int | None:
        """Return the peak of this process's allocations on a CUDA device; None on the CPU."""
        import torch

        return torch.cuda.max_memory_allocated(self.device) if self.device.type == "cuda" else None

    def _pass(self, batch: "Tensor") -> "Tensor":
        import torch

        with torch.inference_mode():
            if not batch.is_cuda:
                return self._call(batch)
            # Not by `fp32_precision`, after which exporting a model is an error in torch 2.11 to 2.13.
            products: Any = torch.backends.cuda.matmul
            convolutions: Any = torch.backends.cudnn
            before = products.allow_tf32, convolutions.allow_tf32
            products.allow_tf32 = convolutions.allow_tf32 = self._tf32
            try:
                return self._call(batch)
            finally:
                products.allow_tf32, convolutions.allow_tf32 = before

    def run(self, pixel_values: Batch) -> Batch:
        """Return the logits, float32 (n, classes), of images (n, channels, height, width)."""
        size, last = len(pixel_values), self._last
        self._last = size
        # A copy, because another thread may add to the set.
        larger = [known for known in tuple(self._sizes) if known > size]
        if self._is_sized and size not in self._sizes and size != last and larger:
            # A size that comes once, as the last batch of a split, isn't worth the preparation. Images don't change
            # each other's logits here, so the batch is padded.
            padded = np.zeros((min(larger), *pixel_values.shape[1:]), np.float32)
            padded[:size] = pixel_values
            pixel_values = padded
        else:
            self._sizes.add(size)
        return self._pass(self.to_device(pixel_values)).float().cpu().numpy()[:size]

    def enqueued(self, pixel_values: Batch, passes: int) -> float | None:
        """Return the milliseconds of a pass by CUDA events around `passes` that don't wait; None on the CPU."""
        import torch

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

        def run_once() -> None:
            self._pass(batch)
            self._synchronize()

        self._synchronize()
        return timed(run_once)

    def _synchronize(self) -> None:
        if self.device.type == "cuda":
            import torch

            torch.cuda.synchronize(self.device)


class CudaGraphs:
    """A classifier that captures a CUDA graph for each batch size and replays it: kernels are launched at once."""

    def __init__(self, module: "nn.Module") -> None:
        self._call = logits_function(module)
        # By shape of the images: the graph, and the tensors that it reads and writes.
        self._graphs: dict[torch.Size, tuple[torch.cuda.CUDAGraph, Tensor, Tensor]] = {}
        self._lock = threading.Lock()

    def __call__(self, images: "Tensor") -> "Tensor":
        """Return the logits of images on the device; ArtifactError if the pass can't be captured."""
        # Threads share the tensors of a graph.
        with self._lock:
            if images.shape not in self._graphs:
                self._graphs[images.shape] = self._capture(images)
            graph, static_images, logits = self._graphs[images.shape]
            static_images.copy_(images)
            graph.replay()
            return logits.clone()

    def _capture(self, images: "Tensor") -> "tuple[torch.cuda.CUDAGraph, Tensor, Tensor]":
        """Capture a pass over images of this shape; ArtifactError if it waits for the device, or can't be captured."""
        import torch

        static_images, call = images.clone(), self._call
        current, side = torch.cuda.current_stream(images.device), torch.cuda.Stream(images.device)
        side.wait_stream(current)
        try:
            with torch.cuda.stream(side):
                for _ in range(WARM_UPS):
                    call(static_images)
                # Waiting for the device is an error here already: during the capture it would leave the allocator
                # inconsistent.
                before = torch.cuda.get_sync_debug_mode()
                torch.cuda.set_sync_debug_mode("error")
                try:
                    call(static_images)
                finally:
                    torch.cuda.set_sync_debug_mode(before)
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
                f"the pass can't be captured in a CUDA graph ({first_line(error)}): deploy it in another runtime"
            ) from error
        return graph, static_images, logits


class Compiled:
    """A classifier that torch.compile compiles at the first run of each shape."""

    def __init__(self, module: "nn.Module", *, device: str) -> None:
        import torch

        self._shapes: set[torch.Size] = set()
        self._is_cuda = device == "cuda"
        if not self._is_cuda:
            with muted("torch.utils._pytree", "torchao"):
                # Without it, inductor doesn't see int8 arithmetic in quantize, dequantize and matmul.
                import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401 # pyright: ignore[reportUnusedImport]
        # torch caches what it compiles by the code object, up to a limit: with the same one for every model, the
        # thirty-third that a process opens would silently not be compiled.
        function: Any = logits_function(module)
        code = function.__code__.replace(co_name=f"logits_{next(NUMBERS)}")
        unique = FunctionType(code, function.__globals__, function.__name__, None, function.__closure__)
        self._compiled = torch.compile(unique, dynamic=False, mode="reduce-overhead" if self._is_cuda else None)

    def __call__(self, images: "Tensor") -> "Tensor":
        """Return the logits of images on the device; ArtifactError if the model can't be compiled."""
        import torch

        if self._is_cuda:
            torch.compiler.cudagraph_mark_step_begin()
        logits = self._compiled(images) if images.shape in self._shapes else self._compile(images)
        # On CUDA the next pass writes into the same memory.
        return logits.clone() if self._is_cuda else logits

    def _compile(self, images: "Tensor") -> "Tensor":
        """Return the logits of images of a new shape. The settings count while it is compiled."""
        import torch
        import torch._inductor.config as inductor
        from torch._inductor.async_compile import shutdown_compile_workers

        # Frozen weights are constants that kernels may lay out anew; on CUDA they aren't frozen.
        settings = (
            {"compile_threads": available_threads()} if self._is_cuda else {"freezing": True, "compile_threads": 1}
        )

        def refuse(message: str) -> ArtifactError:
            return ArtifactError(
                f"compiled by torch.compile the model can't be run ({message}): deploy it in another runtime"
            )

        with (
            # First, since only one thread at a time is muted: older torch has one configuration for all threads.
            muted("torch._inductor", "torch._dynamo"),
            inductor.patch(settings),
            torch._dynamo.config.patch(recompile_limit=MAX_SIZES),  # pyright: ignore[reportPrivateUsage]
            third_party_errors(refuse),
        ):
            try:
                logits = self._compiled(images)
            finally:
                # Compile processes would outlive a killed worker.
                shutdown_compile_workers()
        self._shapes.add(images.shape)
        return logits
