"""Label matching: the model's class of each label of a data set, and whether the model's predictions agree."""

import hashlib
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linear_sum_assignment
from scipy.stats import binomtest

from profiling_agent.errors import AcquisitionError
from profiling_agent.lib.io import MAX_QUOTED
from profiling_agent.schemas import LabelMatch, MatchBy, MatchKind, MatchRule

Classes = NDArray[np.int64]
# The class of a label that the model doesn't know.
UNMAPPED = -1

# No class has a number of more than 18 digits, and Python refuses to parse thousands of digits.
NUMBERED_NAME = re.compile(r"(?:label|class)?[ _-]?(\d{1,18})", re.IGNORECASE)
# The first class of models with one class more than ImageNet-1k.
BACKGROUND = "background"
# ImageNet-1k's ids of classes, also the names of its folders, in the order of the models' classes.
WNIDS = Path(__file__).with_name("imagenet_wnids.txt")
FIRST_NAME = "tench"
# A normalised name that has such a word in some parts is no list of synonyms: "mask, not worn" is no mask.
NEGATION = re.compile(r"\b(?:no|un|anti|none|nor|never|cannot|lacking|missing|absent|minus|sans)\b|n['\u2019]t\b")
# "without mask" and "no mask" are the same name, and differ from "mask".
NO_WORDS = frozenset({"no", "not", "non", "without", "w/o"})
# One-sided error rates of two tests: the choice between two matchings, and predictions better than chance.
CHOICE_ERROR, CHANCE_ERROR = 0.01, 0.05
# With fewer images a gain of MIN_GAIN may be chance: of 100 images its standard error is at most seven points.
MIN_JUDGED_IMAGES = 100
MIN_GAIN = 0.2
ORDER_RULES = ("number", "from-1", "place")


@dataclass(frozen=True, slots=True)
class Matching:
    """One way to match all labels; `class_of` maps a label's position, or an integer label, to the model's class."""

    by: MatchKind
    matches: tuple[LabelMatch, ...]
    class_of: Mapping[int, int]

    def becomes(self, other: "Matching") -> dict[int, int]:
        """Map each class of this matching to its class in `other`."""
        return {index: other.class_of[raw] for raw, index in self.class_of.items() if raw in other.class_of}


def label_set_id(classes: Iterable[int]) -> int:
    """Return the id of a set of classes, at least 0: a multi-label model is right if its set has the id of the image's."""
    digest = hashlib.blake2b(np.unique(np.fromiter(classes, np.int64)).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def match_labels(
    labels: Sequence[str], id2label: Mapping[int, str], *, ordered: bool = True, by: MatchBy = "auto"
) -> tuple[Matching, ...]:
    """Return every way in which labels fit the classes, the likeliest first.

    By id, if the names agree at every id. By number or by place, if either side is numbers. Else each label by its name,
    synonym or wnid. `labels` are distinct names; `ordered` is False if their positions mean nothing.

    Raises:
        AcquisitionError: no label is a class, or none in the chosen way.
    """
    ways = [
        Matching(
            by="name" if rule == "id" else rule,
            matches=tuple(_match(label, index, id2label, rule) for label, index in zip(labels, ids, strict=True)),
            class_of=dict(enumerate(ids)),
        )
        for rule, ids in _match_by_order(labels, id2label, ordered=ordered).items()
    ]
    if not ways:
        matches = _match_by_name(labels, id2label)
        class_of = {position: match.model_id for position, match in enumerate(matches) if match.model_id is not None}
        if not class_of:
            classes = format_names([id2label[index] for index in sorted(id2label)])
            raise AcquisitionError(
                f"no label of the data set ({format_names(labels)}) is a class of the model ({classes})"
            )
        ways = [Matching("name", matches, class_of)]
    return _select_by_kind(ways, by)


def match_numbers(numbers: Iterable[int], id2label: Mapping[int, str], *, by: MatchBy = "auto") -> tuple[Matching, ...]:
    """Return every way in which integer labels fit: as names, ids, or ids from 1; AcquisitionError if none is of kind `by`."""
    ordered, num_classes = sorted(numbers), len(id2label)
    named = {int(name): index for index, name in id2label.items() if re.fullmatch("0|[1-9][0-9]{,8}", name)}
    class_of_by_kind: dict[MatchKind, Mapping[int, int]] = {
        "name": named if len(set(id2label.values())) == num_classes else {},
        "number": {index: index for index in sorted(id2label)},
        "from-1": {index + 1: index for index in sorted(id2label)},
    }
    ways = [
        Matching(kind, tuple(_match(str(number), class_of[number], id2label, kind) for number in ordered), class_of)
        for kind, class_of in class_of_by_kind.items()
        if class_of.keys() >= set(ordered)
    ]
    if not ways or ways[0].by == "from-1":
        labels = f"labels are whole numbers from {ordered[0]} to {ordered[-1]}"
        classes = f"{num_classes} classes, 0 to {num_classes - 1}: name another label_column or model"
        raise AcquisitionError(f"{labels}, but the model has {classes}")
    return _select_by_kind(ways, by)


def _match(label: str, index: int, id2label: Mapping[int, str], rule: MatchRule) -> LabelMatch:
    return LabelMatch(dataset_label=label, model_id=index, model_label=id2label[index], rule=rule)


def _select_by_kind(ways: Sequence[Matching], by: MatchBy) -> tuple[Matching, ...]:
    """Return the ways of kind `by`, and of several that give the same classes the first."""
    distinct: dict[tuple[int | None, ...], Matching] = {}
    for way in ways:
        if by in ("auto", way.by):
            distinct.setdefault(tuple(match.model_id for match in way.matches), way)
    if not distinct:
        kinds = " and ".join(way.by for way in ways)
        raise AcquisitionError(f"label_match is {by!r}, but labels fit the model's classes by {kinds}: choose that")
    return tuple(distinct.values())


def choose_matching(matchings: Sequence[Matching], predicted: Classes, true: Classes) -> tuple[Matching, str]:
    """Return the matching that the model's predictions support clearly best, and a note.

    `predicted` are predictions on images that no accuracy is measured on, `true` their classes by the first matching.

    Raises:
        AcquisitionError: the predictions don't decide.
    """
    # A matching from 1 has no label 0, which may occur in these images although not among the matched labels.
    fitting = [
        (way, np.array([class_map[index] for index in true.tolist()]))
        for way in matchings
        if (class_map := matchings[0].becomes(way)).keys() >= set(true.tolist())
    ]
    if len(fitting) == 1:
        chosen = fitting[0][0]
        return chosen, order_match_note(chosen.matches) or f"labels are matched by {chosen.by}"
    (chosen, best), (_, others), *_ = ranked = sorted(fitting, key=lambda pair: -np.sum(pair[1] == predicted))
    num_won, num_lost = (int(np.sum((a == predicted) & (b != predicted))) for a, b in ((best, others), (others, best)))
    is_better = num_won > 0 and binomtest(num_won, num_won + num_lost, alternative="greater").pvalue < CHOICE_ERROR
    accuracies = ", ".join(f"by {way.by} {np.mean(classes == predicted):.0%} right" for way, classes in ranked)
    message = f"the model's answers on {len(true)} calibration images"
    if is_better and _is_above_chance(predicted, best, CHOICE_ERROR):
        return chosen, f"{message} decide how labels are matched: {accuracies}"
    kinds = " or ".join(way.by for way, _ in ranked)
    raise AcquisitionError(
        f"labels fit in several ways, and {message} don't decide: {accuracies}; set label_match to {kinds}"
    )


def why_doubtful(predicted: Classes, true: Classes, matches: Sequence[LabelMatch]) -> str | None:
    """Return why a baseline's predictions say nothing about accuracy; None if they are better than chance.

    Raises:
        AcquisitionError: they contradict labels that were matched by place or number only.
    """
    if reason := _mislabelling_reason(predicted, true, matches):
        if any(match.rule in ORDER_RULES for match in matches):
            raise AcquisitionError(reason)
        return reason
    if _is_above_chance(predicted, true, CHANCE_ERROR):
        return None
    return (
        f"the baseline answers {np.sum(predicted == true)} of {len(true)} search images right, which chance does too: "
        "check that the model was trained on these classes, and how labels are matched"
    )


def _mislabelling_reason(predicted: Classes, true: Classes, matches: Sequence[LabelMatch]) -> str | None:
    """Report that another pairing of labels and classes would make 20 points more of the predictions right; None if not.

    The best pairing of one half of the images is judged on the other half, where chance gains nothing.
    """
    # Sets of classes have no names to correct.
    if {match.model_id for match in matches}.isdisjoint(true.tolist()):
        return None
    has_prediction = predicted >= 0
    predicted, true = predicted[has_prediction], true[has_prediction]
    if len(predicted) // 2 < MIN_JUDGED_IMAGES:
        return None
    classes, indices = np.unique(np.concatenate([predicted, true]), return_inverse=True)
    prediction, label = np.split(indices, 2)
    # Half a count on the diagonal: a class without counts keeps its label.
    counts = np.identity(len(classes)) * 0.5
    np.add.at(counts, (label[::2], prediction[::2]), 1.0)
    _, pairing = linear_sum_assignment(counts, maximize=True)
    current, paired = np.mean(prediction[1::2] == label[1::2]), np.mean(prediction[1::2] == pairing[label[1::2]])
    if paired - current < MIN_GAIN:
        return None
    old, new = next((int(classes[old]), int(classes[pairing[old]])) for old in np.unique(label) if pairing[old] != old)
    label_of = {match.model_id: match.dataset_label[:MAX_QUOTED] for match in matches}
    name_of = {match.model_id: (match.model_label or "")[:MAX_QUOTED] for match in matches}
    return (
        f"the model answers {current:.0%} of the images right as labels are matched, and {paired:.0%} with others, such as "
        f"{label_of.get(old)!r} as {name_of.get(new)!r}: correct the names of its classes in config.json (id2label, or timm's "
        "label_names), or those of the data set"
    )


def _is_above_chance(predicted: Classes, true: Classes, error: float) -> bool:
    """Test whether more predictions are right than if they were independent of the images."""
    chance = sum(float(np.mean(true == index) * np.mean(predicted == index)) for index in np.unique(true))
    num_right = int(np.sum(predicted == true))
    return bool(binomtest(num_right, len(true), min(chance, 1.0), alternative="greater").pvalue < error)


def order_match_note(matches: Sequence[LabelMatch]) -> str | None:
    """Return a note on labels matched by order only, with one of them, and what to do if it is wrong; None without any."""
    for match in matches:
        label, name = match.dataset_label, match.model_label or ""
        is_guess = match.rule in ORDER_RULES and _parse_number(label) != _parse_number(name)
        if is_guess and not _synonyms(label) & _synonyms(name):
            return (
                f"labels are matched with classes by {match.rule} only, such as {label[:MAX_QUOTED]!r} with "
                f"{name[:MAX_QUOTED]!r}: if that is wrong, correct id2label or label_names in the model's config.json"
            )
    return None


def format_names(names: Sequence[str]) -> str:
    """Format the first five names, quoted, and the number of the rest."""
    rest = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name[:MAX_QUOTED]) for name in names[:5]) + rest


def _normalise(name: str) -> str:
    words = re.split(r"[\s_\-]+", name.casefold().strip())
    return " ".join("no" if word in NO_WORDS else word for word in words)


def _synonyms(name: str) -> frozenset[str]:
    """Return the normalised name and its comma-separated parts, ImageNet's synonyms, if all or none of them are negated."""
    whole, *parts = (_normalise(part) for part in (name, *name.split(",")))
    are_negated = {bool(NEGATION.search(part)) for part in parts}
    return frozenset(filter(None, (whole, *(parts if len(are_negated) == 1 else ()))))


def _parse_number(name: str) -> int | None:
    match = NUMBERED_NAME.fullmatch(name.strip())
    return int(match.group(1)) if match else None


def _offset(num_labels: int, id2label: Mapping[int, str]) -> int | None:
    """Return the class of label 0: 1 after a background class, else 0; None if the numbers of classes don't fit."""
    offset = len(id2label) - num_labels
    return offset if offset == 0 or (offset == 1 and BACKGROUND in _synonyms(id2label[0])) else None


def _match_by_order(
    labels: Sequence[str], id2label: Mapping[int, str], *, ordered: bool
) -> dict[MatchKind | Literal["id"], list[int]]:
    """Return the class of each label by every rule based on order; by id only, if the names agree at every id."""
    if not labels or (offset := _offset(len(labels), id2label)) is None:
        return {}
    positions = list(range(len(labels)))
    classes = [id2label[offset + position] for position in positions]
    # Libraries write LABEL_3, or 3, for class 3 of a model without names.
    is_unnamed = offset == 0 and [_parse_number(name) for name in classes] == positions
    pairs = ((list(labels), classes), ([*map(_normalise, labels)], [*map(_normalise, classes)]))
    if not is_unnamed and any(a != b and sorted(a) == sorted(b) and len({*a}) == len(a) for a, b in pairs):
        return {}
    numbers = [number for label in labels if (number := _parse_number(label)) is not None]
    is_numbered = sorted(numbers) == positions
    names_agree = all(_synonyms(label) & _synonyms(name) for label, name in zip(labels, classes, strict=True))
    if (ordered or is_numbered) and names_agree:
        return {"id": [offset + position for position in positions]}
    if offset == 0 and is_numbered:
        return {"number": numbers, "place": positions}
    return {"place": positions} if is_unnamed and ordered else {}


def _match_by_name(labels: Sequence[str], id2label: Mapping[int, str]) -> tuple[LabelMatch, ...]:
    """Match each label by the first rule with exactly one candidate."""
    found: dict[str, LabelMatch] = {}
    rules: tuple[tuple[MatchRule, Callable[[str], frozenset[str]]], ...] = (
        ("name", lambda name: frozenset({name})),
        ("normalised name", lambda name: frozenset({_normalise(name)})),
        ("normalised name", _synonyms),
    )
    for rule, keys_of in rules:
        classes = defaultdict[str, set[int]](set)
        for index, name in id2label.items():
            for key in keys_of(name):
                classes[key].add(index)
        for label in labels:
            candidates = set[int]().union(*(classes.get(key, ()) for key in keys_of(label)))
            if len(candidates) == 1:
                found.setdefault(label, _match(label, min(candidates), id2label, rule))
    wnids = WNIDS.read_text(encoding="utf-8").split()
    offset = _offset(len(wnids), id2label)
    if offset is not None and FIRST_NAME in _synonyms(id2label[offset]):
        class_of = {wnid: index for index, wnid in enumerate(wnids, start=offset)}
        for label in labels:
            if label.strip() in class_of:
                found.setdefault(label, _match(label, class_of[label.strip()], id2label, "wnid"))
    unmapped = LabelMatch(dataset_label="", model_id=None, model_label=None, rule="unmapped")
    return tuple(found.get(label) or unmapped.model_copy(update={"dataset_label": label}) for label in labels)
