"""Label matching: by name, id, number or place; the model's answers decide between matches; a wrong guess is refused."""

from pathlib import Path

import in_process
import numpy as np
import pytest
import torch
import zoo
from PIL import Image

from profiling_agent.data.images import SplitImages
from profiling_agent.data.labels import choose_matching, match_labels, match_numbers, order_match_note, why_doubtful
from profiling_agent.errors import AcquisitionError
from profiling_agent.jobs.tasks import AcquireTask
from profiling_agent.schemas import Acquired, LabelMatch

ANIMALS = ["cat", "dog", "bird"]
CRANES = ["crane", "tench, Tinca tinca", "crane"]
# A thousand classes of which the first and the last are ImageNet's, and names of ImageNet's folders.
IMAGENET = ["tench, Tinca tinca", *(f"kind {index}" for index in range(1, 999)), "toilet tissue, toilet paper"]
IMAGENETTE = ["n01440764", "n02102040", "n02979186", "n15075141"]


def unnamed(num_classes):
    return [f"LABEL_{index}" for index in range(num_classes)]


def numbers(num_classes):
    return [str(number) for number in range(num_classes)]


def folders(num_classes):
    """Return class folders with numbers for names, in the order in which folders are read: 10 before 2."""
    return sorted(numbers(num_classes))


def ways(labels, names, **options):
    """Return the ways in which labels fit a model with these names of classes."""
    return match_labels(labels, dict(enumerate(names)), **options)


def matched(labels, names, **options):
    """Return the likeliest way in which labels fit."""
    return ways(labels, names, **options)[0].matches


def ids(matches):
    return [match.model_id for match in matches]


def rules(matches):
    return [match.rule for match in matches]


@pytest.mark.parametrize(
    ("labels", "names", "classes", "by"),
    [
        # Equal names at every id; so ImageNet's two cranes are told apart, also where a background comes first.
        (["cat", "Dog", "BIRD"], ANIMALS, [0, 1, 2], "id id id"),
        (["crane", "tench", "crane "], CRANES, [0, 1, 2], "id id id"),
        (["crane", "tench", "crane "], ["background", *CRANES], [1, 2, 3], "id id id"),
        # An ambiguous name stays unmapped where ids don't agree.
        (["crane", "tench", "crane "], ["thing", *CRANES], [None, 2, None], None),
        (["tench", "crane"], ["crane", "tench", "crane"], [1, None], "name unmapped"),
        # The same names in another order are no ids, no numbers, and no synonyms of each other.
        (["dog", "bird", "cat"], ANIMALS, [1, 2, 0], "name name name"),
        (numbers(12), folders(12), [folders(12).index(name) for name in numbers(12)], " ".join(["name"] * 12)),
        (["Lesion, benign", "Lesion, malignant"], ["Lesion, malignant", "Lesion, benign"], [1, 0], "name name"),
        (["lesion, benign", "lesion, malignant"], ["Lesion, malignant", "Lesion, benign"], [1, 0], None),
        # So are names that only differ in case, as letters do, which are no ids in another order either.
        (["A", "B", "a", "b"], ["a", "b", "A", "B"], [2, 3, 0, 1], "name name name name"),
        # Case, spaces, underscores and hyphens don't matter.
        (["Golden_Retriever", "tabby-cat"], ["dog", "tabby cat", "golden retriever", "fish"], [2, 1], None),
        # Every synonym of an ImageNet label counts, and nothing else of it.
        (
            ["English springer", "Tinca_tinca", "chute", "gas pump"],
            [
                "tench, Tinca tinca",
                "dog",
                "English springer, English springer spaniel",
                "parachute, chute",
                "cat",
                "ant",
            ],
            [2, 0, 3, None],
            None,
        ),
        (["apple", "tench"], ["custard apple", "tench, Tinca tinca"], [None, 1], None),
        (["train", "tench"], ["bullet train, bullet", "tench, Tinca tinca"], [None, 1], None),
        (["with_mask", "without_mask"], ["mask", "no mask"], [None, 1], None),
        # A negated part is no synonym, unless all parts are negated.
        (["mask, not worn", "other"], ["mask", "Other"], [None, 1], None),
        (["no mask", "Mask"], ["mask", "no mask, without mask"], [1, 0], None),
        # ImageNet's numbers are its classes in their order.
        (IMAGENETTE, IMAGENET, [0, 217, 482, 999], "wnid wnid wnid wnid"),
        (IMAGENETTE, ["background", *IMAGENET], [1, 218, 483, 1000], "wnid wnid wnid wnid"),
        (["n01440764", "n00000001", "n014407640"], IMAGENET, [0, None, None], "wnid unmapped unmapped"),
    ],
)
def test_a_label_is_the_class_of_its_name(labels, names, classes, by):
    matches = matched(labels, names)
    assert ids(matches) == classes
    expected = by.split() if by else ["unmapped" if index is None else "normalised name" for index in classes]
    assert rules(matches) == expected


@pytest.mark.parametrize("names", [IMAGENET[::-1], [*IMAGENET, "background"], IMAGENET[1:], ["tench", "toilet tissue"]])
def test_imagenets_numbers_are_no_classes_of_a_model_with_others(names):
    with pytest.raises(AcquisitionError, match=r"no label of the data set .* is a class of the model"):
        matched(IMAGENETTE, names)


@pytest.mark.parametrize(
    ("integers", "names", "expected", "is_guess"),
    [
        ([0, 2], ["a", "b", "c", "d"], {"number": [0, 2]}, True),
        ([1, 2, 3], ["a", "b", "c", "d"], {"number": [1, 2, 3], "from-1": [0, 1, 2]}, True),
        ([1, 2], unnamed(3), {"number": [1, 2], "from-1": [0, 1]}, False),
        ([1, 2], ["1", "2", "3"], {"name": [0, 1], "number": [1, 2]}, False),
        ([0, 1, 2], folders(11), {"name": [0, 1, 3], "number": [0, 1, 2]}, False),
    ],
)
def test_whole_numbers_are_names_or_ids_or_ids_from_1(integers, names, expected, is_guess):
    matchings = match_numbers(integers, dict(enumerate(names)))
    assert {way.by: ids(way.matches) for way in matchings} == expected
    assert [way.by for way in matchings] == list(expected)
    for way in matchings:
        assert [way.class_of[number] for number in integers] == ids(way.matches)
        assert sorted(way.class_of.values()) == list(range(len(names)))
        assert set(rules(way.matches)) == {way.by}
    assert (" with classes by number only" in (order_match_note(matchings[0].matches) or "")) == is_guess


@pytest.mark.parametrize(
    ("labels", "names", "options", "said"),
    [
        (["apple", "pear"], ANIMALS, {}, "no label of the data set.*'apple', 'pear'.*'cat', 'dog', 'bird'"),
        (["0", "1"], ANIMALS, {}, "no label of the data set"),
        # Strings without an order are no numbers.
        (["bird", "cat", "dog"], unnamed(3), {"ordered": False}, "LABEL_0"),
        (
            folders(20),
            unnamed(20),
            {"by": "from-1"},
            "label_match is 'from-1', but .* by number and place: choose that",
        ),
        (ANIMALS, ANIMALS, {"by": "place"}, "label_match is 'place', but .* by name"),
    ],
)
def test_labels_that_do_not_fit_are_shown_with_the_classes(labels, names, options, said):
    with pytest.raises(AcquisitionError, match=said):
        ways(labels, names, **options)


def test_labels_that_are_taken_by_their_places_alone_are_told():
    said = order_match_note(matched(["Apple", "Cherry", "banana"], unnamed(3))) or ""

    assert said.startswith(
        "labels are matched with classes by place only, such as 'Apple' with 'LABEL_0': if that is wrong"
    )
    # A label that is a number is its own class's, and names that are equal leave nothing to guess.
    assert order_match_note(matched(["2", "0", "1"], unnamed(3))) is None
    assert order_match_note(matched(["class 0", "class 1"], ["class 0", "class 1"])) is None


@pytest.mark.parametrize("num_classes", [20, 120])
@pytest.mark.parametrize("name", ["LABEL_{}", "{}", "class {}", "thing {} of a kind"])
def test_folders_with_numbers_fit_by_number_and_by_place(num_classes, name):
    labels, names = folders(num_classes), [name.format(index) for index in range(num_classes)]

    matchings = ways(labels, names)

    assert [way.by for way in matchings] == ["number", "place"]
    assert ids(matchings[0].matches) == [int(label) for label in labels]
    assert ids(matchings[1].matches) == list(range(num_classes))
    # Text in a column is sorted like folders.
    assert ways(labels, names, ordered=False) == matchings


@pytest.mark.parametrize(
    ("labels", "names", "options", "by"),
    [
        (numbers(120), unnamed(120), {}, "number"),
        (["dog", "bird", "cat"], ANIMALS, {}, "name"),
        # Names that were written in the order of folders are names.
        (folders(20), folders(20), {}, "name"),
        (numbers(20), folders(20), {}, "name"),
        (["apple", "banana"], unnamed(2), {}, "place"),
        # A list of the data set's own is in no order of folders.
        (["b", "a10", "a2"], unnamed(3), {}, "place"),
        (["Apple", "Cherry", "banana"], unnamed(3), {}, "place"),
        # What the user chose is the only one; of ten folders both ways are the same.
        (folders(20), unnamed(20), {"by": "number"}, "number"),
        (folders(10), unnamed(10), {"by": "place"}, "place"),
    ],
)
def test_labels_that_fit_in_one_way_leave_nothing_to_choose(labels, names, options, by):
    assert [way.by for way in ways(labels, names, **options)] == [by]


@pytest.mark.parametrize("num_classes", [20, 120])
@pytest.mark.parametrize(("way", "by"), [(0, "number"), (1, "place")])
def test_answers_choose_the_match_that_they_fit(num_classes, way, by):
    """Of four images five are right, of a hundred and twenty classes with two images each."""
    matchings = ways(folders(num_classes), unnamed(num_classes))
    true = np.arange(2 * num_classes) % num_classes
    meant = np.array([matchings[0].becomes(matchings[way])[index] for index in true.tolist()])
    predicted = np.where(np.arange(len(true)) % 5 == 0, (meant + 1) % num_classes, meant)

    chosen, note = choose_matching(matchings, predicted, true)

    assert chosen is matchings[way]
    assert f"{len(true)} calibration images decide how labels are matched: by {by} 80% right" in note


def test_answers_that_fit_neither_or_both_stop_with_both_matches_and_what_to_write():
    true, pair = np.arange(80) % 20, r"by \w+ \d+% right"
    said = rf"don't decide: {pair}, {pair}; set label_match to (number or place|place or number)"
    # Class 0 is class 0 either way, and of three images nobody can tell.
    for predicted in (np.random.default_rng(0).permutation(true), 0 * true, true[10:13]):
        part = true[10:13] if len(predicted) == 3 else true
        with pytest.raises(AcquisitionError, match=said):
            choose_matching(ways(folders(20), unnamed(20)), predicted, part)


def test_a_match_without_a_class_for_one_of_the_labels_does_not_fit():
    matchings = match_numbers([1, 2], dict(enumerate(ANIMALS)))
    chosen, note = choose_matching(matchings, np.array([1, 0, 0]), np.array([0, 1, 2]))
    assert chosen.by == "number"
    assert note.startswith("labels are matched with classes by number only, such as '1' with 'dog'")


TRUE = np.arange(400) % 5


def by_rule(rule):
    return [
        LabelMatch(dataset_label=name, model_id=index, model_label=f"LABEL_{index}", rule=rule)
        for index, name in enumerate(("Apple", "Cherry", "banana", "fig", "pear"))
    ]


def test_two_classes_that_are_each_others_are_found():
    predicted = np.array([0, 2, 1, 3, 4])[TRUE]
    # Three classes of five are right as they are.
    expected = (
        "answers 60% of the images right as labels are matched, and 100% with others, such as 'Cherry' as 'LABEL_2': "
    )
    assert expected in (why_doubtful(predicted, TRUE, by_rule("name")) or "")
    for rule in ("number", "from-1", "place"):
        with pytest.raises(AcquisitionError, match=expected):
            why_doubtful(predicted, TRUE, by_rule(rule))


def test_few_images_do_not_show_another_match():
    swapped = np.array([1, 0, 3, 4, 2])
    for num_images, is_shown in ((199, False), (200, True)):
        reason = why_doubtful(swapped[TRUE[:num_images]], TRUE[:num_images], by_rule("name")) or ""
        assert ("as labels are matched" in reason) == is_shown


@pytest.mark.parametrize("num_classes", [2, 5, 300])
def test_answers_no_better_than_chance_leave_a_doubt(num_classes):
    random = np.random.default_rng(0)
    true = np.arange(400) % num_classes
    # No answer, always the same, and any: each is what a model without knowledge has.
    for predicted in (np.full(400, -1), 0 * true, random.permutation(true)):
        assert "search images right, which chance does too" in (why_doubtful(predicted, true, ()) or "")
    half = np.where(random.random(400) < 0.5, true, random.integers(0, num_classes, 400))
    assert why_doubtful(half, true, ()) is None


NUM_CLASSES = 12
FOLDERS = folders(NUM_CLASSES)
CORNERS = np.array([[x, y, z] for x in (40, 200) for y in (40, 120, 200) for z in (40, 200)])


def picture(number: int, random: np.random.Generator) -> Image.Image:
    noise = random.normal(0, 15, (32, 32, 3))
    return Image.fromarray((CORNERS[number] + noise).clip(0, 255).astype(np.uint8))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write class folders called 0 to 11, each of one colour."""
    root, random = tmp_path_factory.mktemp("numbers"), np.random.default_rng(0)
    for split, num_images in (("train", 5), ("test", 12)):
        for number in range(NUM_CLASSES):
            folder = root / split / str(number)
            folder.mkdir(parents=True)
            for index in range(num_images):
                picture(number, random).save(folder / f"{index}.png")
    return root


@pytest.fixture(scope="module")
def trained() -> zoo.ViTForImageClassification:
    """Train a model without names whose class is the number of the folder."""
    random, model = np.random.default_rng(1), zoo.vit(id2label=None, num_labels=NUM_CLASSES)
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(60):
        numbers = random.integers(0, NUM_CLASSES, 48)
        pixels = zoo.processor()([picture(number, random) for number in numbers], return_tensors="pt")["pixel_values"]
        loss = torch.nn.functional.cross_entropy(model(pixel_values=pixels).logits, torch.tensor(numbers))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval()


def acquire(model: Path, data: Path, root: Path, name: str = "acquire", **options) -> Acquired:
    return in_process.run(AcquireTask(model=str(model), dataset=str(data), device="cpu", **options), root, name)


@pytest.mark.slow
@pytest.mark.parametrize("order", ["number", "place"])
def test_folders_with_numbers_are_the_classes_that_the_model_was_trained_with(data, trained, tmp_path, order):
    """Trained by folder order, as torchvision and `datasets` read folders, class 2 is folder 10."""
    model = zoo.save(trained, tmp_path / "model")
    turned = zoo.ViTForImageClassification.from_pretrained(model).eval()
    expected = [int(name) for name in FOLDERS]
    if order == "place":
        with torch.no_grad():
            for tensor in zoo.inside(turned).classifier.parameters():
                tensor.copy_(tensor[expected].clone())
        zoo.save(turned, model)
        expected = list(range(NUM_CLASSES))

    acquired = acquire(model, data, tmp_path / "run")

    matches = [(match.dataset_label, match.model_id, match.rule) for match in acquired.labels]
    assert matches == list(zip(FOLDERS, expected, [order] * NUM_CLASSES, strict=True))
    assert f"calibration images decide how labels are matched: by {order} " in acquired.notes[0]
    for split in (acquired.calibration, acquired.search, acquired.heldout):
        images = SplitImages(tmp_path / "run" / split.file.path)
        pixels = zoo.processor()([images.image(row) for row in range(len(images))], return_tensors="pt")
        with torch.inference_mode():
            predicted = zoo.inside(turned)(**pixels).logits.argmax(-1).numpy()
        assert np.mean(predicted == images.labels) > 0.9


def test_where_the_answers_do_not_decide_the_user_does(data, tmp_path):
    model = zoo.save(zoo.vit(id2label=None, num_labels=NUM_CLASSES), tmp_path / "model")
    with pytest.raises(AcquisitionError, match=r"don't decide: .*; set label_match to \w+ or \w+$"):
        acquire(model, data, tmp_path / "run")
    acquired = acquire(model, data, tmp_path / "run", "by place", label_match="place")
    assert {match.rule for match in acquired.labels} == {"place"}
