"""Predictions on disk, and the ledger of tests on held-out images. Imports no torch."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
from filelock import FileLock
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from profiling_agent.errors import ArtifactError
from profiling_agent.lib import io
from profiling_agent.schemas import Opening, Record

Classes = NDArray[np.int64]
# Predicted class if the logits have none.
NO_CLASS = -1


@dataclass(frozen=True, slots=True)
class Answers:
    """Predicted and true class ids, one of each per image.

    An image with a NaN or positive infinite logit has no answer: it counts as wrong, and its class is NO_CLASS.
    """

    predicted: Classes
    true: Classes

    @property
    def right(self) -> NDArray[np.bool_]:
        """Return which images were answered correctly."""
        return self.predicted == self.true


def answers_of(logits: NDArray[np.float32], true: Classes) -> Answers:
    """Return the answers of logits (images, classes) for images with these true class ids."""
    # A class that is ruled out may have a logit of minus infinity.
    has_answer = (logits < np.inf).all(axis=1) & (logits.max(axis=1) > -np.inf)
    predicted = np.where(has_answer, logits.argmax(axis=1), NO_CLASS).astype(np.int64)
    return Answers(predicted, true.astype(np.int64))


def concatenate(parts: list[Answers]) -> Answers:
    """Return the answers of one or more sets of images as those of one set, in the order given."""
    return Answers(np.concatenate([part.predicted for part in parts]), np.concatenate([part.true for part in parts]))


def write_predictions(path: Path, answers: Answers) -> None:
    """Write a model's answers."""
    io.write_bytes(path, save({"predicted": answers.predicted.astype(np.int64), "true": answers.true.astype(np.int64)}))


def read_predictions(path: Path) -> Answers:
    """Return the answers in a file; ArtifactError if it is missing or damaged."""
    try:
        tensors = load_file(path)
        return Answers(tensors["predicted"], tensors["true"])
    except (OSError, SafetensorError, KeyError) as error:
        reason = io.first_line(error)
        raise ArtifactError(f"the predictions in {str(path)!r} can't be read ({reason}): evaluate again") from error


VARIABLE = "PROFILING_AGENT_DATA"
# Hexadecimal digits of an image's SHA-256. Among ten thousand images two different ones share them in one of a hundred
# sets, and then one opening too many is counted.
DIGITS = 8
FIRST_SHARE = 0.8


class _Test(Record):
    """A test of a candidate on images, as their joined digits; `fresh` is a user's reason not to count earlier tests."""

    candidate: str
    images: str
    fresh: str | None = None

    @property
    def image_ids(self) -> set[str]:
        return {self.images[start : start + DIGITS] for start in range(0, len(self.images), DIGITS)}


class _Line(Record):
    """A line of a ledger: a test of what was made of one model; the first of an older ledger holds all of its tests."""

    tests: tuple[_Test, ...]


def data_folder() -> Path:
    """Return the folder named by PROFILING_AGENT_DATA, or the user's data folder; OSError as `user_folder`."""
    return io.user_folder(VARIABLE, platformdirs.user_data_path)


def share(number: int) -> float:
    """Return the share of the error for the test of this number, from 1; all shares add up to 1."""
    return FIRST_SHARE if number == 1 else (1 - FIRST_SHARE) / (number * (number - 1))


def note_opening(model: str, candidate: str, images: Iterable[bytes], fresh: str | None = None) -> Opening:
    """Record the test of a candidate, made of the model with this hash, on encoded images; return its number.

    Candidates that lose exactly what is allowed pass a test in 5% of cases, and one of twenty tests in 34%: so every test gets
    a share of the error allowed to all. Only tests that share an image with this one count; the same test again isn't another
    one. If no ledger can be kept, the opening's note says why, and the run goes on.
    """
    digits = "".join(sorted({hashlib.sha256(image).hexdigest()[:DIGITS] for image in images}))
    test, place, advice = _Test(candidate=candidate, images=digits, fresh=fresh), "", ""
    tests, note = list[_Test](), None
    try:
        path = data_folder() / "heldout" / f"{model}.json"
        place, advice = f"in {str(path.parent)!r} ", f": set {VARIABLE}"
        io.make_folders(path.parent)
        with FileLock(path.parent / "ledgers.lock"):
            for line in path.read_bytes().splitlines() if path.exists() else ():
                try:
                    tests += io.parse_record(_Line, line).tests
                except io.DocumentError as error:
                    note = f"a line of the ledger of openings {str(path)!r} is damaged ({error}) and isn't counted"
            # Earlier tests count from the last that was fresh.
            start = max((index for index, earlier in enumerate(tests) if earlier.fresh is not None), default=0)
            counted = tests[start:] if fresh is None else []
            others = [(each.candidate, each.images) for each in counted if each.image_ids & test.image_ids]
            is_known = (candidate, digits) in others
            if not is_known:
                io.append_line(path, _Line(tests=(test,)).model_dump_json())
    except OSError as error:
        note = f"openings of the held-out images can't be counted {place}({error.strerror}){advice}"
        return Opening(number=1, share=share(1), fresh=fresh, note=note)
    number = 1 + (others.index((candidate, digits)) if is_known else len(others))
    return Opening(
        number=number, share=share(number), fresh=fresh or (counted[0].fresh if counted else None), note=note
    )
