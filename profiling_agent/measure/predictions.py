"""Predictions on disk, and the ledger of how often held-out images were opened. No torch here.

Testing candidate after candidate on the same images until one passes will see one pass: of those that lose exactly
what is allowed 5% in one run, 34% in twenty. So every test is noted, with the images that it may look at and the model that
it is for, and has a share of the error that all of them together may make.
"""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import platformdirs
from filelock import FileLock
from numpy.typing import NDArray
from pydantic import Field
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


VARIABLE = "PROFILING_AGENT_DATA"
# Of the SHA-256 of an image, in hexadecimal: among ten thousand images, two that differ are taken for one another once in
# a hundred sets, and then an opening more is counted.
DIGITS = 8
FIRST_SHARE = 0.8


class _Test(Record):
    """One test: of which candidate, on which images, and why none before it is to count, where somebody said so."""

    candidate: str
    images: str
    fresh: str | None = None


class _Ledger(Record):
    """All tests of what was made of one model, in their order."""

    tests: tuple[_Test, ...] = Field(default=())


def data_folder() -> Path:
    """Return the folder named by PROFILING_AGENT_DATA, or the user's data folder; OSError as `user_folder`."""
    return user_folder(VARIABLE, platformdirs.user_data_path)


def share(number: int) -> float:
    """Return what the test of this number, from 1, has of the error; all shares there can be add up to 1."""
    return FIRST_SHARE if number == 1 else (1 - FIRST_SHARE) / (number * (number - 1))


def note_opening(model: str, candidate: str, images: Iterable[bytes], fresh: str | None = None) -> Opening:
    """Note that a candidate, made of the model with this hash, is tested on these encoded images; return which test it is.

    Tests are counted that share an image with this one; the same test again is no other one. `fresh` says why those before
    are not to count. Where no ledger can be kept, that is said in the opening's note, and the run goes on.
    """
    own = {hashlib.sha256(image).hexdigest()[:DIGITS] for image in images}
    try:
        path = data_folder() / "heldout" / f"{model}.json"
    except OSError as error:
        return _uncounted(f"({error.strerror})", fresh)
    try:
        make_folders(path.parent)
        # One lock for all ledgers: whoever holds it may sweep up what a power loss left of any.
        with FileLock(path.parent / "ledgers.lock"):
            sweep(path.parent)
            return _noted(path, candidate, own, fresh)
    except OSError as error:
        return _uncounted(f"in {str(path.parent)!r} ({error.strerror}): set {VARIABLE}", fresh)


def _uncounted(why: str, fresh: str | None) -> Opening:
    note = f"openings of the held-out images can't be counted {why}"
    return Opening(number=1, share=share(1), fresh=fresh, note=note)


def _noted(path: Path, candidate: str, own: set[str], fresh: str | None) -> Opening:
    ledger, note = _read(path)
    begun = 0 if fresh is None else len(ledger.tests)
    begun = max([begun, *(place for place, test in enumerate(ledger.tests) if test.fresh is not None)])
    before = [test for test in ledger.tests[begun:] if not own.isdisjoint(_images(test))]
    again = next(
        (place for place, test in enumerate(before) if test.candidate == candidate and _images(test) == own), None
    )
    number = 1 + (len(before) if again is None else again)
    if again is None:
        added = _Test(candidate=candidate, images="".join(sorted(own)), fresh=fresh)
        write_text(path, _Ledger(tests=(*ledger.tests, added)).model_dump_json())
    reason = fresh or next((test.fresh for test in ledger.tests[begun : begun + 1]), None)
    return Opening(number=number, share=share(number), fresh=reason, note=note)


def _read(path: Path) -> tuple[_Ledger, str | None]:
    """Return the ledger; one that can't be read is set aside, and that is said."""
    try:
        return read_record(_Ledger, path), None
    except FileNotFoundError:
        return _Ledger(), None
    except DocumentError as error:
        aside = path.with_suffix(".damaged")
        path.replace(aside)
        return (
            _Ledger(),
            f"the ledger of openings was damaged ({error}) and lies in {str(aside)!r}: none before is counted",
        )


def _images(test: _Test) -> set[str]:
    return {test.images[start : start + DIGITS] for start in range(0, len(test.images), DIGITS)}
