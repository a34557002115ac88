"""The paper's method on scripted jobs: cuts by weights alone, nothing tuned, and latency, timed once, as the third of its keys."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sample_records
from search import scripted
from search.scripted import Jobs, deployed

from profiling_agent.jobs import tasks
from profiling_agent.schemas import DeployedModel, Deployment, Headline, Journal, Plan, PrunedModel, Tuned
from profiling_agent.search.attempt import measure_attempt, prune_attempt, quantize_attempt
from profiling_agent.search.evaluator import Evaluator
from profiling_agent.search.selection import ranked


@dataclass
class Script(Jobs):
    """Each cut is a model of its own, whose latency is given by how many came before."""

    latencies_ms: tuple[float, ...] = (3.0, 2.0)

    def PruneTask(self, task: Any) -> PrunedModel:  # noqa: N802
        return PrunedModel(model=sample_records.ref(f"p{len(self.of(tasks.PruneTask))}"), cuts=task.cuts)

    def HeadlineTask(self, task: Any) -> Headline:  # noqa: N802
        latency = sample_records.STATS.model_copy(
            update={"median_ms": self.latencies_ms[int(task.model.sha256[1:]) - 1]}
        )
        return Headline(latency=latency, peak_memory_bytes=1)

    def TuneTask(self, _task: Any) -> Tuned:  # noqa: N802
        return Tuned(kl=0.1, num_images=32)

    def DeployTask(self, task: Any) -> DeployedModel:  # noqa: N802
        return deployed(task, "int8")

    def EvaluateTask(self, task: Any) -> tasks.Evaluated:  # noqa: N802
        return self.evaluated(task, np.zeros(len(task.split.rows(task.shard))))


def evaluator(script: Script, **goal: Any) -> Evaluator:
    profile = sample_records.profile()
    evidence = sample_records.evidence(profile.units, {unit.name: (0.001, 0.002) for unit in profile.units})
    asked: dict[str, Any] = {"selection": "paper", "calibrate": False} | goal
    return scripted.evaluator(
        script, baseline=sample_records.ref("m0"), profile=profile.model_copy(update={"evidence": evidence}), **asked
    )


def attempted(asked: Evaluator, *ratios: float) -> Journal:
    journal = scripted.open_journal(asked)
    for ratio in ratios:
        prepared = quantize_attempt(asked, prune_attempt(asked, sample_records.plan(ratio)), None)
        journal = sample_records.with_attempt(journal, measure_attempt(asked, prepared, journal))
    return journal


@pytest.mark.parametrize("calibrate", [True, False])
def test_without_calibration_the_weights_alone_decide_nothing_makes_up_for_the_cut_and_no_layer_is_measured(
    tmp_path: Path, calibrate: bool
):
    script = Script(tmp_path)
    asked, dynamic = evaluator(script, calibrate=calibrate), Deployment(scheme="dynamic")

    prune_attempt(asked, sample_records.plan(0.25))
    option = asked.deployer.make(sample_records.ref("m0"), dynamic, choose_layers=True)

    (task,) = script.of(tasks.PruneTask)
    assert task.compensate is calibrate
    assert bool(task.keep) is calibrate
    assert [cut.keep for cut in task.cuts] == [384, 384]
    assert option.deployed is not None
    assert len(script.of(tasks.TuneTask)) == calibrate


def test_of_attempts_that_are_as_accurate_and_as_large_the_faster_is_the_papers_best(tmp_path: Path):
    asked = evaluator(Script(tmp_path, latencies_ms=(3.0, 1.9, 1.5)))

    journal = attempted(asked, 0.25, 0.375, 0.5)

    assert journal.baseline_latency_ms == 2.0
    assert [attempt.latency_ms for attempt in journal.attempts] == [3.0, 1.9, 1.5]
    # The first is as accurate and as large as the baseline, and slower: it doesn't beat it. A resumed run ranks alike.
    for kept in (journal, Journal.model_validate_json(journal.model_dump_json())):
        assert [candidate.attempt for candidate in ranked(kept, asked.goal)] == [3, 2]


def test_a_plan_that_cuts_nothing_is_none_of_the_papers(tmp_path: Path):
    assert prune_attempt(evaluator(Script(tmp_path)), Plan()).pruned_model is None
