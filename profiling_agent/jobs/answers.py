"""What a session says of a split's images, and where that is written down."""

from pathlib import Path
from typing import Any

import numpy as np

from profiling_agent.acquisition.batches import iter_batches
from profiling_agent.artifacts.load import load_processor
from profiling_agent.deployment.protocol import ModelSession
from profiling_agent.errors import RequestError
from profiling_agent.evaluation.predictions import Classes, write_predictions
from profiling_agent.jobs.context import Desk
from profiling_agent.records import Predictions, SplitInfo


def answers(
    session: ModelSession, split: SplitInfo, model: Path, desk: Desk, *, batch_size: int, limit: int | None = None
) -> tuple[Classes, Classes]:
    """Return predicted and true class ids, int64, one each per image; `model` is the saved folder whose processor is used.

    Raises:
        RequestError: there are no images.
    """
    predicted, true, done = list[Any](), list[Any](), 0
    num_images = min(split.num_images, limit or split.num_images)
    batches = iter_batches(desk.path(split.file), load_processor(model), batch_size=batch_size, limit=limit)
    for pixel_values, labels in batches:
        predicted.append(session.run(pixel_values.numpy()).argmax(axis=-1))
        true.append(labels.numpy())
        done += len(labels)
        desk.progress("evaluating", done, num_images)
    if not predicted:
        raise RequestError("there are 0 images to evaluate on: raise num_samples")
    return np.concatenate(predicted).astype(np.int64), np.concatenate(true).astype(np.int64)


def written(split: SplitInfo, predicted: Classes, true: Classes, desk: Desk, name: str = "predictions") -> Predictions:
    """Write answers into the job's folder, and return where they are and how many are right."""
    out = desk.folder / f"{name}.safetensors"
    write_predictions(out, predicted, true)
    return Predictions(
        split=split.name,
        num_images=len(true),
        num_correct=int((predicted == true).sum()),
        file=desk.ref(out, "predictions"),
    )
