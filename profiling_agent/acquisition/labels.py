"""Label matching: the labels of a data set as classes of a model."""

import re
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Literal

from profiling_agent.documents import MAX_QUOTED
from profiling_agent.errors import AcquisitionError
from profiling_agent.files import read_text
from profiling_agent.records import LabelMatch

# No class has a longer number, and Python refuses to read one of thousands of digits.
GENERIC = re.compile(r"(?:label|class)?[ _-]?(\d{1,18})", re.IGNORECASE)
NUM_SHOWN = 5
# A pair that is wrong spoils what is measured: rather a long line than one that is missing.
MAX_GUESSES_SHOWN = 50
# The longest synonym in ImageNet-21k has twelve.
MAX_WORDS = 40
# As models with a class more than ImageNet call their first.
BACKGROUND = "background"
# How ImageNet numbers its classes, and names folders. Models have its thousand in the order of these numbers.
WNID = re.compile(r"n\d{8}")
WNIDS = Path(__file__).with_name("imagenet_wnids.txt")
FIRST, LAST = "tench", frozenset({"toilet tissue", "toilet paper", "bathroom tissue"})


def _normalised(name: str) -> str:
    return " ".join(re.split(r"[\s_\-]+", name.casefold().strip()))


def _synonyms(name: str) -> frozenset[str]:
    """Return the whole normalised name and each of its comma-separated parts; ImageNet labels list synonyms."""
    parts = [name, *name.split(",")]
    return frozenset(normalised for part in parts if (normalised := _normalised(part)))


def _number(name: str) -> int | None:
    """Return the number that a name is nothing but, as LABEL_3 or 3."""
    hit = GENERIC.fullmatch(name.strip())
    return int(hit.group(1)) if hit else None


def _generic_ids(names: Sequence[str]) -> list[int] | None:
    """Return the number in each name where the names are nothing but the numbers 0 to n-1, as in LABEL_3 or 3."""
    numbers = [number for name in names if (number := _number(name)) is not None]
    return numbers if sorted(numbers) == list(range(len(names))) else None


def _agree(labels: Sequence[str], model_labels: Sequence[str]) -> bool:
    return all(_synonyms(ours) & _synonyms(theirs) for ours, theirs in zip(labels, model_labels, strict=True))


def _are_moved(labels: Sequence[str], model_labels: Sequence[str]) -> bool:
    """Say whether both are the same names in different orders, each there once."""
    names = set(labels)
    return list(labels) != list(model_labels) and len(names) == len(labels) and names == set(model_labels)


def _by_id(labels: Sequence[str], id2label: Mapping[int, str]) -> list[int] | None:
    """Return every label's class by position, or by its own number, where that is beyond doubt."""
    first = len(id2label) - len(labels)
    if first not in (0, 1) or sorted(id2label) != list(range(len(id2label))):
        return None
    model_labels = [id2label[index] for index in range(first, len(id2label))]
    if _are_moved(labels, model_labels) or _are_moved([*map(_normalised, labels)], [*map(_normalised, model_labels)]):
        return None
    if labels and (first == 0 or BACKGROUND in _synonyms(id2label[0])) and _agree(labels, model_labels):
        return list(range(first, len(id2label)))
    if first:
        return None
    if (numbers := _generic_ids(labels)) is not None:
        return numbers
    # Only names like LABEL_3 in LABEL_3's place: the position is all that the model says about its classes.
    return list(range(len(labels))) if _generic_ids(model_labels) == list(range(len(labels))) else None


def _imagenet(id2label: Mapping[int, str]) -> Mapping[str, int]:
    """Return the class of each of ImageNet-1k's wnids; of none where these aren't its classes, the background before them or not."""
    wnids = read_text(WNIDS).split()
    first = len(id2label) - len(wnids)
    if first not in (0, 1) or sorted(id2label) != list(range(len(id2label))):
        return {}
    is_background = first == 0 or BACKGROUND in _synonyms(id2label[0])
    if is_background and FIRST in _synonyms(id2label[first]) and LAST & _synonyms(id2label[len(id2label) - 1]):
        return {wnid: index for index, wnid in enumerate(wnids, start=first)}
    return {}


class _Classes:
    """A model's classes by name, by synonym and by ImageNet's number."""

    def __init__(self, id2label: Mapping[int, str]) -> None:
        self._id2label = id2label
        self._names: dict[str, list[int]] = {}
        self._normalised: dict[str, list[int]] = {}
        self._synonyms: dict[str, list[int]] = {}
        for index, name in id2label.items():
            self._names.setdefault(name, []).append(index)
            self._normalised.setdefault(_normalised(name), []).append(index)
            for synonym in _synonyms(name):
                self._synonyms.setdefault(synonym, []).append(index)

    @cached_property
    def _of_wnid(self) -> Mapping[str, int]:
        return _imagenet(self._id2label)

    def by_exact_name(self, label: str) -> list[int]:
        return self._names.get(label, [])

    def by_normalised_name(self, label: str) -> list[int]:
        return self._normalised.get(_normalised(label), [])

    def by_synonym(self, label: str) -> list[int]:
        return sorted({index for synonym in _synonyms(label) for index in self._synonyms.get(synonym, [])})

    def by_wnid(self, label: str) -> list[int]:
        wnid = label.strip()
        return [self._of_wnid[wnid]] if WNID.fullmatch(wnid) and wnid in self._of_wnid else []

    def by_last_words(self, label: str, taken: frozenset[int]) -> list[int]:
        """Return the classes named by most of the label's last words, since a sports car is a car.

        Never the reverse: a model's only apple may be the custard apple, its only bird the indigo bunting, and then
        nearly every answer would be counted wrong.
        """
        words = _normalised(label).split(" ")
        for start in range(max(1, len(words) - MAX_WORDS), len(words)):
            if hits := self._synonyms.get(" ".join(words[start:])):
                return sorted(set(hits) - taken)
        return []


Rule = Literal["name", "normalised name", "wnid", "substring"]


def _match_one(label: str, id2label: Mapping[int, str], classes: _Classes, taken: frozenset[int]) -> LabelMatch:
    """Return the first rule's only hit. Substrings never reach a class that another label names in full."""
    rules: tuple[tuple[Rule, list[int]], ...] = (
        ("name", classes.by_exact_name(label)),
        ("normalised name", classes.by_normalised_name(label)),
        ("normalised name", classes.by_synonym(label)),
        ("wnid", classes.by_wnid(label)),
        ("substring", classes.by_last_words(label, taken)),
    )
    for rule, hits in rules:
        if len(hits) == 1:
            return LabelMatch(dataset_label=label, model_id=hits[0], model_label=id2label[hits[0]], rule=rule)
    return LabelMatch(dataset_label=label, model_id=None, model_label=None, rule="unmapped")


def guesses(matches: Sequence[LabelMatch]) -> str | None:
    """Return what a reader should know of labels that no name of a class is equal to: each pair, and what to do if it is wrong."""
    by_words = [match for match in matches if match.rule == "substring"]
    by_place = [match for match in matches if is_by_place(match)]
    by_number = [match for match in by_place if _number(match.dataset_label) is not None]
    if by_words:
        return (
            f"{_pairs(by_words)}, by the label's last words alone: if that is wrong, every answer on its "
            "images counts as wrong, so name the data set's classes as the model does"
        )
    if by_number:
        return (
            f"{_pairs(by_number, NUM_SHOWN)}, by their numbers alone, as they stand and from 0: if the data set counts its classes in "
            "another order or from 1, every answer counts as wrong, so name its classes as the model does"
        )
    if by_place:
        return (
            f"{_pairs(by_place)}, by their places alone, as the model has no names for its classes and the data set's are in the order of its own list or of sorted "
            "folders (A before a, 10 before 2): if it was trained with another order, as timm's own, answers count as wrong that are right, so name its classes in config.json "
            "(id2label, or timm's label_names)"
        )
    return None


def is_by_place(match: LabelMatch) -> bool:
    """Say whether a label was taken for a class by its place or its number alone, as one of them has no name.

    Of two names that are the same number there is nothing to guess.
    """
    ours, theirs = match.dataset_label, match.model_label or ""
    return match.rule == "id" and _number(ours) != _number(theirs) and not _synonyms(ours) & _synonyms(theirs)


def _pairs(matches: Sequence[LabelMatch], most: int = MAX_GUESSES_SHOWN) -> str:
    pairs = [
        f"{match.dataset_label[:MAX_QUOTED]!r} is taken for {(match.model_label or '')[:MAX_QUOTED]!r}"
        for match in matches[:most]
    ]
    rest = f" and {len(matches) - most} more alike" if len(matches) > most else ""
    return ", ".join(pairs) + rest


def shown(names: Sequence[str]) -> str:
    """Return the first few of some names, quoted, and how many more there are."""
    rest = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(repr(name[:MAX_QUOTED]) for name in names[:NUM_SHOWN]) + rest


def match_labels(
    dataset_labels: Sequence[str], id2label: Mapping[int, str], *, ordered: bool = True
) -> tuple[LabelMatch, ...]:
    """Return what each label of the data set means to the model, in the data set's order.

    Rules, most trusted first: the id (where names agree at every id, those after a background too, or one side has only
    numbers for names and the counts agree; not where both have the same names in other orders), the exact name, the
    normalised name or an ImageNet synonym, ImageNet's wnid where the model has its
    classes, and, for labels that are left over, a class that is all of the label's last words (of the paper's substring
    match the half that holds; `guesses` says which). A label with several candidates stays unmapped.

    Args:
        dataset_labels: distinct label names; a label's position is its id in the data set.
        id2label: the model's classes.
        ordered: False where positions mean nothing, as for labels found in a column of strings.

    Raises:
        AcquisitionError: no label has a counterpart.
    """
    ids = _by_id(dataset_labels, id2label) if ordered or _generic_ids(dataset_labels) else None
    if ids is not None:
        return tuple(
            LabelMatch(dataset_label=label, model_id=index, model_label=id2label[index], rule="id")
            for label, index in zip(dataset_labels, ids, strict=True)
        )
    classes = _Classes(id2label)
    named = [_match_one(label, id2label, classes, frozenset(id2label)) for label in dataset_labels]
    taken = frozenset(match.model_id for match in named if match.model_id is not None)
    matches = tuple(_match_one(label, id2label, classes, taken) for label in dataset_labels)
    if all(match.model_id is None for match in matches):
        raise AcquisitionError(
            f"no label of the data set is a class of the model: the data set has {shown(list(dataset_labels))}, "
            f"the model {shown([id2label[index] for index in sorted(id2label)])}; "
            "choose a model that was trained on these classes, or another label_column"
        )
    return matches


def called_by_number(id2label: Mapping[int, str]) -> dict[int, int]:
    """Return the class of each number that one is called by; none where several are called alike."""
    if len(set(id2label.values())) != len(id2label):
        return {}
    short = {name: index for index, name in id2label.items() if name.isascii() and name.isdecimal() and len(name) < 10}
    return {int(name): index for name, index in short.items() if str(int(name)) == name}


def match_numbers(numbers: Iterable[int], id2label: Mapping[int, str]) -> tuple[tuple[LabelMatch, ...], dict[int, int]]:
    """Return what whole numbers, all of them ids of the model or all called so, mean to it, and the class of each number there may be.

    They are the classes that are called so where the model has one for each, else ids as they stand: never shifted.
    """
    ordered = sorted(numbers)
    class_of = called_by_number(id2label)
    rule: Literal["name", "id"] = "name"
    if not class_of.keys() >= set(ordered):
        class_of, rule = {index: index for index in sorted(id2label)}, "id"
    matches = tuple(
        LabelMatch(
            dataset_label=str(number), model_id=class_of[number], model_label=id2label[class_of[number]], rule=rule
        )
        for number in ordered
    )
    return matches, class_of
