"""Another candidate of a finished run is taken as it was measured, by what was wanted or by its number; nothing is measured again."""

import io
import json
import shutil
from pathlib import Path

import made
import pytest
from commands import call
from rich.console import Console
from rich.table import Table

from profiling_agent import pick
from profiling_agent.cli.tables import candidates_table, picked_table
from profiling_agent.deployment.load import load
from profiling_agent.errors import ArtifactError, RequestError, RunError
from profiling_agent.handover.pick import Measured, best_for, candidates, candidates_of, named
from profiling_agent.records import RaceResult, Term, Variant
from profiling_agent.reporting.report import RunReport

GOAL = made.GOAL.model_copy(update={"max_accuracy_drop": 0.05, "max_size_ratio": 0.6})


def measured(
    number: int, name: str, *, correct: int, size_bytes: int, speedup: float | None, peak: int = 0
) -> Measured:
    """Return a candidate of a baseline that answers 900 of 1000 images right and has 4000 bytes."""
    variant = Variant.BASELINE if number == 0 else Variant.BOTH
    raced: RaceResult | None = None
    if speedup is not None:
        raced = made.race_result(name, speedup, speedup, speedup, variant)
        raced = raced.model_copy(update={"peak_bytes": (peak,) if peak else ()})
    against = None if number == 0 else 900
    evaluation = made.evaluation(name, variant, correct=correct, against=against, size_bytes=size_bytes)
    return Measured(
        number=number, evaluation=evaluation, race_result=raced, terms=(), is_judged=False, is_on_front=False
    )


FOUND = (
    measured(0, "m0", correct=900, size_bytes=4000, speedup=1.0, peak=100),
    measured(1, "fast", correct=880, size_bytes=2000, speedup=3.0, peak=90),
    measured(2, "small", correct=885, size_bytes=1000, speedup=2.0, peak=80),
    measured(3, "wrong", correct=700, size_bytes=500, speedup=4.0, peak=70),
    measured(4, "exact", correct=899, size_bytes=2300, speedup=1.5, peak=60),
    # Exact too, but larger than 60% of the bytes.
    measured(5, "large", correct=900, size_bytes=3000, speedup=1.5, peak=50),
    measured(6, "untimed", correct=890, size_bytes=900, speedup=None),
)


def drawn(table: Table) -> str:
    console = Console(file=io.StringIO(), width=500)
    with console.capture() as shown:
        console.print(table)
    return shown.get()


@pytest.mark.parametrize(
    ("objective", "number"),
    # What isn't timed can't be said to be fast enough, so it stands behind all that is.
    [("speed", 1), ("size", 2), ("accuracy", 4), ("memory", 4)],
)
def test_an_objective_takes_what_keeps_the_terms_and_has_most_of_it(objective: str, number: int):
    assert best_for(objective, FOUND, GOAL).number == number


def test_what_held_out_images_were_against_comes_last():
    refused = FOUND[1].model_copy(update={"notes": ("it failed on the held-out images, and was refused",)})

    assert best_for("speed", (FOUND[0], refused, *FOUND[2:]), GOAL).number == 2
    assert best_for("speed", (FOUND[0], refused), GOAL).number == 1


@pytest.mark.parametrize(("high", "number"), [(3.1, 2), (9.0, 1)])
def test_candidates_are_compared_in_the_session_that_all_were_in(high: float, number: int):
    """The sessions say less of the returned model than the one that chose it, and nothing of the others."""
    screened = made.race_result("small", 3.0, 2.9, 3.1)
    returned = FOUND[2].model_copy(update={"chosen_by": screened, "is_judged": True})
    other = FOUND[1].model_copy(update={"chosen_by": made.race_result("fast", high - 0.1, high - 0.2, high)})

    assert best_for("speed", (FOUND[0], other, returned), GOAL).number == number
    assert returned.speedup > FOUND[2].speedup


def test_a_candidate_that_held_out_images_refused_is_listed_as_such():
    refused = FOUND[1].model_copy(update={"notes": ("it failed on the held-out images, and was refused",)})

    assert "doesn't hold (held-out images)" in drawn(candidates_table((FOUND[0], refused)))


def test_what_can_not_be_chosen_by_is_one_line():
    untimed = (FOUND[0], FOUND[6])

    with pytest.raises(RequestError, match="choose one of speed, size, memory, accuracy"):
        best_for("beauty", FOUND, GOAL)
    with pytest.raises(RunError, match="measured the speed of no candidate"):
        best_for("speed", untimed, GOAL)
    with pytest.raises(RunError, match="measured nothing but the baseline"):
        best_for("size", FOUND[:1], GOAL)
    assert best_for("size", untimed, GOAL).number == 6


def test_a_candidate_is_named_by_number_or_by_what_only_one_is():
    assert named("3", FOUND).number == 3
    assert named("baseline (eager float32)", FOUND).number == 0
    with pytest.raises(RequestError, match=r"'7' names none of the run's candidates: choose a number of 0 baseline"):
        named("7", FOUND)
    with pytest.raises(RequestError, match="'eager float32' names several"):
        named("eager float32", FOUND)


def report_of(run: Path) -> RunReport:
    return RunReport.model_validate_json((run / "report.json").read_text())


def test_every_candidate_of_a_run_can_be_taken_and_loads(finished: Path, tmp_path: Path):
    report, before = report_of(finished), (finished / "best").resolve()

    for one in candidates(finished):
        taken = pick(finished, tmp_path / str(one.number), candidate=one.number)

        assert taken == one
        recipe = load(tmp_path / str(one.number)).recipe
        assert recipe.deployment.runtime == report.variants[one.number].evaluation.deployment.runtime
        written = b"".join(path.read_bytes() for path in (tmp_path / str(one.number)).iterdir())
        assert str(Path(report.request.model).parent).encode() not in written
    assert (finished / "best").resolve() == before


def test_a_refusal_is_told_of_the_attempt_that_it_names(finished: Path):
    report = report_of(finished)
    made_by = {each.deployed.model: each.number for each in report.attempts if each.deployed}
    row, number = next(
        (row, made_by[row.evaluation.model]) for row in report.variants if row.evaluation.model in made_by
    )
    deployment = row.evaluation.deployment.name

    def told(of: int) -> tuple[str, ...]:
        notes = (f"attempt {of} ({deployment}) lost 2.00 points of held-out images and was refused",)
        found = candidates_of(report.model_copy(update={"notes": notes, "kept_beside": None}))
        return next(one.notes for one in found if one.evaluation.model == row.evaluation.model)

    assert told(number + 1) == ()
    assert told(number) == (
        f"the run says: attempt {number} ({deployment}) lost 2.00 points of held-out images and was refused",
    )


def test_what_the_run_returned_keeps_its_verdict_and_its_card(finished: Path, tmp_path: Path):
    report = report_of(finished)
    (best,) = [one for one in candidates(finished) if one.is_judged]

    pick(finished, tmp_path / "best", candidate=best.number)

    assert best.terms == report.verdict.terms
    assert (tmp_path / "best" / "README.md").read_text() == (finished / "best" / "README.md").read_text()


def test_what_was_never_judged_says_so_in_its_card_and_on_the_terminal(finished: Path, tmp_path: Path):
    other = next(one for one in candidates(finished) if not one.is_judged and one.number)

    ended = call("pick", finished, "--candidate", other.number, "--output", tmp_path / "other")

    card = (tmp_path / "other" / "README.md").read_text()
    assert ended.exit_code == 0
    assert "never judged on held-out images" in card
    assert f"{other.evaluation.predictions.num_images:,} search images" in card
    assert "never judged on held-out images" in ended.stdout
    assert f"wrote {tmp_path / 'other'}" in ended.stdout
    assert {"accuracy", "size"} <= {term.name for term in other.terms}


def test_the_list_has_all_that_was_measured_and_a_front(finished: Path):
    found = candidates_of(report_of(finished))

    listed = json.loads(call("pick", finished, "--json").stdout)
    shown = " ".join(call("pick", finished).stdout.split())

    assert [one["number"] for one in listed] == list(range(len(found)))
    assert any(one.is_on_front for one in found)
    # However wide the terminal is that another test has left.
    assert "what the run measured, on search images" in shown
    assert all(one.name in drawn(candidates_table(found)) for one in found)
    smallest = min(found, key=lambda one: one.evaluation.footprint.size_bytes)
    assert smallest.is_on_front or any(
        one.evaluation.footprint.size_bytes == smallest.evaluation.footprint.size_bytes and one.is_on_front
        for one in found
    )


def test_a_contract_that_does_not_hold_names_the_terms_that_are_missed():
    terms = (
        Term(name="accuracy", required=0.01, measured=0.0, holds=True),
        Term(name="speed", required=1.0, measured=0.5, holds=False),
        Term(name="size", required=0.5, measured=0.9, holds=False),
    )

    table = candidates_table((FOUND[0], FOUND[1].model_copy(update={"terms": terms})))

    assert "doesn't hold (speed, size)" in drawn(table)


def test_a_returned_baseline_is_not_said_to_be_judged():
    assert "held-out" not in drawn(picked_table(FOUND[0].model_copy(update={"is_judged": True})))


def test_a_bad_pick_is_one_line_and_writes_nothing(finished: Path, tmp_path: Path):
    unfinished = tmp_path / "unfinished"
    unfinished.mkdir()
    shutil.copy(finished / "request.json", unfinished)
    (tmp_path / "mine").mkdir()
    out = tmp_path / "out"

    for arguments, says in (
        ((finished, "--objective", "size"), "name a folder to write it to"),
        ((finished, "--output", out), "name an objective or a candidate"),
        ((finished, "--objective", "size", "--candidate", 1, "--output", out), "one of both"),
        ((finished, "--objective", "beauty", "--output", out), "choose one of speed, size, memory, accuracy"),
        ((finished, "--candidate", 99, "--output", out), "names none of the run's candidates"),
        ((finished, "--candidate", 1, "--output", tmp_path / "mine"), "exists already"),
        ((unfinished, "--objective", "size", "--output", out), "has no report yet"),
        ((tmp_path, "--objective", "size", "--output", out), "is no run folder: it has no request.json"),
        ((tmp_path / "nowhere",), "is no run folder: there is no such folder"),
    ):
        ended = call("pick", *arguments)
        assert ended.exit_code == 2, arguments
        assert says in ended.stderr
    assert not out.exists()
    assert list((tmp_path / "mine").iterdir()) == []


def test_a_candidate_that_is_damaged_or_gone_is_named(finished: Path, tmp_path: Path):
    run = Path(shutil.copytree(finished, tmp_path / "run", symlinks=True))
    first, second = (run / row.evaluation.model.path for row in report_of(finished).variants[:2])
    (first / "preprocessor_config.json").write_text("{}")
    shutil.rmtree(second)

    with pytest.raises(ArtifactError, match=r"preprocessor_config\.json' isn't the file that was saved"):
        pick(run, tmp_path / "out", candidate=0)
    with pytest.raises(ArtifactError, match="is no saved model"):
        pick(run, tmp_path / "out", candidate=1)
    assert not (tmp_path / "out").exists()
