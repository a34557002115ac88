"""How many held-out images are looked at, by a candidate whose answers are made up, and whether there are enough."""

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_records
from search import scripted
from search.scripted import Jobs, acquired

from profiling_agent import schemas
from profiling_agent.jobs.tasks import Evaluated, EvaluateTask, OpenHeldoutTask
from profiling_agent.measure.intervals import Counts, one_sided_bound, paired_drop, selection_bias, share, upper_bound
from profiling_agent.schemas import Evaluation, Opening, Variant
from profiling_agent.search import verdict
from profiling_agent.search.evaluator import MAX_AT_ONCE, Evaluator
from profiling_agent.search.selection import keeps_accuracy
from profiling_agent.search.verdict import ACCURACY_ERROR, error_of, run_heldout_test

BASELINE, CANDIDATE = sample_records.ref("baseline"), sample_records.ref("candidate")
MEASURED = sample_records.evaluation("candidate", Variant.BOTH)
Answers = Callable[[range], list[bool]]


@dataclass
class Answering(Jobs):
    """Jobs that answer evaluations by what is right of which image."""

    right: dict[str, Answers] = field(default_factory=dict[str, Answers])
    seen: list[tuple[str, range]] = field(default_factory=list[tuple[str, range]])
    shard_s: float = 0.0

    def OpenHeldoutTask(self, task: OpenHeldoutTask) -> Opening:  # noqa: N802
        number = int(task.fresh or "1")
        return Opening(number=number, share=share(number))

    def run_each(self, tasks: list[EvaluateTask]) -> list[Evaluated]:
        rows = [tasks[0].split.rows(task.shard) for task in tasks]
        self.seen.append((tasks[0].model.path, range(rows[0].start, rows[-1].stop)))
        self.timesheet.resume_at(self.timesheet.spent_s + len(tasks) * self.shard_s)
        return super().run_each(tasks)

    def EvaluateTask(self, task: EvaluateTask) -> Evaluated:  # noqa: N802
        return self.evaluated(task, ~np.array(self.right[task.model.path](task.split.rows(task.shard))))


def evaluator(
    root: Path, num_images: int, candidate: Answers, *, pass_s: float = 0.0005, **goal: Any
) -> tuple[Evaluator, Answering]:
    jobs = Answering(root, {BASELINE.path: lambda part: [True] * len(part), CANDIDATE.path: candidate})
    asked: dict[str, Any] = {"baseline": BASELINE} | goal
    profile = sample_records.profile(pass_s=pass_s)
    return scripted.evaluator(jobs, num_images=num_images, profile=profile, **asked), jobs


def every(number: int) -> Answers:
    """Answer each image with that number wrong, and all others right."""
    return lambda part: [image % number != 0 for image in part]


@pytest.mark.parametrize(
    ("num_images", "ends"),
    [(1, [1]), (1024, [1024]), (1025, [512, 1024, 1025]), (8000, [512, 1024, 1536, 2048, 3072, 4096, 6144, 8000])],
)
def test_a_small_set_is_looked_at_once_and_a_large_one_a_good_part_further_each_time(num_images, ends):
    parts = list(verdict.look_ranges(num_images))
    assert [part.stop for part in parts] == ends
    assert [image for part in parts for image in part] == list(range(num_images))


def test_a_candidate_that_answers_alike_is_known_after_two_looks_and_the_rest_stays_closed(tmp_path: Path):
    tester, jobs = evaluator(tmp_path, 8000, lambda part: [True] * len(part))
    tested = run_heldout_test(tester, MEASURED)
    drop = tested.candidate.drop
    assert drop is not None
    assert jobs.seen == [
        (model.path, part) for part in (range(512), range(512, 1024)) for model in (BASELINE, CANDIDATE)
    ]
    assert (drop.num_images, drop.num_looks) == (1024, 3)
    assert error_of(tested.opening) == 0.8 * ACCURACY_ERROR
    assert (
        one_sided_bound(drop, 1 - error_of(tested.opening))
        == upper_bound(Counts(0, 0, 1024), error_of(tested.opening))
        <= 0.01
    )


def searched(lost: int, gained: int, num_images: int = 1000) -> Evaluation:
    """Return the candidate as so many search images have it."""
    return MEASURED.model_copy(update={"drop": sample_records.drop(lost, gained, num_images)})


@pytest.mark.parametrize(
    ("seen_in_search", "lost_every", "bias", "keeps", "pooled"),
    [
        # One net of 2,000, and 12 of 1,024: 1.17 points there, 0.43 together.
        ((41, 40, 2000), 86, 0.0, True, 13 / 3024),
        # The same where the search images flatter it by a point: 1.09.
        ((41, 40, 2000), 86, 0.01, False, 33 / 3024),
        # 5 of 1,000 and 16 of 1,024: 1.04 together.
        ((5, 0, 1000), 64, 0.0, False, 21 / 2024),
        # 5 of 1,000 and 15 of 1,024.
        ((5, 0, 1000), 71, 0.0, True, 20 / 2024),
        # 0.91 together, but 34 of 1,024 alone show more than a point: a bound of 2.4.
        ((0, 6, 2048), 31, 0.0, False, 28 / 3072),
    ],
)
def test_where_held_out_images_are_undecided_the_search_images_decide_with_them(
    seen_in_search: tuple[int, int, int], lost_every: int, bias: float, keeps: bool, pooled: float, tmp_path: Path
):
    tester, _ = evaluator(tmp_path, 1024, every(lost_every))
    tested = run_heldout_test(tester, searched(*seen_in_search), bias=bias)
    assert (tested.keeps_accuracy, tested.pooled) == (keeps, pytest.approx(pooled))


def test_the_best_of_several_measured_drops_is_too_good_to_be_true():
    alone, far = sample_records.drop(60, 40), sample_records.drop(200, 40)
    # The standard error is sqrt(100) of 1,000; of two equals the least is 0.56 of it too low, of three 0.85.
    assert selection_bias([alone]) == 0.0
    assert selection_bias([alone, alone]) == pytest.approx(0.56 * 0.01, rel=0.1)
    assert selection_bias([alone, alone, alone]) == pytest.approx(0.85 * 0.01, rel=0.1)
    assert abs(selection_bias([alone, far])) < 0.0005


NEVER = 10**6


@pytest.mark.parametrize(
    ("lost", "gained", "effort", "pass_s", "time_budget_s", "spent_s", "seen"),
    [
        # 6% discordant and nothing lost on net: 6,800 images would show it.
        (34, 35, "default", 0.0005, None, 0.0, 5000),
        # Five minutes of passes, and two shards at least.
        (34, 35, "default", 0.1, None, 0.0, 3072),
        (34, 35, "default", 1.0, None, 0.0, 1024),
        (34, 35, "quick", 0.0005, None, 0.0, 1024),
        (34, 35, "thorough", 1.0, None, 0.0, 5000),
        # 4,096 images show the contract kept.
        (200, NEVER, "default", 0.0005, None, 0.0, 4096),
        # After eight shards of 20 s another two leave a time budget nothing for the report.
        (100, NEVER, "default", 0.0005, 300.0, 100.0, 4096),
        # A thousand though the search has spent the budget.
        (100, NEVER, "default", 0.0005, 60.0, 100.0, 1024),
        (100, NEVER, "default", 0.0005, 3600.0, 100.0, 5000),
    ],
)
def test_as_many_images_are_looked_at_as_decide_and_as_effort_and_time_allow(
    lost: int,
    gained: int,
    effort: str,
    pass_s: float,
    time_budget_s: float | None,
    spent_s: float,
    seen: int,
    tmp_path: Path,
):
    settings = {"effort": effort}
    tester, jobs = evaluator(tmp_path, 5000, every(lost), pass_s=pass_s, settings=settings, time_budget_s=time_budget_s)
    jobs.right[BASELINE.path] = lambda part: [image % gained != 0 or image == 0 for image in part]
    jobs.shard_s = 10.0 if spent_s else 0.0
    jobs.timesheet.resume_at(spent_s)

    assert run_heldout_test(tester, MEASURED).candidate.predictions.num_images == seen


def test_few_images_are_a_sample_of_fixed_size(tmp_path: Path):
    tester, _ = evaluator(tmp_path, MAX_AT_ONCE, every(100))
    drop = run_heldout_test(tester, MEASURED).candidate.drop
    right = np.array(every(100)(range(MAX_AT_ONCE)))
    assert drop == paired_drop(np.ones(MAX_AT_ONCE, dtype=bool), right)


@pytest.mark.parametrize(
    ("wrong_every", "goal", "num_images", "seen"),
    [
        # One in ten lost, and one point allowed: hopeless after a shard.
        (10, {}, 8000, 512),
        # Nothing lost of what may lose ten points: clear after a shard.
        (10**6, {"max_accuracy_drop": 0.1}, 8000, 512),
        # One in two hundred: half a point of the one that is allowed says nothing yet.
        (200, {}, 8000, 8000),
        # Of so few a sample of fixed size says more.
        (10, {}, 1024, 1024),
        # The paper's rule compares what all images say.
        (10, {"selection": "paper"}, 8000, 8000),
    ],
)
def test_search_images_are_looked_at_no_further_than_decides(
    wrong_every: int, goal: dict[str, Any], num_images: int, seen: int, tmp_path: Path
):
    tester, jobs = evaluator(tmp_path, num_images, every(wrong_every), **goal)
    found = tester.search(Variant.BOTH, CANDIDATE)
    assert found.predictions.num_images == seen
    assert max(part.stop for model, part in jobs.seen if model == BASELINE.path) == seen
    assert found.drop is not None
    assert found.drop.num_looks == (2 if seen == 512 else 1)
    assert keeps_accuracy(found, tester.goal) == (wrong_every != 10)


@pytest.mark.parametrize(
    ("num_heldout", "max_drop", "num_search", "num_classes", "expected"),
    [
        # z^2 / (n + z^2) for z = 2.0537: 418 images show one point, and 344 show 1.2.
        (418, 0.01, 10**6, 1000, ()),
        (344, 0.01, 10**6, 1000, ("344 held-out images show a drop of 1.2 points at best, where 1 is allowed",)),
        # 1.2816 sqrt(2) / (n + 2) for 100 search images.
        (418, 0.01, 100, 10, ("100 search images show a drop of 1.8 points at best, where 1 is allowed",)),
        # More than 1,024 are looked at more than once, which takes twice as many to show as much.
        (1024, 0.005, 10**6, 1000, ()),
        (1025, 0.005, 10**6, 1000, ("1025 held-out images show a drop of 0.58 points at best",)),
        # Of 484 images 12 may differ: 1.2816 sqrt(14) / 486 is 0.987 points. Of 700 more than the 3% that most models change.
        (
            500,
            0.01,
            484,
            1000,
            ("484 search images show", "at most 2.5% differently", "484 images of 1,000 classes nothing is shown of"),
        ),
        (500, 0.01, 484, 10, ("at most 2.5% differently: of others, held-out images decide",)),
        (500, 0.01, 700, 1000, ()),
    ],
)
def test_what_few_images_can_show_and_what_not(
    num_heldout: int, max_drop: float, num_search: int, num_classes: int, expected: tuple[str, ...]
):
    goal = sample_records.GOAL.model_copy(update={"max_accuracy_drop": max_drop})
    match = schemas.LabelMatch(dataset_label="a", model_id=1, model_label="a", rule="name")
    data = acquired(num_heldout, num_search).model_copy(update={"labels": (match,) * num_classes})
    note = verdict.few_images_note(data, goal)
    assert (note is None) is not bool(expected)
    assert all(text in (note or "") for text in expected)
    assert ("single class" in (note or "")) is (bool(expected) and num_search < num_classes)
