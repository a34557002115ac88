"""A model's answers on disk. No torch here: whoever only compares answers shouldn't wait for it."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from profiling_agent.documents import first_line
from profiling_agent.errors import ArtifactError
from profiling_agent.files import write_bytes

Classes = NDArray[np.int64]
FIELDS = ("predicted", "true")
# What is predicted where the logits name no class.
NO_CLASS = -1


@dataclass(frozen=True, slots=True)
class Answers:
    """Predicted and true class ids, one of each per image.

    An image one of whose logits is NaN or positive infinity has no answer: it counts as wrong, its class is NO_CLASS.
    """

    predicted: Classes
    true: Classes

    @property
    def right(self) -> NDArray[np.bool_]:
        """Return which images were answered right."""
        return self.predicted == self.true


def answers_of(logits: NDArray[np.float32], true: Classes) -> Answers:
    """Return what logits (images, classes) say of images with these true class ids.

    Raises:
        ValueError: these aren't as many rows of logits, of one class at least, as there are class ids.
    """
    if logits.ndim != 2 or logits.shape[1] < 1 or true.shape != (len(logits),):
        raise ValueError(f"logits {logits.shape!r} for {true.shape!r} labels: give a row for each image")
    # A class that is ruled out may have a logit of minus infinity.
    has_answer = (logits < np.inf).all(axis=1) & (logits.max(axis=1) > -np.inf)
    predicted = np.where(has_answer, logits.argmax(axis=1), NO_CLASS).astype(np.int64)
    return Answers(predicted, true.astype(np.int64))


def joined(parts: list[Answers]) -> Answers:
    """Return the answers of some sets of images, at least one, as those of one set, in the order given."""
    return Answers(*(np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS))


def write_predictions(path: Path, answers: Answers) -> None:
    """Write a model's answers."""
    write_bytes(path, save({name: np.ascontiguousarray(getattr(answers, name), np.int64) for name in FIELDS}))


def read_predictions(path: Path) -> Answers:
    """Return the answers in a file; ArtifactError where it is missing or damaged."""
    try:
        held = load_file(path)
        return Answers(*(held[name] for name in FIELDS))
    except (OSError, SafetensorError, KeyError) as error:
        raise ArtifactError(
            f"the predictions in {str(path)!r} can't be read ({first_line(error)}): evaluate again"
        ) from error
