"""Openings: how often held-out images were opened to judge what was made of a model, by all runs of this user together.

Whoever tests candidate after candidate on the same images until one passes will see one pass: of those that lose exactly
what is allowed 5% in one run, 34% in twenty. So every test is noted, with the images that it may look at and the model that
it is for, and has a share of the error that all of them together may make.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path

import platformdirs
from filelock import FileLock
from pydantic import Field

from profiling_agent.cache import user_folder
from profiling_agent.documents import DocumentError, read_record
from profiling_agent.files import make_folders, sweep, write_text
from profiling_agent.records import Opening, Record

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
