"""Label matching: which class of a model each label of a data set is, and whether the model's answers agree."""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
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

# No class has a longer number, and Python refuses to read one of thousands of digits.
GENERIC = re.compile(r"(?:label|class)?[ _-]?(\d{1,18})", re.IGNORECASE)
NUM_SHOWN = 5
# The first class of models with one class more than ImageNet.
BACKGROUND = "background"
# How ImageNet numbers its classes, and names folders. Models have its thousand in the order of these numbers.
WNID = re.compile(r"n\d{8}")
WNIDS = Path(__file__).with_name("imagenet_wnids.txt")
FIRST, LAST = "tench", frozenset({"toilet tissue", "toilet paper", "bathroom tissue"})
# "without mask" and "no mask" are one name, and never "mask".
NO = frozenset({"no", "not", "non", "without", "w/o"})
NEGATIONS = NO | {"un", "anti", "none", "nor", "never", "cannot", "lacking", "missing", "absent", "minus", "sans"}
# One-sided errors: of the choice between two matchings, and of "these answers are better than chance".
CHOICE_ERROR, CHANCE_ERROR = 0.01, 0.05
# With fewer images a gain of this size may be chance: of 100 its standard error is seven points at most.
MIN_JUDGED = 100
MIN_GAIN = 0.2
NUM_MOVED_SHOWN = 3
ORDERS = ("number", "from-1", "place", "natural")


@dataclass(frozen=True, slots=True)
class Matching:
    """One way to match all labels; `class_of` maps a label's position, or a whole number, to a class of the model."""

    by: MatchKind
    matches: tuple[LabelMatch, ...]
    class_of: Mapping[int, int]

    def becomes(self, other: "Matching") -> dict[int, int]:
        """Return the class that `other` has for each class of this matching."""
        return {index: other.class_of[raw] for raw, index in self.class_of.items() if raw in other.class_of}


def match_labels(
    labels: Sequence[str], id2label: Mapping[int, str], *, ordered: bool = True, by: MatchBy = "auto"
) -> tuple[Matching, ...]:
    """Return each way in which labels fit the classes, the likeliest first.

    By id, if the names agree at every id; by number, by place or in timm's order of folders, if either side is numbers;
    else each label by its name, synonym or wnid. A label with several candidates stays unmapped.

    Args:
        labels: distinct names; a label's position is its id in the data set.
        id2label: the model's classes.
        ordered: False if positions mean nothing, as for names in a column of strings.
        by: the kind of match that the user chose.

    Raises:
        AcquisitionError: no label is a class, or none in the chosen way.
    """
    if by_order := _by_order(labels, id2label, ordered=ordered):
        ways = [
            Matching(
                by="name" if rule == "id" else rule,
                matches=tuple(_match(label, index, id2label, rule) for label, index in zip(labels, ids, strict=True)),
                class_of=dict(enumerate(ids)),
            )
            for rule, ids in by_order.items()
        ]
        return _chosen(ways, by)
    matches = _by_names(labels, id2label)
    class_of = {place: match.model_id for place, match in enumerate(matches) if match.model_id is not None}
    if not class_of:
        raise AcquisitionError(
            f"no label of the data set is a class of the model: the data set has {shown(list(labels))}, "
            f"the model {shown([id2label[index] for index in sorted(id2label)])}; "
            "choose a model that was trained on these classes, or another label_column"
        )
    return _chosen([Matching("name", matches, class_of)], by)


def match_numbers(numbers: Iterable[int], id2label: Mapping[int, str], *, by: MatchBy = "auto") -> tuple[Matching, ...]:
    """Return each way in which whole numbers fit: as names, ids, or ids from 1; AcquisitionError if not the chosen way."""
    ordered = sorted(numbers)
    rules: dict[MatchKind, Mapping[int, int]] = {
        "name": called_by_number(id2label),
        "number": {index: index for index in sorted(id2label)},
        "from-1": {index + 1: index for index in sorted(id2label)},
    }
    ways = [
        Matching(
            by=rule,
            matches=tuple(_match(str(number), class_of[number], id2label, rule) for number in ordered),
            class_of=class_of,
        )
        for rule, class_of in rules.items()
        if class_of.keys() >= set(ordered)
    ]
    return _chosen(ways, by)


def _match(label: str, index: int, id2label: Mapping[int, str], rule: MatchRule) -> LabelMatch:
    return LabelMatch(dataset_label=label, model_id=index, model_label=id2label[index], rule=rule)


def _chosen(ways: Sequence[Matching], by: MatchBy) -> tuple[Matching, ...]:
    """Return the matchings of the chosen kind, each that differs once."""
    chosen = [way for way in ways if by in ("auto", way.by)]
    if not chosen:
        fitting = " and ".join(way.by for way in ways)
        raise AcquisitionError(f"label_match is {by!r}, but labels fit the model's classes by {fitting}: choose that")
    different = {tuple(match.model_id for match in way.matches): way for way in reversed(chosen)}
    return tuple(way for way in chosen if way in different.values())


def choose_matching(matchings: Sequence[Matching], predicted: Classes, true: Classes) -> tuple[Matching, str]:
    """Return the matching that a model's answers fit clearly best, and a note; AcquisitionError if they don't decide.

    `predicted` are answers on images that are measured on nowhere else, `true` their classes by the first matching.
    """
    becomes = {way.by: matchings[0].becomes(way) for way in matchings}
    # Counted from 1, there is no label 0; it may be among these images, and not among those that were matched.
    fitting = [way for way in matchings if becomes[way.by].keys() >= set(true.tolist())]
    if len(fitting) == 1:
        return fitting[0], guesses(fitting[0].matches) or f"labels are matched by {fitting[0].by}"
    true_by = {way.by: np.array([becomes[way.by][index] for index in true.tolist()]) for way in fitting}
    ranked = sorted(fitting, key=lambda way: -int(np.sum(true_by[way.by] == predicted)))
    best, second = (true_by[way.by] == predicted for way in ranked[:2])
    won, lost = int(np.sum(best & ~second)), int(np.sum(second & ~best))
    is_better = won > 0 and binomtest(won, won + lost, alternative="greater").pvalue < CHOICE_ERROR
    # A label that the two disagree on is one that a reader can check.
    pairs = enumerate(zip(ranked[0].matches, ranked[1].matches, strict=True))
    place = next(place for place, (one, other) in pairs if one.model_id != other.model_id)
    described = [
        f"by {way.by} ({_pair(way.matches[place])}) {np.mean(true_by[way.by] == predicted):.0%} right" for way in ranked
    ]
    answers = f"labels fit the classes in {len(ranked)} ways, and the model's answers on {len(true)} calibration images"
    if is_better and _is_above_chance(predicted, true_by[ranked[0].by], CHOICE_ERROR):
        return ranked[0], f"{answers} decide: {', '.join(described)}"
    ways = " or ".join(way.by for way in ranked)
    raise AcquisitionError(f"{answers} don't decide: {', '.join(described)}; set label_match to {ways}")


def why_doubtful(predicted: Classes, true: Classes, matches: Sequence[LabelMatch]) -> str | None:
    """Return why a baseline's answers prove nothing about accuracy; None if they are better than chance.

    Raises:
        AcquisitionError: they contradict labels that were matched by place or number only.
    """
    if reason := _why_mislabelled(predicted, true, matches):
        if any(match.rule in ORDERS for match in matches):
            raise AcquisitionError(reason)
        return reason
    if not _is_above_chance(predicted, true, CHANCE_ERROR):
        return (
            f"the baseline answers {np.sum(predicted == true)} of {len(true)} search images right, which chance does too, so "
            "that no loss of accuracy shows: check that the model was trained on these classes, and how labels are matched"
        )
    return None


def _is_above_chance(predicted: Classes, true: Classes, error: float) -> bool:
    """Test whether more is right than if answers as frequent as these knew nothing of the images."""
    chance = sum(float(np.mean(true == index) * np.mean(predicted == index)) for index in np.unique(true))
    num_right = int(np.sum(predicted == true))
    return bool(binomtest(num_right, len(true), min(chance, 1.0), alternative="greater").pvalue < error)


def _why_mislabelled(predicted: Classes, true: Classes, matches: Sequence[LabelMatch]) -> str | None:
    """Return that other pairs of labels and classes would make a fifth more of the answers right; None if not.

    The pairs are the best ones for every other image, and are judged on the rest, where chance gains them nothing.
    """
    has_answer = predicted >= 0
    predicted, true = predicted[has_answer], true[has_answer]
    if len(predicted) // 2 < MIN_JUDGED:
        return None
    classes, places = np.unique(np.concatenate([predicted, true]), return_inverse=True)
    answer, label = np.split(places, 2)
    # A class that neither half has an answer for stays what it is.
    counts = np.identity(len(classes)) * 0.5
    np.add.at(counts, (label[::2], answer[::2]), 1.0)
    _, becomes = linear_sum_assignment(counts, maximize=True)
    right, otherwise = np.mean(answer[1::2] == label[1::2]), np.mean(answer[1::2] == becomes[label[1::2]])
    if otherwise - right < MIN_GAIN:
        return None
    label_of = {match.model_id: match.dataset_label for match in matches}
    name_of = {match.model_id: match.model_label for match in matches}
    moved = [
        (int(classes[place]), int(classes[becomes[place]])) for place in np.unique(label) if becomes[place] != place
    ]
    pairs = [
        f"{label_of.get(index, str(index))[:MAX_QUOTED]!r} as {(name_of.get(other) or f'class {other}')[:MAX_QUOTED]!r} "
        f"and not {(name_of.get(index) or str(index))[:MAX_QUOTED]!r}"
        for index, other in moved[:NUM_MOVED_SHOWN]
    ]
    more = f" and {len(moved) - NUM_MOVED_SHOWN} more" if len(moved) > NUM_MOVED_SHOWN else ""
    return (
        f"the model answers {right:.0%} of the images right as labels and classes are matched, and {otherwise:.0%} with "
        f"{', '.join(pairs)}{more}: correct the names of its classes in config.json (id2label, or timm's label_names), or "
        "those of the data set"
    )


def guesses(matches: Sequence[LabelMatch]) -> str | None:
    """Return a note on labels that no class's name is equal to: each pair, and what to do if it is wrong."""
    by_order = [
        match
        for match in matches
        if match.rule in ORDERS
        and _number(match.dataset_label) != _number(match.model_label or "")
        and not _synonyms(match.dataset_label) & _synonyms(match.model_label or "")
    ]
    if not by_order:
        return None
    are_numbers = _number(by_order[0].dataset_label) is not None
    rest = f" and {len(by_order) - NUM_SHOWN} more alike" if len(by_order) > NUM_SHOWN else ""
    return (
        f"{', '.join(map(_pair, by_order[:NUM_SHOWN]))}{rest}, by their {'numbers' if are_numbers else 'places'} alone: if the model was trained with "
        "another order, right answers count as wrong, so name its classes in config.json (id2label, or timm's label_names)"
    )


def _pair(match: LabelMatch) -> str:
    return f"{match.dataset_label[:MAX_QUOTED]!r} is taken for {(match.model_label or '')[:MAX_QUOTED]!r}"


def shown(names: Sequence[str]) -> str:
    """Return the first few of some names, quoted, and how many more there are."""
    rest = f" and {len(names) - NUM_SHOWN} more" if len(names) > NUM_SHOWN else ""
    return ", ".join(repr(name[:MAX_QUOTED]) for name in names[:NUM_SHOWN]) + rest


def called_by_number(id2label: Mapping[int, str]) -> dict[int, int]:
    """Return the class of each number that is the name of a class; none if two classes share a name."""
    if len(set(id2label.values())) != len(id2label):
        return {}
    short = {name: index for index, name in id2label.items() if name.isascii() and name.isdecimal() and len(name) < 10}
    return {int(name): index for name, index in short.items() if str(int(name)) == name}


def _normalised(name: str) -> str:
    words = re.split(r"[\s_\-]+", name.casefold().strip())
    return " ".join("no" if word in NO else word for word in words)


def _is_negated(words: Iterable[str]) -> bool:
    return any(word in NEGATIONS or word.endswith(("n't", "n\u2019t")) for word in words)


def _synonyms(name: str) -> frozenset[str]:
    """Return the normalised name and its comma-separated parts, ImageNet's synonyms; "mask, not worn" has none."""
    whole, *parts = (_normalised(part) for part in (name, *name.split(",")))
    are_synonyms = len({_is_negated(part.split()) for part in parts}) == 1
    return frozenset(filter(None, (whole, *(parts if are_synonyms else ()))))


def _number(name: str) -> int | None:
    """Return the number of a name that is nothing else, as LABEL_3 or 3."""
    hit = GENERIC.fullmatch(name.strip())
    return int(hit.group(1)) if hit else None


def _generic_ids(names: Sequence[str]) -> list[int] | None:
    """Return the number in each name if the names are nothing but the numbers 0 to n-1, as in LABEL_3 or 3."""
    numbers = [number for name in names if (number := _number(name)) is not None]
    return numbers if sorted(numbers) == list(range(len(names))) else None


def _are_moved(labels: Sequence[str], model_labels: Sequence[str]) -> bool:
    names = set(labels)
    return list(labels) != list(model_labels) and len(names) == len(labels) and names == set(model_labels)


def _by_order(
    labels: Sequence[str], id2label: Mapping[int, str], *, ordered: bool
) -> dict[MatchKind | Literal["id"], list[int]]:
    """Return each label's class by every rule that looks at the order; by id alone if the names agree at every id."""
    first = len(id2label) - len(labels)
    if first not in (0, 1) or not labels or sorted(id2label) != list(range(len(id2label))):
        return {}
    places, numbers = list(range(len(labels))), _generic_ids(labels)
    model_labels = [id2label[first + place] for place in places]
    # LABEL_3, or 3, for class 3 is what libraries write for a model without names.
    is_unnamed = first == 0 and _generic_ids(model_labels) == places
    are_moved = _are_moved(labels, model_labels) or _are_moved(
        [*map(_normalised, labels)], [*map(_normalised, model_labels)]
    )
    if are_moved and not is_unnamed:
        return {}
    is_first_known = first == 0 or BACKGROUND in _synonyms(id2label[0])
    agree = all(_synonyms(ours) & _synonyms(theirs) for ours, theirs in zip(labels, model_labels, strict=True))
    if (ordered or numbers) and is_first_known and agree:
        return {"id": [first + place for place in places]}
    if first == 0 and numbers is not None:
        return {"number": numbers, "place": places}
    if not is_unnamed or not ordered:
        return {}
    if list(labels) != sorted(labels):
        return {"place": places}

    def natural_key(place: int) -> list[str | int]:
        """Return what timm sorts class folders by: 2 before 10, upper case like lower case."""
        return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", labels[place].casefold())]

    by_nature = sorted(places, key=natural_key)
    return {"place": places, "natural": [by_nature.index(place) for place in places]}


def _imagenet(id2label: Mapping[int, str]) -> Mapping[str, int]:
    """Return the class of each of ImageNet-1k's wnids; of none if these aren't its classes, after a background or not."""
    wnids = WNIDS.read_text(encoding="utf-8").split()
    first = len(id2label) - len(wnids)
    if first not in (0, 1) or sorted(id2label) != list(range(len(id2label))):
        return {}
    is_background = first == 0 or BACKGROUND in _synonyms(id2label[0])
    if is_background and FIRST in _synonyms(id2label[first]) and LAST & _synonyms(id2label[len(id2label) - 1]):
        return {wnid: index for index, wnid in enumerate(wnids, start=first)}
    return {}


def _by_names(labels: Sequence[str], id2label: Mapping[int, str]) -> tuple[LabelMatch, ...]:
    """Match each label by the first rule with a single hit."""
    exact, normalised, synonyms = (defaultdict[str, set[int]](set) for _ in range(3))
    for index, name in id2label.items():
        exact[name].add(index)
        normalised[_normalised(name)].add(index)
        for synonym in _synonyms(name):
            synonyms[synonym].add(index)
    wnids = _imagenet(id2label) if any(WNID.fullmatch(label.strip()) for label in labels) else {}

    def full_name(label: str) -> tuple[MatchRule, int] | None:
        rules: tuple[tuple[MatchRule, set[int]], ...] = (
            ("name", exact.get(label, set())),
            ("normalised name", normalised.get(_normalised(label), set())),
            ("normalised name", set[int]().union(*(synonyms.get(synonym, ()) for synonym in _synonyms(label)))),
            ("wnid", {wnids[label.strip()]} if label.strip() in wnids else set()),
        )
        return next(((rule, min(hits)) for rule, hits in rules if len(hits) == 1), None)

    matches: list[LabelMatch] = []
    for label in labels:
        if (hit := full_name(label)) is None:
            matches.append(LabelMatch(dataset_label=label, model_id=None, model_label=None, rule="unmapped"))
        else:
            matches.append(_match(label, hit[1], id2label, hit[0]))
    return tuple(matches)
