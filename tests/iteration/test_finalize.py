"""The final choice on scripted jobs: who is tested on the held-out images, in what order, and what is returned."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import made
import numpy as np

from profiling_agent.evaluation.openings import share
from profiling_agent.evaluation.predictions import write_predictions
from profiling_agent.iteration.evaluator import Evaluator, Settings
from profiling_agent.iteration.finalize import FinalChoice, finalize
from profiling_agent.iteration.heldout import ACCURACY_ERROR
from profiling_agent.jobs.tasks import Evaluated
from profiling_agent.records import (
    Acquired,
    Footprint,
    Journal,
    ModelSource,
    Opening,
    Outcome,
    Predictions,
    Race,
    SplitInfo,
    Variant,
)

NUM_IMAGES = 1000


@dataclass
class Script:
    """Jobs that answer at once: `lost` says how many of a thousand held-out images each model gets wrong."""

    root: Path
    lost: dict[str, int]
    opened: list[str] = field(default_factory=list[str])
    fresh: list[str | None] = field(default_factory=list[str | None])

    def path(self, ref: Any) -> Path:
        return self.root / ref.path

    def run(self, task: Any) -> Any:
        return getattr(self, type(task).__name__)(task)

    def OpenHeldoutTask(self, task: Any) -> Opening:  # noqa: N802
        self.opened.append(task.candidate.path.removeprefix("jobs/"))
        self.fresh.append(task.fresh)
        return Opening(number=len(self.opened), share=share(len(self.opened)), fresh=task.fresh)

    def EvaluateTask(self, task: Any) -> Evaluated:  # noqa: N802
        assert task.split.name == "heldout", "what was measured on the search images is in the journal"
        name = task.model.path.removeprefix("jobs/")
        predicted = np.zeros(task.num_images, dtype=np.int64)
        predicted[: self.lost.get(name, 0)] = 1
        file = made.ref(f"{name}-answers", "predictions")
        self.path(file).parent.mkdir(exist_ok=True, parents=True)
        write_predictions(self.path(file), predicted, np.zeros_like(predicted))
        return Evaluated(
            footprint=Footprint(params=500, macs=500, parameter_bytes=1000, size_bytes=1000),
            predictions=Predictions(
                split="heldout", num_images=len(predicted), num_correct=int((predicted == 0).sum()), files=(file,)
            ),
        )

    def RaceTask(self, task: Any) -> Race:  # noqa: N802
        results = [
            made.race_result(
                ref.path.removeprefix("jobs/"), 1.0 if variant is Variant.BASELINE else 2.0, 1.9, 2.1, variant
            )
            for variant, ref in task.entries
        ]
        return Race(results=tuple(results), num_repeats=12, num_sessions=1)


def split(name: Any) -> SplitInfo:
    return SplitInfo(name=name, source_split="test", num_images=NUM_IMAGES, file=made.ref(name, "split"))


def attempt(number: int, *, lost: int, macs: int) -> Any:
    """Return an attempt that was accepted, and whose float32 model wasn't."""
    pruned = made.evaluation(f"pruned{number}", Variant.PRUNED, correct=500)
    done = made.attempt(number, 0.5, accepted=True, correct=900 - lost, macs=macs, size_bytes=1000)
    return done.model_copy(update={"pruned": pruned})


def chosen(root: Path, attempts: tuple[Any, ...], lost: dict[str, int], **settings: Any) -> tuple[FinalChoice, Script]:
    script: Any = Script(root, lost)
    acquired = Acquired(
        source=ModelSource(name="m", architecture="A", device="cpu"),
        calibration=split("calibration"),
        search=split("search"),
        heldout=split("heldout"),
        labels=(),
    )
    evaluator = Evaluator(
        jobs=script,
        acquired=acquired,
        baseline=made.BASELINE.model,
        profile=made.profile(),
        goal=made.GOAL.model_copy(update={"max_accuracy_drop": 0.02, "max_size_ratio": 1.0}),
        settings=Settings(batch_size=4, seed=0, **settings),
    )
    return finalize(evaluator, Journal(baseline=made.BASELINE, attempts=attempts)), script


BOLD, MILD = attempt(1, lost=8, macs=400), attempt(2, lost=2, macs=600)


def test_the_cheapest_that_keeps_the_contract_there_too_is_returned_and_nobody_else_is_tested(tmp_path: Path):
    final, script = chosen(tmp_path, (BOLD, MILD), {"both1": 5})
    assert final.winner.attempt == 1
    assert final.verdict.outcome is Outcome.MET
    assert script.opened == ["both1"]
    assert final.kept_beside is None


def test_where_it_fails_the_milder_one_is_tested_at_the_error_that_is_left(tmp_path: Path):
    final, script = chosen(tmp_path, (BOLD, MILD), {"both1": 60, "both2": 1})
    assert script.opened == ["both1", "both2"]
    assert final.winner.attempt == 2
    assert final.verdict.outcome is Outcome.MET
    assert final.kept_beside is not None
    assert final.kept_beside.attempt == 1
    assert any("attempt 1 lost 0.0600 of top-1 on 1000 held-out images and was refused" in note for note in final.notes)
    assert any(f"{ACCURACY_ERROR * share(2):.2%}" in note for note in final.notes)


def test_a_bolder_one_is_no_choice_after_a_mild_one_failed(tmp_path: Path):
    bold, mild = attempt(1, lost=8, macs=600), attempt(2, lost=2, macs=400)
    final, script = chosen(tmp_path, (bold, mild), {"both2": 60})
    assert script.opened == ["both2"]
    assert final.winner.variant is Variant.BASELINE


def test_where_all_fail_the_baseline_is_returned_and_the_verdict_is_on_the_first(tmp_path: Path):
    final, script = chosen(tmp_path, (BOLD, MILD), {"both1": 60, "both2": 90})
    assert script.opened == ["both1", "both2"]
    assert final.winner.variant is Variant.BASELINE
    assert final.heldout_winner == final.heldout_baseline
    assert (final.verdict.outcome, final.verdict.binding) == (Outcome.NEAREST_MISS, "accuracy")
    assert "lost 0.0600" in final.verdict.explanation
    assert final.kept_beside is not None
    assert final.kept_beside.attempt == 1


def test_no_more_than_three_are_tested(tmp_path: Path):
    ladder = tuple(attempt(number, lost=10 - 2 * number, macs=400 + number) for number in range(1, 6))
    _, script = chosen(tmp_path, ladder, {f"both{number}": 100 for number in range(1, 6)})
    assert script.opened == ["both1", "both2", "both3"]


def test_a_fresh_ledger_is_begun_once_a_run(tmp_path: Path):
    final, script = chosen(tmp_path, (BOLD, MILD), {"both1": 60}, fresh_ledger="new photographs")
    assert script.fresh == ["new photographs", None]
    assert any(note.endswith("afresh: new photographs") for note in final.notes)


def test_without_a_candidate_the_held_out_images_are_opened_for_nobody(tmp_path: Path):
    final, script = chosen(tmp_path, (), {})
    assert script.opened == []
    assert final.winner.variant is Variant.BASELINE
