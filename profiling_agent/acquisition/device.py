"""Where the model runs."""

from typing import Literal

import torch

from profiling_agent.errors import RequestError


def resolve_device(name: str) -> Literal["cpu", "cuda"]:
    """Return `cpu` or `cuda` for `auto`, `cpu` or `cuda`.

    Raises:
        RequestError: CUDA was asked for and this machine has none, or the name is another one.
    """
    if name not in ("auto", "cpu", "cuda"):
        raise RequestError(f"device is {name!r}: use auto, cpu or cuda")
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise RequestError("device is 'cuda' but torch finds no CUDA device: use auto or cpu")
    return "cuda" if has_cuda and name != "cpu" else "cpu"
