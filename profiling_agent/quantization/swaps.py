"""What a model says with a few of its modules exchanged, many exchanges at little cost each."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from profiling_agent.modules.prefix import answering, find_prefixes, lasting_outputs
from profiling_agent.progress import Progress, silent
from profiling_agent.quantization.calibrate import run
from profiling_agent.quantization.sites import place_

# Images whose intermediate outputs are held at once: half a gigabyte for ResNet-101 at 224 x 224.
CHUNK = 8


def swapped_logits(
    model: nn.Module,
    swaps: Mapping[str, Mapping[str, nn.Module]],
    images: Tensor,
    *,
    message: str = "layers",
    progress: Progress = silent,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the logits of `model`, and by key those with the modules of each swap in their places, one swap at a time.

    The model is in eval mode, gradients are off, and each exchanged module is called. What is computed before the first
    of them is taken from one full pass. The model is left as it was found.
    """
    prefixes = (
        find_prefixes(model, {key: list(modules) for key, modules in swaps.items()}, images[:1]) if swaps else None
    )
    expected, found = list[Tensor](), {key: list[Tensor]() for key in swaps}
    chunks = images.split(CHUNK)
    for index, chunk in enumerate(chunks):
        outputs, logits = lasting_outputs(model, prefixes.kept if prefixes else (), chunk)
        expected.append(logits)
        for done, (key, modules) in enumerate(swaps.items()):
            progress(message, index * len(swaps) + done, len(chunks) * len(swaps))
            names = prefixes.skipped[key] if prefixes else ()
            before = place_(model, modules)
            with answering(model, {name: outputs[name] for name in names if name in outputs}):
                found[key].append(run(model, chunk))
            place_(model, before)
    return torch.cat(expected), {key: torch.cat(parts) for key, parts in found.items()}
