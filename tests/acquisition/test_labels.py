"""Labels of a data set against classes of a model."""

import pytest

from profiling_agent.acquisition.labels import guesses, is_by_place, match_labels, match_numbers
from profiling_agent.errors import AcquisitionError

ANIMALS = {0: "cat", 1: "dog", 2: "bird"}


def ids(matches):
    return [match.model_id for match in matches]


def rules(matches):
    return [match.rule for match in matches]


def test_equal_names_at_every_id_map_by_id():
    matches = match_labels(["cat", "Dog", "BIRD"], ANIMALS)
    assert ids(matches) == [0, 1, 2]
    assert rules(matches) == ["id"] * 3


def test_imagenet_cranes_are_told_apart_by_their_ids():
    cranes = {0: "crane", 1: "tench, Tinca tinca", 2: "crane"}
    assert ids(match_labels(["crane", "tench", "crane "], cranes)) == [0, 1, 2]


def test_an_ambiguous_name_stays_unmapped_where_ids_do_not_agree():
    cranes = {0: "crane", 1: "tench", 2: "crane"}
    assert ids(match_labels(["tench", "crane"], cranes)) == [1, None]


def test_the_same_names_in_another_order_map_by_name_and_not_by_id():
    matches = match_labels(["dog", "bird", "cat"], ANIMALS)
    assert ids(matches) == [1, 2, 0]
    assert rules(matches) == ["name"] * 3


@pytest.mark.parametrize(
    ("labels", "model"),
    [
        ([str(number) for number in range(12)], sorted(str(number) for number in range(12))),
        (["Lesion, benign", "Lesion, malignant"], ["Lesion, malignant", "Lesion, benign"]),
        (["lesion, benign", "lesion, malignant"], ["Lesion, malignant", "Lesion, benign"]),
    ],
)
def test_the_same_names_are_no_numbers_nor_synonyms_of_each_other(labels, model):
    matches = match_labels(labels, dict(enumerate(model)))
    assert [(match.model_label or "").casefold() for match in matches] == [label.casefold() for label in labels]
    assert set(rules(matches)) <= {"name", "normalised name"}


def test_cranes_are_told_apart_where_a_background_comes_before_them():
    names = ["crane", "tench, Tinca tinca", "crane"]
    assert ids(match_labels(["crane", "tench", "crane "], dict(enumerate(["background", *names])))) == [1, 2, 3]
    assert ids(match_labels(["crane", "tench", "crane "], dict(enumerate(["thing", *names])))) == [None, 2, None]


@pytest.mark.parametrize(
    ("numbers", "names", "expected", "rule", "is_guess"),
    [
        ([0, 2], ["a", "b", "c", "d"], [0, 2], "id", True),
        # As they stand, and never shifted: the baseline's answers are asked whether that is right.
        ([1, 2, 3], ["a", "b", "c", "d"], [1, 2, 3], "id", True),
        ([1, 2], ["LABEL_0", "LABEL_1", "LABEL_2"], [1, 2], "id", False),
        ([1, 2], ["1", "2", "3"], [0, 1], "name", False),
        ([0, 2], ["1", "2", "3"], [0, 2], "id", True),
        ([0, 1, 2], [*sorted(str(number) for number in range(11))], [0, 1, 3], "name", False),
    ],
)
def test_whole_numbers_are_classes_called_so_or_ids_as_they_stand(numbers, names, expected, rule, is_guess):
    matches, class_of = match_numbers(numbers, dict(enumerate(names)))
    assert ids(matches) == [class_of[number] for number in numbers] == expected
    assert sorted(class_of.values()) == list(range(len(names)))
    assert set(rules(matches)) == {rule}
    assert any(map(is_by_place, matches)) == is_guess
    assert (" by their numbers alone" in (guesses(matches) or "")) == is_guess


@pytest.mark.parametrize(
    "generic", [["LABEL_0", "LABEL_1", "LABEL_2"], ["0", "1", "2"], ["class 0", "class 1", "class 2"]]
)
def test_numbers_for_names_map_by_id_where_the_counts_agree(generic):
    assert ids(match_labels(generic, ANIMALS)) == [0, 1, 2]
    assert ids(match_labels(["cat", "dog", "bird"], dict(enumerate(generic)))) == [0, 1, 2]


def test_numbers_that_were_sorted_as_text_mean_their_own_number():
    names = [str(number) for number in range(11)]
    assert sorted(names)[2] == "10"
    matches = match_labels(sorted(names), {index: f"thing {index} of a kind" for index in range(11)})
    assert ids(matches) == [0, 1, 10, 2, 3, 4, 5, 6, 7, 8, 9]


def test_numbers_do_not_map_where_the_counts_differ():
    with pytest.raises(AcquisitionError, match="no label of the data set"):
        match_labels(["0", "1"], ANIMALS)


def test_found_strings_without_an_order_never_map_to_numbers():
    with pytest.raises(AcquisitionError, match="LABEL_0"):
        match_labels(["bird", "cat", "dog"], {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}, ordered=False)


def test_case_spaces_underscores_and_hyphens_do_not_matter():
    matches = match_labels(["Golden_Retriever", "tabby-cat"], {5: "tabby cat", 7: "golden retriever", 9: "dog"})
    assert ids(matches) == [7, 5]
    assert rules(matches) == ["normalised name"] * 2


def test_every_synonym_of_an_imagenet_label_counts():
    classes = {0: "tench, Tinca tinca", 217: "English springer, English springer spaniel", 701: "parachute, chute"}
    matches = match_labels(["English springer", "Tinca_tinca", "chute", "gas pump"], classes)
    assert ids(matches) == [217, 0, 701, None]
    assert matches[3].rule == "unmapped"


def test_a_label_is_taken_for_the_class_that_it_says_it_is_a_kind_of_where_names_fail():
    matches = match_labels(["golden retriever", "tomcat", "dog"], {0: "retriever", 1: "cat", 2: "dog"})
    assert ids(matches) == [0, None, 2]
    assert rules(matches) == ["substring", "unmapped", "name"]


@pytest.mark.parametrize(
    ("label", "kind_of_it"),
    [
        ("apple", "custard apple"),
        ("train", "bullet train, bullet"),
        ("bird", "indigo bunting, indigo finch, indigo bird, Passerina cyanea"),
        ("rose", "hip, rose hip, rosehip"),
        ("man", "great white shark, white shark, man-eater, man-eating shark"),
    ],
)
def test_a_label_is_never_taken_for_a_kind_of_what_it_means(label, kind_of_it):
    matches = match_labels([label, "tench"], {0: kind_of_it, 1: "tench, Tinca tinca"})
    assert ids(matches) == [None, 1]


def test_of_a_label_only_the_last_words_say_what_it_is():
    assert ids(match_labels(["apple pie", "dog house", "apple"], {0: "apple", 1: "dog", 2: "pie crust"})) == [
        None,
        None,
        0,
    ]


def test_of_several_classes_the_nearest_is_taken():
    spaniels = {0: "spaniel", 1: "cocker spaniel, cocker", 2: "dog"}
    assert ids(match_labels(["English cocker spaniel", "dog"], spaniels)) == [1, 2]
    assert ids(match_labels(["English cocker spaniel", "cocker"], spaniels)) == [None, 1]


def test_last_words_that_two_classes_have_leave_a_label_unmapped():
    assert ids(match_labels(["old crane", "dog"], {0: "crane", 1: "crane", 2: "dog"})) == [None, 2]


def test_every_pair_of_which_names_are_not_equal_is_told():
    assert guesses(match_labels(["cat", "dog", "bird"], ANIMALS)) is None
    said = guesses(match_labels(["tom cat", "dog", "sea bird"], ANIMALS))
    assert said is not None
    assert said.startswith(
        "'tom cat' is taken for 'cat', 'sea bird' is taken for 'bird', by the label's last words alone"
    )
    many = match_labels(
        [f"small thing {index}" for index in range(60)], {index: f"thing {index}" for index in range(60)}
    )
    assert "'small thing 49' is taken for 'thing 49' and 10 more alike, by" in (guesses(many) or "")


def test_labels_that_are_taken_by_their_places_alone_are_told():
    unnamed = {0: "LABEL_0", 1: "LABEL_1", 2: "LABEL_2"}

    said = guesses(match_labels(["Apple", "Cherry", "banana"], unnamed)) or ""

    assert said.startswith(
        "'Apple' is taken for 'LABEL_0', 'Cherry' is taken for 'LABEL_1', 'banana' is taken for 'LABEL_2', by their places"
    )
    # A label that is a number is its own class's, and names that are equal leave nothing to guess.
    assert guesses(match_labels(["2", "0", "1"], unnamed)) is None
    assert guesses(match_labels(["class 0", "class 1"], {0: "class 0", 1: "class 1"})) is None


IMAGENETTE = ["n01440764", "n02102040", "n02979186", "n15075141"]


def test_imagenets_numbers_are_its_classes_in_their_order(imagenet):
    matches = match_labels(IMAGENETTE, dict(enumerate(imagenet)))
    assert ids(matches) == [0, 217, 482, 999]
    assert rules(matches) == ["wnid"] * 4
    assert ids(match_labels(IMAGENETTE, dict(enumerate(["background", *imagenet])))) == [1, 218, 483, 1000]


def test_one_of_imagenets_numbers_that_is_none_of_the_thousand_stays_unmapped(imagenet):
    assert ids(match_labels(["n01440764", "n00000001", "n014407640"], dict(enumerate(imagenet)))) == [0, None, None]


def test_imagenets_numbers_are_no_classes_of_a_model_with_others(imagenet):
    for names in (imagenet[::-1], [*imagenet, "background"], imagenet[1:], ["tench", "toilet tissue"]):
        with pytest.raises(AcquisitionError, match="no label of the data set is a class of the model"):
            match_labels(IMAGENETTE, dict(enumerate(names)))


def test_a_substring_never_takes_a_class_that_another_label_names():
    assert ids(match_labels(["fire truck", "truck"], {0: "truck", 1: "car", 2: "ship"})) == [None, 0]


def test_no_match_at_all_shows_labels_of_both_sides():
    with pytest.raises(AcquisitionError, match=r"'apple', 'pear'.*'cat', 'dog', 'bird'"):
        match_labels(["apple", "pear"], ANIMALS)


def test_thousands_of_names_are_matched_against_thousands_of_classes_by_their_words():
    classes = {index: f"kind {index} of things, thing {index}" for index in range(5_000)}
    matches = match_labels([f"small thing {index}" for index in reversed(range(5_000))], classes, ordered=False)
    assert ids(matches) == list(reversed(range(5_000)))
    assert set(rules(matches)) == {"substring"}
