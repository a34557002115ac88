"""A model's answers on disk. No torch here: whoever only compares answers shouldn't wait for it."""

from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save_file

from profiling_agent.errors import ArtifactError

Classes = NDArray[np.int64]


def write_predictions(path: Path, predicted: Classes, true: Classes) -> None:
    """Write predicted and true class ids, one each per image and in the same order."""
    if predicted.shape != true.shape:
        raise ValueError(f"{predicted.shape!r} predictions for {true.shape!r} labels: give one of each per image")
    save_file({"predicted": predicted.astype(np.int64), "true": true.astype(np.int64)}, path)


def read_predictions(path: Path) -> tuple[Classes, Classes]:
    """Return predicted and true class ids; ArtifactError where the file isn't what `write_predictions` wrote."""
    try:
        arrays = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ArtifactError(f"the predictions in {str(path)!r} can't be read ({error}): evaluate again") from error
    if arrays.keys() != {"predicted", "true"}:
        raise ArtifactError(f"{str(path)!r} holds {sorted(arrays)!r} and no predictions: evaluate again")
    return arrays["predicted"], arrays["true"]
