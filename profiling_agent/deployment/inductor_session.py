"""A module that torch.compile turned into native code, as a session."""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from profiling_agent.deployment.protocol import Batch
from profiling_agent.deployment.silence import muted
from profiling_agent.deployment.torch_session import TorchSession, logits_function

# Each batch size is compiled for itself; torch gives up, and runs eagerly, after this many.
MAX_SIZES = 32


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
        larger = [other for other in self._sizes if other > size]
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


def _compiled(module: nn.Module) -> Callable[[Tensor], Tensor]:
    with muted("torch.utils._pytree", "torchao"):
        # Without it, inductor doesn't see int8 arithmetic in quantize, dequantize and matmul.
        import torchao.quantization.pt2e.quantizer.x86_inductor_quantizer  # noqa: F401 # pyright: ignore[reportUnusedImport]
    import torch._inductor.config as inductor

    compiled = torch.compile(logits_function(module), dynamic=False)
    known: set[torch.Size] = set()

    def call(pixel_values: Tensor) -> Tensor:
        if pixel_values.shape in known:
            return compiled(pixel_values)
        # Frozen weights are constants that kernels may lay out anew; what is set here counts while it is compiled. A
        # pool of compiling processes would outlive a killed worker.
        with (
            inductor.patch(freezing=True, compile_threads=1),
            torch._dynamo.config.patch(recompile_limit=MAX_SIZES),  # pyright: ignore[reportPrivateUsage]
            muted("torch._inductor", "torch._dynamo"),
        ):
            logits = compiled(pixel_values)
        known.add(pixel_values.shape)
        return logits

    return call
