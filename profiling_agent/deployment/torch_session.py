"""A torch module, compiled or not, as a session."""

import time
from collections.abc import Callable

import torch
from torch import Tensor, nn

from profiling_agent.deployment.protocol import Batch


def floating_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype in which a model takes its images: float32, or that of a model in half precision as a whole."""
    found = {tensor.dtype for tensor in (*module.parameters(), *module.buffers()) if tensor.is_floating_point()}
    # Layers that compute in half precision among float32 ones cast their inputs by themselves.
    return found.pop() if len(found) == 1 else torch.float32


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

    def describe(self) -> dict[str, str]:
        """Return torch's version, its number of threads, and the dtype of what isn't quantized."""
        return {
            "torch": torch.__version__,
            "threads": str(torch.get_num_threads()),
            "precision": str(self._dtype).removeprefix("torch."),
            "device": str(self.device),
        }
