"""What a run does with its time, and what is left of it: counted by hand, with a pass of a tenth of a second."""

from pathlib import Path
from typing import Any

import pytest
import sample_records
from search.scripted import Jobs, evaluator

from profiling_agent.errors import RequestError
from profiling_agent.schemas import NUM_SESSIONS
from profiling_agent.search.evaluator import EFFORTS, Deadline, affordable_images, search_deadline
from profiling_agent.workspace import Timesheet

PASS_S = 0.1
# 80 s and 3,100 passes.
END = 80 + 310


def deadline(
    root: Path, spent_s: float, limit_s: float | None = None, effort: str = "default", pass_s: float = PASS_S
) -> Deadline:
    sheet = Timesheet(root / "timesheet.jsonl")
    sheet.resume_at(spent_s)
    return search_deadline(sheet, EFFORTS[effort], pass_s, limit_s)


def test_a_time_budget_keeps_enough_for_the_end_of_the_run(tmp_path: Path):
    held = deadline(tmp_path, 400.0, 1000.0)
    assert held.allows(600.0 - END)
    assert not held.allows(601.0 - END)
    # A stage may take its share of what is free, and no more than what is left of that.
    stage = held.part(0.5)
    assert stage.allows((600.0 - END) / 2)
    assert not stage.allows((600.0 - END) / 2 + 1)
    held.timesheet.resume_at(450.0)
    assert not stage.allows((600.0 - END) / 2 - 49)


def test_a_request_for_training_accepts_long_attempts(tmp_path: Path):
    for epochs, is_limited in ((0, True), (1, False)):
        held = evaluator(Jobs(tmp_path), settings={"recover_epochs": epochs})
        assert held.deadline.allows(1e6) is not is_limited
        # No refusal of the search's is one of the final choice's.
        assert held.closing.allows(1e6)


@pytest.mark.parametrize(
    ("effort", "pass_s", "num_searched", "num_heldout", "num_sessions"),
    [
        # The fewest that show something: a shard, and two.
        ("quick", 0.0005, 512, 1024, 3),
        ("default", 0.0005, 2000, 8000, NUM_SESSIONS),
        # Five minutes of passes: 1,500 images, and 1,024 at least.
        ("default", 0.2, 1536, 1536, NUM_SESSIONS),
        ("default", 1.0, 512, 1024, NUM_SESSIONS),
        ("thorough", 1.0, 2000, 8000, NUM_SESSIONS),
    ],
)
def test_the_effort_says_how_many_images_and_sessions_a_run_uses(
    effort: str, pass_s: float, num_searched: int, num_heldout: int, num_sessions: int, tmp_path: Path
):
    profile = sample_records.profile(pass_s=pass_s)
    held = evaluator(Jobs(tmp_path), num_images=8000, num_search=2000, profile=profile, settings={"effort": effort})

    assert (len(held.searched), held.num_heldout, held.num_sessions) == (num_searched, num_heldout, num_sessions)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, 512),
        # 1.28 sqrt(2) / (n + 2) is a thousandth at 1,810 images, and half of one at 3,623: all there are.
        ({"max_accuracy_drop": 0.001}, 2000),
        ({"max_accuracy_drop": 0.002}, 1024),
        ({"max_accuracy_drop": 0.0005}, 2000),
        ({"selection": "paper"}, 2000),
    ],
)
def test_as_many_are_looked_at_as_can_show_the_contract_kept(tmp_path: Path, asked: dict[str, Any], expected: int):
    held = evaluator(Jobs(tmp_path), num_images=2000, settings={"effort": "quick"}, **asked)
    assert len(held.searched) == expected


def test_fewer_images_calibrate_where_evidence_and_an_attempt_would_take_more_than_a_quarter():
    assert affordable_images(None, 60.0, 256) == 256
    # 256 images and 24 units are 1,760 passes, and an attempt 5.5 for each image: 317 s.
    assert affordable_images(1268.0, PASS_S, 256) == 256
    assert affordable_images(1082.0, PASS_S, 256) == 128
    assert affordable_images(1082.0, PASS_S, 100) == 100


def test_a_budget_for_nothing_says_what_would_do():
    # 170 s are any model's, and 3,200 passes.
    with pytest.raises(
        RequestError, match=r"is 300 s, and a model that takes 1 s for an image needs at least 57m: give"
    ):
        affordable_images(300.0, 1.0, 256)
    assert affordable_images(57 * 60.0, 1.0, 256) == 128


def test_a_time_budget_has_room_for_evidence_and_a_first_plan_or_makes_none(tmp_path: Path):
    # 3.5 passes for each of 256 images and 36 for each of two units, 5.5 for each image, and half of 1,000: 2,876. Another 15 s, and the end.
    needed_s = 2876.0 * PASS_S + 15 + END
    for budget_s, has_time in ((needed_s + 1, True), (needed_s - 1, False)):
        held = evaluator(Jobs(tmp_path), profile=sample_records.profile(pass_s=PASS_S), time_budget_s=budget_s)
        assert held.has_time_to_prune is has_time
