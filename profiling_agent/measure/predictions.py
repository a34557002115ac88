"""Predictions on disk, and the ledger of tests on held-out images. Imports no torch.

Testing candidate after candidate on the same images until one passes will see one pass: of those that lose exactly
what is allowed, 5% in one run and 34% in twenty. So every test is recorded with its images and its model, and gets a share
of the error allowed to all of them together.
"""

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
from profiling_agent.lib.io import (
    DocumentError,
    first_line,
    make_folders,
    read_record,
    sweep,
    user_folder,
    write_bytes,
    write_text,
)
from profiling_agent.schemas import Opening, Record

Classes = NDArray[np.int64]
FIELDS = ("predicted", "true")
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
    """Return the answers of logits (images, classes) for images with these true class ids.

    Raises:
        ValueError: there aren't as many rows of logits as class ids, or there is no class.
    """
    if logits.ndim != 2 or logits.shape[1] < 1 or true.shape != (len(logits),):
        raise ValueError(f"logits {logits.shape!r} for {true.shape!r} labels: give a row for each image")
    # A class that is ruled out may have a logit of minus infinity.
    has_answer = (logits < np.inf).all(axis=1) & (logits.max(axis=1) > -np.inf)
    predicted = np.where(has_answer, logits.argmax(axis=1), NO_CLASS).astype(np.int64)
    return Answers(predicted, true.astype(np.int64))


def concatenate(parts: list[Answers]) -> Answers:
    """Return the answers of one or more sets of images as those of one set, in the order given."""
    return Answers(*(np.concatenate([getattr(part, name) for part in parts]) for name in FIELDS))


def write_predictions(path: Path, answers: Answers) -> None:
    """Write a model's answers."""
    write_bytes(path, save({name: np.ascontiguousarray(getattr(answers, name), np.int64) for name in FIELDS}))


def read_predictions(path: Path) -> Answers:
    """Return the answers in a file; ArtifactError if it is missing or damaged."""
    try:
        tensors = load_file(path)
        return Answers(*(tensors[name] for name in FIELDS))
    except (OSError, SafetensorError, KeyError) as error:
        raise ArtifactError(
            f"the predictions in {str(path)!r} can't be read ({first_line(error)}): evaluate again"
        ) from error


VARIABLE = "PROFILING_AGENT_DATA"
# Hexadecimal digits of an image's SHA-256. Among ten thousand images two different ones share them in one of a hundred
# sets, and then one opening too many is counted.
DIGITS = 8
FIRST_SHARE = 0.8


class _Test(Record):
    """A test of a candidate on images, as their joined digits; `fresh` is the reason not to count earlier tests, if any was given."""

    candidate: str
    images: str
    fresh: str | None = None

    @property
    def image_ids(self) -> set[str]:
        return {self.images[start : start + DIGITS] for start in range(0, len(self.images), DIGITS)}


class _Ledger(Record):
    """All tests of what was made of one model, in order."""

    tests: tuple[_Test, ...] = ()


def data_folder() -> Path:
    """Return the folder named by PROFILING_AGENT_DATA, or the user's data folder; OSError as `user_folder`."""
    return user_folder(VARIABLE, platformdirs.user_data_path)


def share(number: int) -> float:
    """Return the share of the error for the test of this number, from 1; all shares add up to 1."""
    return FIRST_SHARE if number == 1 else (1 - FIRST_SHARE) / (number * (number - 1))


def note_opening(model: str, candidate: str, images: Iterable[bytes], fresh: str | None = None) -> Opening:
    """Record the test of a candidate, made of the model with this hash, on encoded images; return its number.

    Only tests that share an image with this one count; the same test again isn't another one. `fresh` is the reason not to
    count earlier tests. If no ledger can be kept, the opening's note says why, and the run goes on.
    """
    digits = "".join(sorted({hashlib.sha256(image).hexdigest()[:DIGITS] for image in images}))
    test, place, advice = _Test(candidate=candidate, images=digits, fresh=fresh), "", ""
    try:
        path = data_folder() / "heldout" / f"{model}.json"
        place, advice = f"in {str(path.parent)!r} ", f": set {VARIABLE}"
        make_folders(path.parent)
        # One lock for all ledgers, so that its holder may sweep up what a power loss left of any.
        with FileLock(path.parent / "ledgers.lock"):
            sweep(path.parent)
            return _record_test(path, test)
    except OSError as error:
        note = f"openings of the held-out images can't be counted {place}({error.strerror}){advice}"
        return Opening(number=1, share=share(1), fresh=fresh, note=note)


def _record_test(path: Path, test: _Test) -> Opening:
    tests, note = (), None
    try:
        tests = read_record(_Ledger, path).tests
    except FileNotFoundError:
        pass
    except DocumentError as error:
        damaged = path.replace(path.with_suffix(".damaged"))
        note = f"the ledger of openings was damaged ({error}) and lies in {str(damaged)!r}: none before is counted"
    # Earlier tests count from the last that was fresh.
    start = max((index for index, earlier in enumerate(tests) if earlier.fresh is not None), default=0)
    counted = tests[start:] if test.fresh is None else ()
    reason = test.fresh or (counted[0].fresh if counted else None)
    others = [earlier for earlier in counted if earlier.image_ids & test.image_ids]
    same = [(earlier.candidate, earlier.images) == (test.candidate, test.images) for earlier in others]
    if not any(same):
        write_text(path, _Ledger(tests=(*tests, test)).model_dump_json())
    number = 1 + (same.index(True) if any(same) else len(others))
    return Opening(number=number, share=share(number), fresh=reason, note=note)
