"""Ask a model what it sees."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor, nn

from profiling_agent.errors import RequestError
from profiling_agent.evaluation.predictions import Classes
from profiling_agent.progress import Progress, silent


def predict(
    model: nn.Module,
    batches: Iterable[tuple[Tensor, Tensor]],
    *,
    device: str = "cpu",
    progress: Progress = silent,
    num_images: int = 0,
) -> tuple[Classes, Classes]:
    """Return predicted and true class ids, int64, one each per image.

    Batches are (pixel values, labels); `num_images` is only told to `progress`. Activations are quantized per batch,
    so batches have to be as large as they will be when deployed. The model's train or eval mode is left as found.

    Raises:
        RequestError: there is no image.
    """
    predicted: list[Classes] = []
    true: list[Classes] = []
    was_training, done = model.training, 0
    model.eval()
    try:
        with torch.inference_mode():
            for pixel_values, labels in batches:
                logits: Tensor = model(pixel_values=pixel_values.to(device)).logits
                predicted.append(logits.argmax(dim=-1).cpu().numpy())
                true.append(labels.cpu().numpy().astype(np.int64))
                done += len(labels)
                progress("evaluating", done, num_images)
    finally:
        model.train(was_training)
    if not predicted:
        raise RequestError("there are 0 images to evaluate on: raise num_samples")
    return np.concatenate(predicted), np.concatenate(true)
