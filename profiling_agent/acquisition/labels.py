"""Label matching: the labels of a data set as classes of a model."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from profiling_agent.documents import MAX_QUOTED
from profiling_agent.errors import AcquisitionError
from profiling_agent.records import LabelMatch

GENERIC = re.compile(r"(?:label|class)?[ _-]?(\d+)", re.IGNORECASE)
NUM_SHOWN = 5
# The longest synonym in ImageNet-21k has twelve.
MAX_WORDS = 40


def _normalised(name: str) -> str:
    return " ".join(re.split(r"[\s_\-]+", name.casefold().strip()))


def _synonyms(name: str) -> frozenset[str]:
    """Return the whole normalised name and each of its comma-separated parts; ImageNet labels list synonyms."""
    parts = [name, *name.split(",")]
    return frozenset(normalised for part in parts if (normalised := _normalised(part)))


def _generic_ids(names: Sequence[str]) -> list[int] | None:
    """Return the number in each name where the names are nothing but the numbers 0 to n-1, as in LABEL_3 or 3."""
    hits = [GENERIC.fullmatch(name.strip()) for name in names]
    numbers = [int(hit.group(1)) for hit in hits if hit]
    return numbers if sorted(numbers) == list(range(len(names))) else None


def _by_id(labels: Sequence[str], id2label: Mapping[int, str]) -> list[int] | None:
    """Return every label's class by position, or by its own number, where that is beyond doubt."""
    if sorted(id2label) != list(range(len(labels))):
        return None
    model_labels = [id2label[index] for index in range(len(labels))]
    if all(_synonyms(ours) & _synonyms(theirs) for ours, theirs in zip(labels, model_labels, strict=True)):
        return list(range(len(labels)))
    if (numbers := _generic_ids(labels)) is not None:
        return numbers
    # Only names like LABEL_3 in LABEL_3's place: the position is all that the model says about its classes.
    return list(range(len(labels))) if _generic_ids(model_labels) == list(range(len(labels))) else None


class _Classes:
    """A model's classes by name, by synonym and by the words in a row that their synonyms hold."""

    def __init__(self, id2label: Mapping[int, str]) -> None:
        self._names: dict[str, list[int]] = {}
        self._synonyms: dict[str, list[int]] = {}
        self._phrases: dict[str, list[int]] = {}
        for index, name in id2label.items():
            self._names.setdefault(name, []).append(index)
            synonyms = _synonyms(name)
            for synonym in synonyms:
                self._synonyms.setdefault(synonym, []).append(index)
            for phrase in {phrase for synonym in synonyms for phrase in _phrases(synonym)}:
                self._phrases.setdefault(phrase, []).append(index)

    def by_exact_name(self, label: str) -> list[int]:
        return self._names.get(label, [])

    def by_normalised_name(self, label: str) -> list[int]:
        return sorted({index for synonym in _synonyms(label) for index in self._synonyms.get(synonym, [])})

    def by_substring(self, label: str, taken: frozenset[int]) -> list[int]:
        """Return the classes whose name holds the label or is held by it, in whole words: no cat in catamaran."""
        ours = _normalised(label)
        held = (index for phrase in _phrases(ours) for index in self._synonyms.get(phrase, []))
        return sorted({*self._phrases.get(ours, []), *held} - taken)


def _phrases(normalised: str) -> Iterator[str]:
    """Yield every run of a name's words; of one with more words than names have, none."""
    words = normalised.split(" ")
    if len(words) <= MAX_WORDS:
        yield from (" ".join(words[i:j]) for i in range(len(words)) for j in range(i + 1, len(words) + 1))


def _match_one(label: str, id2label: Mapping[int, str], classes: _Classes, taken: frozenset[int]) -> LabelMatch:
    """Return the first rule's only hit. Substrings never reach a class that another label names in full."""
    rules: tuple[tuple[Literal["name", "normalised name", "substring"], list[int]], ...] = (
        ("name", classes.by_exact_name(label)),
        ("normalised name", classes.by_normalised_name(label)),
        ("substring", classes.by_substring(label, taken)),
    )
    for rule, hits in rules:
        if len(hits) == 1:
            return LabelMatch(dataset_label=label, model_id=hits[0], model_label=id2label[hits[0]], rule=rule)
    return LabelMatch(dataset_label=label, model_id=None, model_label=None, rule="unmapped")


def shown(names: Sequence[str]) -> str:
    """Return the first few of some names, quoted, and how many more there are."""
    rest = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(repr(name[:MAX_QUOTED]) for name in names[:NUM_SHOWN]) + rest


def match_labels(
    dataset_labels: Sequence[str], id2label: Mapping[int, str], *, ordered: bool = True
) -> tuple[LabelMatch, ...]:
    """Return what each label of the data set means to the model, in the data set's order.

    Rules, most trusted first: the id (where names agree at every id, or one side has only numbers for names and the
    counts agree), the exact name, the normalised name or an ImageNet synonym, and, for labels that are left over, the
    paper's substring match. A label with several candidates stays unmapped.

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
